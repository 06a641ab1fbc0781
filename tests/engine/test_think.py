"""The AR stage: sampling, seeds, limits, and the jobs that have nothing to write."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from hyimg_cli.errors import JobError
from hyimg_cli.spec.events import ThinkToken
from hyimg_cli.spec.job import ImageJob, SizeRequest
from hyimg_cli.spec.run import ReuseConfig

Tell = Callable[..., Any]


def test_the_text_depends_on_its_own_seed_alone(drawn: Tell, job: ImageJob) -> None:
    # Hot enough for a trained model not to say the same whatever the seed.
    hot = replace(job.text, temperature=5.0, top_p=1.0)
    job = replace(job, text=hot, num_inference_steps=1)
    first = drawn(job).picture.text.ids
    assert drawn(replace(job, seed=99)).picture.text.ids == first
    other = replace(job, text=replace(hot, seed=8))
    assert drawn(other).picture.text.ids != first


def test_the_limit_closes_the_text(drawn: Tell, job: ImageJob) -> None:
    job = replace(job, text=replace(job.text, max_new_tokens=5, temperature=2.0))
    result = drawn(job)
    written = result.picture.text
    if written.is_truncated:  # random weights practically never close a tag in five words
        assert written.text.endswith(("</think>", "</recaption>"))
        assert len(written.ids) == 1 + 5 + 1
    assert sum(isinstance(event, ThinkToken) for event in result.events) >= 5


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
    assert result.picture.text.decode_steps == 0
    assert not any(isinstance(event, ThinkToken) for event in result.events)


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
    jobs = (replace(job, text=replace(hot, seed=seed)) for seed in range(9))
    cut, first = next((one, d) for one in jobs if "early" in (d := drawn(one)).picture.text.cut)
    written, report = first.picture.text, first.picture.reuse
    assert written.is_truncated
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
        ({"cot_token_ids": (0, 10**7)}, "is no token"),
        ({"prompt": "word " * 3000}, "positions"),
    ],
)
def test_text_that_would_break_the_sequence_fails_its_job(
    drawn: Tell, job: ImageJob, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(JobError, match=message):
        drawn(replace(job, **changes))
