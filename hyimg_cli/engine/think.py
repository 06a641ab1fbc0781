"""The AR stage: text, token by token, and the ratio token behind it."""

# Legend: V vocabulary
from collections.abc import Generator, Sequence
from typing import cast

import torch
from torch import FloatTensor, LongTensor, Tensor
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hyimg_cli.models.protocols import Context, MixedModel, Written
from hyimg_cli.spec.events import ThinkToken
from hyimg_cli.spec.job import ImageJob, TextSampling


class TextSampler:
    """Picks a token from logits: temperature, then top-k, then top-p, by a generator of its own."""

    def __init__(self, sampling: TextSampling) -> None:
        self._generator = torch.Generator().manual_seed(sampling.seed)
        self._is_greedy = sampling.temperature == 0
        self._warpers = LogitsProcessorList()
        if not self._is_greedy:
            self._warpers.append(TemperatureLogitsWarper(float(sampling.temperature)))
            if sampling.top_k:
                self._warpers.append(TopKLogitsWarper(sampling.top_k))
            if sampling.top_p < 1:
                self._warpers.append(TopPLogitsWarper(sampling.top_p))

    def __call__(self, logits_V: Tensor) -> int:
        if self._is_greedy:
            return int(logits_V.argmax())
        no_history = torch.zeros(1, 0, dtype=torch.long)
        warped = self._warpers(cast(LongTensor, no_history), cast(FloatTensor, logits_V[None]))
        chosen = torch.multinomial(warped.softmax(dim=-1), 1, generator=self._generator)
        return int(chosen)


def think(
    job: ImageJob, model: MixedModel, context: Context
) -> Generator[ThinkToken, None, Written]:
    """Complete the job's AR stage in `context`; the result is the generator's return value.

    A job without text to write performs no decode step: where it needs a ratio, that is the best of
    the prompt's own last logits.
    """
    if context.buffer is None:
        return Written()
    if not job.writes_text:
        return Written(ratio_id=_best(model.text_logits(context), model.ratio_ids()))
    return (yield from _write(job, model, context))


def _write(
    job: ImageJob, model: MixedModel, context: Context
) -> Generator[ThinkToken, None, Written]:
    script, sample = model.script(job), TextSampler(job.text)
    written = model.opening_ids(job)
    unwritten = len(context.ids) - len(written)
    limit = len(written) + model.text_budget(job, context)
    is_truncated, steps = False, 0
    while not script.is_done(written[-1]):
        if len(written) >= limit and not is_truncated and script.is_open(written):
            is_truncated = True
            written = script.forced_ending(written)
            if not job.size.is_auto:
                break
        allowed = script.allowed(written[-1])
        if allowed is not None and len(allowed) == 1:
            written.append(allowed[0])
            continue
        unfed = written[len(context.ids) - unwritten :]
        if unfed:
            model.feed(context, unfed)
            steps += 1
        logits_V = model.text_logits(context)
        written.append(sample(logits_V) if allowed is None else _best(logits_V, allowed))
        yield ThinkToken(job.custom_id, len(written))
    ratio_id = written[-1] if job.size.is_auto else None
    text_ids = script.text_of(written)
    return Written(tuple(text_ids), model.decode_text(text_ids), is_truncated, ratio_id, steps)


def _best(logits_V: Tensor, ids: Sequence[int]) -> int:
    """The id with the largest logit; the first of equals."""
    return ids[int(logits_V[torch.tensor(ids)].argmax())]
