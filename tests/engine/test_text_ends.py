"""Where a text ends: against the official loop and our rule about it, each written out plainly."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import diagonal
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from hyimg_cli.models.hunyuan_image3.script import Script
from hyimg_cli.models.hunyuan_image3.vocabulary import Vocabulary
from hyimg_cli.models.protocols import Context
from hyimg_cli.pipelines.image.sampling import Draw, choose, uniform_numbers
from hyimg_cli.pipelines.image.think import DecodeLoop, DecodeRequest
from hyimg_cli.spec.job import ImageJob, SizeRequest
from hyimg_cli.spec.options import TextSampling

WORDS = Vocabulary.from_folder(
    Path(__file__).parents[1] / "parity" / "tiny" / "checkpoint", base_size=256, ratio_count=37
)
# With the size of a picture that the job has.
PROMPT = (1, WORDS.ratios[4], 3)
LIMIT = 16
JOBS = 60
# The ratios that a checkpoint's card lets it draw; the official loop knows no such limit.
DRAWABLE = WORDS.ratios[3:]
OPENERS = (WORDS.answer, WORDS.boi, WORDS.img_size, *WORDS.ratios)
CLOSING = {
    "think": WORDS.end_think,
    "recaption": WORDS.end_recaption,
    "think_recaption": WORDS.end_recaption,
}
# Of about 100 tokens most are words, some are tags, a few have no place in a text.
CHANCES = {
    **dict.fromkeys(range(70, 75), 14.0),
    WORDS.end_think: 10.0,
    WORDS.end_recaption: 8.0,
    **dict.fromkeys((WORDS.think, WORDS.recaption, WORDS.end_answer, WORDS.eos, WORDS.img), 1.0),
    **dict.fromkeys((WORDS.answer, WORDS.boi, WORDS.img_size), 1.5),
    **dict.fromkeys(WORDS.ratios[:6], 0.8),
}


def _logits_V(ids: Sequence[int]) -> Tensor:
    """What follows some ids: depends on every one of them."""
    logits_V = np.full(512, -30.0, np.float32)
    logits_V[list(CHANCES)] = np.log(list(CHANCES.values()))
    noise_V = np.random.default_rng([1, 2, *ids[2:]]).normal(scale=0.5, size=512)
    return torch.from_numpy(logits_V + noise_V.astype(np.float32))


def _processed_V(text: Sequence[int], penalty: float) -> Tensor:
    """The logits behind a text as transformers' `generate` hands them to the official processors:
    its own come first.
    """
    ids: Any = torch.tensor([[*PROMPT, *text]])
    scores: Any = _logits_V(ids[0].tolist())[None]
    processed: Tensor = RepetitionPenaltyLogitsProcessor(penalty)(ids, scores)[0]
    return processed


def _best_ratio(text: Sequence[int], ratios: Sequence[int], penalty: float) -> int:
    logits_V = _processed_V(text, penalty)
    return max(ratios, key=lambda ratio: float(logits_V[ratio]))


def _opening(job: ImageJob, template: str) -> list[int]:
    """What comes between a text and the ratio token."""
    answer = [WORDS.answer] if template == "instruct" else []
    return [*answer, WORDS.boi, WORDS.img_size] if job.size.is_auto else []


def official(job: ImageJob, template: str, penalty: float) -> tuple[list[int], list[int]]:
    """The loop of HunyuanImage-3.0-Instruct: one decode, two logits processors, its stop tokens.

    Its tokens, the trigger first, and the places of those that were sampled freely.
    """
    needs_ratio, closing = job.size.is_auto, CLOSING[job.bot_task]
    transitions = {closing: _opening(job, template)}
    if job.bot_task == "think_recaption":
        transitions[WORDS.end_think] = [WORDS.recaption]
    stops = WORDS.ratios if needs_ratio else (closing, WORDS.end_recaption)
    tokens = [WORDS.recaption if job.bot_task == "recaption" else WORDS.think]
    free: list[int] = []
    forced: list[int] = []
    uniform, text = uniform_numbers(job.ar_seed, LIMIT), job.text
    while len(tokens) <= LIMIT:
        last = tokens[-1]
        forced = forced or transitions.pop(last, [])  # each fires once
        if forced:
            token, *forced = forced
        elif needs_ratio and last == WORDS.img_size:
            token = _best_ratio(tokens, WORDS.ratios, penalty)
        else:
            draw = Draw(text.temperature, text.top_k, text.top_p, uniform[len(free)])
            token = int(choose(_processed_V(tokens, penalty)[None], [draw]))
            free.append(len(tokens))
        tokens.append(token)
        if token in stops:
            break
    return tokens, free


@dataclass(frozen=True)
class End:
    """The text with its tags, why it was cut, the ratio token; `kind`: what ended it."""

    text: list[int]
    cut: str
    ratio: int | None
    kind: str


def by_rule(job: ImageJob, template: str, penalty: float) -> End:
    """The official text, but closed before the first token in it that opens a picture."""
    tokens, free = official(job, template, penalty)
    closing = CLOSING[job.bot_task]
    stray = next((place for place in free if tokens[place] in OPENERS), None)
    cut = ""
    if stray is not None:
        kind = WORDS.name(tokens[stray])
        cut = f"the text ended early at {kind}, before {WORDS.name(closing)}"
        text = _closed(tokens[:stray])
    elif closing in tokens:
        kind, text = "closed", tokens[: tokens.index(closing) + 1]
    elif not job.size.is_auto and tokens[-1] == WORDS.end_recaption:
        kind, text = "closed", tokens
    else:
        kind, text = "limit", _closed(tokens)
        cut = "the text reached its token limit; its open tag was closed"
    if not job.size.is_auto:
        return End(text, cut, None, kind)
    opened = [*text, *_opening(job, template)]
    ratio = _best_ratio(opened, DRAWABLE, penalty)
    if not cut and tokens[-1] in WORDS.ratios:
        assert tokens[:-1] == opened
        assert ratio == tokens[-1] or tokens[-1] not in DRAWABLE
    if stray is not None and tokens[stray] in DRAWABLE:
        ratio = tokens[stray]
    return End(text, cut, ratio, kind)


def _closed(text: list[int]) -> list[int]:
    """With the last tag closed that is open; without a recaption that is a tag alone."""
    if text[-1] == WORDS.recaption and WORDS.end_think in text:
        text = text[:-1]
    closing = {WORDS.think: WORDS.end_think, WORDS.recaption: WORDS.end_recaption}
    places = [n for n, id_ in enumerate(text) if id_ in closing]
    open_tags = [text[n] for n in places if closing[text[n]] not in text[n:]]
    return [*text, *(closing[tag] for tag in open_tags[-1:])]


class Rows:
    """Stands for a buffer: the ids whose rows are committed."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = list(ids)

    @property
    def length(self) -> int:
        return len(self.ids)

    def truncate(self, length: int) -> None:
        del self.ids[length:]


