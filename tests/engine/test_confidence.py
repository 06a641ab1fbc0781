"""What a model found of its own text: the sum of log p over the tokens that it chose freely."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine.conftest import studio_of
from engine.test_shared_texts import run, sharing

from hyimg_cli.kv.tree import KVTree
from hyimg_cli.manifest.written import note
from hyimg_cli.pipelines.image.confidence import read_confidence
from hyimg_cli.pipelines.image.stages import ImageRequest
from hyimg_cli.pipelines.image.think import CachedText, DecodeRequest
from hyimg_cli.spec.events import TextConfidence
from hyimg_cli.spec.job import ImageJob, SizeRequest

# Leaves much open, so texts differ.
VAGUE = "put something next to the ball"


def confidence(end: Any) -> TextConfidence | None:
    assert isinstance(end, ImageRequest)
    assert end.cached is not None
    return end.cached.confidence


@pytest.mark.parametrize("temperature", [0.0, 1.7])
@pytest.mark.parametrize("bot_task", ["think_recaption", "recaption"])
def test_the_sum_over_free_tokens_before_anything_is_masked(
    several_ratios: Any,
    job: ImageJob,
    monkeypatch: pytest.MonkeyPatch,
    temperature: float,
    bot_task: Any,
) -> None:
    """Against the logits as the network gives them, with the ids read off the finished text.

    Size `auto`: the ratio is chosen among some ids, after the text, and does not count.
    """
    family = several_ratios
    text = replace(job.text, temperature=temperature, top_k=3, top_p=0.5, max_new_tokens=64)
    one = replace(job, model=family.card.model, bot_task=bot_task, text=text, num_inference_steps=2)
    logits_of, seen = family.network.text_logits, list[torch.Tensor]()
    accept, accepted = DecodeRequest.accept, list[tuple[bool, int]]()

    def spied(hidden_RM: torch.Tensor) -> torch.Tensor:
        logits_RV: torch.Tensor = logits_of(hidden_RM)
        seen.append(logits_RV[0].double())
        return logits_RV

    def heard(self: Any, choice: Any, id_: int, logprob: float) -> None:
        accepted.append((choice.is_free, id_))
        accept(self, choice, id_, logprob)

    monkeypatch.setattr(family.network, "text_logits", spied)
    monkeypatch.setattr(DecodeRequest, "accept", heard)
    (end,) = run([one], studio_of(family), 1).values()
    found = confidence(end)
    assert found is not None
    chosen = [
        (id_, float(logits_V.log_softmax(0)[id_]))
        for (is_free, id_), logits_V in zip(accepted, seen, strict=True)
        if is_free
    ]
    assert not all(is_free for is_free, _ in accepted), "the ratio was chosen among some"
    assert found.tokens == len(chosen)
    assert found.logprob == pytest.approx(sum(logprob for _, logprob in chosen), abs=1e-4)
    ids = [id_ for id_, _ in chosen]
    closing = family.prompter.vocabulary.end_think
    start = ids.index(closing) + 1 if bot_task == "think_recaption" else 0
    assert found.recaption_tokens == len(ids) - start
    described = sum(logprob for _, logprob in chosen[start:])
    assert found.recaption_logprob == pytest.approx(described, abs=1e-4)


def test_a_batch_gives_the_bits_of_each_alone_and_a_shared_text_its_writers(
    family: Any, job: ImageJob
) -> None:
    text = replace(job.text, temperature=1.5, max_new_tokens=40)
    seeds = (1, 2, 3, 3, 3, 4)
    jobs = [
        replace(job, custom_id=str(n), prompt=VAGUE, ar_seed=seed, text=text, num_inference_steps=2)
        for n, seed in enumerate(seeds)
    ]
    alone = [confidence(*run([one], studio_of(family), 1).values()) for one in jobs]
    assert len({found.logprob for found in alone if found}) == 4
    for stages in (studio_of(family), sharing(family, KVTree(10**9))):
        ends = run(jobs, stages, 6)
        assert [confidence(ends[one.custom_id]) for one in jobs] == alone


def test_a_given_text_has_none_and_a_replayed_one_its_writers(family: Any, job: ImageJob) -> None:
    drawn = replace(job, num_inference_steps=2, size=SizeRequest(64, 64))
    given = replace(drawn, cot_text="<recaption>a red circle</recaption>")
    (end,) = run([given], studio_of(family), 1).values()
    assert confidence(end) is None
    (written,) = run([drawn], studio_of(family), 1).values()
    assert isinstance(written, ImageRequest)
    cached = written.cached
    assert cached is not None
    assert cached.confidence is not None
    assert CachedText.of_record(json.loads(json.dumps(cached.record))) == cached
    facts = {"bot_task": job.bot_task, **cached.note}
    ids = cached.text.ids or ()
    record = json.dumps(note(ids, cached.text.text, facts))
    (again,) = run(
        [replace(drawn, cot_token_ids=ids, written_json=record)], studio_of(family), 1
    ).values()
    assert confidence(again) == cached.confidence


@pytest.mark.parametrize("record", ["sure", {"logprob": "low"}, {"tokens": 3}, [1], 7])
def test_a_record_that_somebody_edited_is_none(record: Any) -> None:
    assert read_confidence(record) is None
