"""The AR stage: sampling, seeds, limits, and the jobs that have nothing to write."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine.conftest import studio_of
from event_kinds import is_token
from transformers import RepetitionPenaltyLogitsProcessor

from hyimg_cli.errors import JobError
from hyimg_cli.memory.footprint import Together
from hyimg_cli.pipelines.clock import PhaseClock
from hyimg_cli.pipelines.image.admission import WholeBatches
from hyimg_cli.pipelines.image.batch import ContinuousBatch
from hyimg_cli.pipelines.image.stages import ImageRequest
from hyimg_cli.pipelines.queue import Ticket
from hyimg_cli.settings.run import ReuseConfig
from hyimg_cli.spec.job import ImageJob, SizeRequest

Tell = Callable[..., Any]


def test_the_text_depends_on_its_own_seed_alone(drawn: Tell, job: ImageJob) -> None:
    # Hot enough for a trained model not to say the same whatever the seed.
    hot = replace(job.text, temperature=5.0, top_p=1.0)
    job = replace(job, text=hot, num_inference_steps=1)
    first = drawn(job).picture.text.ids
    assert drawn(replace(job, seed=99)).picture.text.ids == first
    other = replace(job, text=hot, ar_seed=8)
    assert drawn(other).picture.text.ids != first


def test_the_limit_closes_the_text(drawn: Tell, job: ImageJob) -> None:
    job = replace(job, text=replace(job.text, max_new_tokens=5, temperature=2.0))
    result = drawn(job)
    written = result.picture.text
    if written.cut:  # random weights practically never close a tag in five words
        assert written.text.endswith(("</think>", "</recaption>"))
        assert len(written.ids) == 1 + 5 + 1
    assert sum(is_token(event) for event in result.events) >= 5


@pytest.mark.parametrize(
    "changes",
    [
        {"bot_task": "none"},
        {"bot_task": "none", "size": SizeRequest(64, 64)},
        {"cot_text": "<recaption>a large red circle</recaption>"},
        {"cot_text": "a large red circle", "size": SizeRequest(64, 64)},
    ],
)
def test_nothing_to_write_means_no_decode_step(
    drawn: Tell, job: ImageJob, changes: dict[str, Any]
) -> None:
    result = drawn(replace(job, **changes))
    assert result.picture.reuse.ar_decode_tokens == 0
    assert not any(is_token(event) for event in result.events)


def test_given_ids_draw_what_the_written_ones_drew(drawn: Tell, job: ImageJob) -> None:
    first = drawn(job)
    ids = first.picture.text.ids
    again = drawn(replace(job, cot_token_ids=ids))
    for a, b in zip(first.velocities, again.velocities, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", [SizeRequest(), SizeRequest(64, 64)], ids=str)
def test_a_text_that_ends_early_is_closed_and_reused(
    drawn: Tell, family: Any, job: ImageJob, size: SizeRequest
) -> None:
    """No token of a picture is in it; reuse equals recompute, and so does the text, given."""
    job = replace(job, size=size, num_inference_steps=1)
    # As hot as this, one token in twenty opens a picture.
    hot = replace(job.text, temperature=9.0, top_k=0, top_p=1.0, max_new_tokens=60)
    jobs = (replace(job, text=hot, ar_seed=seed) for seed in range(9))
    cut, first = next((one, d) for one in jobs if "early" in (d := drawn(one)).picture.text.cut)
    written, report = first.picture.text, first.picture.reuse
    assert written.cut
    assert written.text.endswith(("</think>", "</recaption>"))
    assert not family.prompter.vocabulary.openers & set(written.ids)
    assert (report.status, report.ar_surplus_tokens) == ("hit", 0)
    assert report.branches[0].reused == report.ar_prefill_tokens + report.ar_decode_tokens
    recomputed = drawn(cut, ReuseConfig(kv_reuse=False))
    given = drawn(replace(cut, cot_token_ids=written.ids))
    for a, b, c in zip(first.velocities, recomputed.velocities, given.velocities, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(a, c, atol=1e-5, rtol=1e-5)


def test_a_given_text_changes_the_picture(drawn: Tell, job: ImageJob) -> None:
    texts = ("<recaption>red</recaption>", "<recaption>blue</recaption>")
    one, other = (drawn(replace(job, cot_text=text)).velocities[0] for text in texts)
    assert (one - other).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": "a <img> b"}, "control token <img>"),
        ({"cot_text": "<recaption>x<boi></recaption>"}, "control token <boi>"),
        ({"cot_token_ids": (0, 10**7)}, "has no token"),
        ({"prompt": "word " * 3000}, "too long"),
    ],
)
def test_text_that_would_break_the_sequence_fails_its_job(
    drawn: Tell, job: ImageJob, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(JobError, match=message):
        drawn(replace(job, **changes))


def test_a_repetition_penalty_holds_alone_and_in_company(
    family: Any, job: ImageJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    hot = replace(job.text, temperature=5.0, top_p=1.0)
    jobs = [replace(job, custom_id=f"{n}", text=hot, ar_seed=n) for n in range(3)]
    free = _texts(family, jobs, 3)
    _penalize(family, 1.5, monkeypatch)
    together = _texts(family, jobs, 3)
    assert together == _texts(family, jobs, 1)
    assert all(together[name] != free[name] for name in free)


def _texts(model: Any, jobs: list[ImageJob], size: int) -> dict[str, tuple[int, ...] | None]:
    stages = replace(studio_of(model), draws=False)
    batch = ContinuousBatch(
        WholeBatches(map(Ticket, jobs), stages, lambda since: PhaseClock(since, lambda: None)),
        Together(size, size),
    )
    return {one.job.custom_id: one.text.ids for one in batch.run() if isinstance(one, ImageRequest)}


def test_the_size_of_a_source_counts_as_said_before(
    drawn: Tell,
    several_ratios: Any,
    job: ImageJob,
    sources: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The ratio behind the prompt is chosen from logits that the prompt's own ratio has changed."""
    model = several_ratios
    asked = replace(job, bot_task="none", images=sources[:1], num_inference_steps=1)
    rows: list[tuple[list[int], torch.Tensor]] = []
    text_logits = type(model).text_logits

    def seen(self: Any, contexts: Any) -> torch.Tensor:
        logits_RV: torch.Tensor = text_logits(self, contexts)
        logits_RV -= logits_RV.max() + 1  # below 0 a penalty counts most
        rows.append((contexts[0].ids, logits_RV.clone()))
        return logits_RV

    monkeypatch.setattr(type(model), "text_logits", seen)
    free = drawn(asked, model=model).picture.text.ending
    _penalize(model, 1000.0, monkeypatch)
    found = drawn(asked, model=model).picture.text.ending
    ids, logits_RV = rows[-1]
    assert free[0] in ids, "a square source, a square picture"
    told: Any = (torch.tensor([ids]), logits_RV)
    processed = RepetitionPenaltyLogitsProcessor(1000.0)(*told)[0]
    assert found == (max(model.prompter.allowed_ratios, key=lambda id_: float(processed[id_])),)
    assert found != free


def _penalize(model: Any, penalty: float, monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = replace(model.card.defaults, repetition_penalty=penalty)
    monkeypatch.setattr(model, "card", replace(model.card, defaults=defaults))