class Model:
    """Stands for a model: a hidden state is all ids up to its row."""

    def __init__(self, template: Any, penalty: float) -> None:
        self.template = template
        self.card = SimpleNamespace(defaults=SimpleNamespace(repetition_penalty=penalty))
        self.rows_fed = 0

    def script(self, job: ImageJob) -> Script:
        return Script(WORDS, job.bot_task, job.size.is_auto, self.template, DRAWABLE)

    def text_budget(self, job: ImageJob, _context: Context) -> int:
        return job.text.max_new_tokens

    def context(self, job: ImageJob) -> Context:
        ids = [*PROMPT, *self.script(job).opening]
        rows: Any = Rows(ids)
        return Context(ids, rows, torch.tensor(ids))

    def feed(self, runs: Any) -> None:
        for context, ids in runs:
            context.buffer.ids.extend(int(id_) for id_ in ids)
            self.rows_fed += len(ids)
            context.hidden_M = torch.tensor(context.buffer.ids)

    def text_logits(self, contexts: Any) -> Tensor:
        return torch.stack([_logits_V(context.hidden_M.tolist()) for context in contexts])

    def decode_text(self, ids: Sequence[int]) -> str:
        return WORDS.decode(ids)


def _written(jobs: Sequence[ImageJob], model: Any, *, lag: int, batch: int) -> list[DecodeRequest]:
    """Every job's text, at most `batch` of them at a time; one joins as another leaves."""
    decodings = [DecodeRequest(job, model, model.context(job)) for job in jobs]
    loop = DecodeLoop(model, lag=lag)
    while going := [decoding for decoding in decodings if not decoding.is_done]:
        loop.step(going[:batch])
    loop.settle()
    return decodings


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize(
    ("template", "penalty"), [("instruct", 1.0), ("pretrain", 1.0), ("instruct", 1.4)]
)
@pytest.mark.parametrize(
    ("size", "bot_task"),
    diagonal([SizeRequest(), SizeRequest(256, 256)], ["recaption", "think_recaption", "think"]),
    ids=str,
)
def test_a_text_ends_where_the_rule_says(
    job: ImageJob, bot_task: Any, size: SizeRequest, template: Any, penalty: float, lag: int
) -> None:
    """Text, warning and ratio; and the rows that are kept are those of the picture's sequence."""
    base = replace(job, bot_task=bot_task, size=size)
    jobs = [replace(base, text=TextSampling(1.0, 0, 1.0, LIMIT), ar_seed=n) for n in range(JOBS)]
    model: Any = Model(template, penalty)
    kinds: Counter[str] = Counter()
    rows = 0
    for one, decoding in zip(jobs, _written(jobs, model, lag=lag, batch=7), strict=True):
        end = by_rule(one, template, penalty)
        written, context = decoding.written(model).text, decoding.context
        assert written.ids == tuple(end.text)
        assert (written.cut, written.ending[-1] if written.ending else None) == (end.cut, end.ratio)
        buffer: Any = context.buffer
        assert context.ids == buffer.ids
        sequence = [*PROMPT, *end.text, *_opening(one, template)]
        assert context.ids == sequence[: len(context.ids)]
        rows += len(context.ids) - len(PROMPT) - 1 + decoding.overdecoded
        kinds[end.kind.rstrip("0123456789>")] += 1
    assert rows == model.rows_fed
    every = {"closed", "limit", "<answer", "<boi", "<img_size_", "<img_ratio_"}
    # Under a penalty words run out, and few texts reach their limit.
    assert kinds.keys() == every if penalty == 1 else len(kinds) > 2
