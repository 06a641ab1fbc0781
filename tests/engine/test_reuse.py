"""Reuse equals recompute: velocities, pixels, and what a result line says about it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kv_rows import change
from layouts import shared_length

from hyimg_cli.diffusion.schedule import Step
from hyimg_cli.errors import JobError, ReuseError
from hyimg_cli.kernels import ops
from hyimg_cli.kernels.attention import masked_attention
from hyimg_cli.kv.tree import KVTree
from hyimg_cli.media.images import read_image
from hyimg_cli.models.hunyuan_image3 import model, rope
from hyimg_cli.models.protocols import Context, DenoiseInput, GeneratedText, Prefill
from hyimg_cli.pipelines.clock import PhaseClock
from hyimg_cli.pipelines.image.branches import BranchBuilder, Prefixes
from hyimg_cli.pipelines.image.prefill import prefill_together
from hyimg_cli.settings.run import ReuseConfig
from hyimg_cli.spec.job import ImageJob, SizeRequest

REUSE, RECOMPUTE = ReuseConfig(), ReuseConfig(kv_reuse=False)
SQUARE = SizeRequest(64, 64)
FIRST = Step(0, 1.0, 0.9, 1000.0, 900.0, -0.1)
Tell = Callable[..., Any]
LONG_PROMPT = "a small green triangle on the left of a plain white background, " * 6


def _assert_same_picture(ours: Any, theirs: Any) -> None:
    """Velocities within 1e-5; at most 0.2 % of the values off, by one level."""
    for a, b in zip(ours.velocities, theirs.velocities, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    off = np.abs(ours.picture.pixels.astype(int) - theirs.picture.pixels.astype(int))
    assert off.max() <= 1
    assert (off > 0).mean() <= 0.002


@pytest.mark.parametrize(
    ("images", "words", "prompt"),
    [(0, 2, "red"), (0, 120, LONG_PROMPT), (1, 2, LONG_PROMPT), (1, 120, "red"), (3, 2, "red")],
)
def test_reuse_equals_recompute(
    drawn: Tell,
    job: ImageJob,
    sources: tuple[str, ...],
    images: int,
    words: int,
    prompt: str,
) -> None:
    text = replace(job.text, max_new_tokens=words, temperature=1.0)
    job = replace(job, prompt=prompt, images=sources[:images], text=text)
    reused, recomputed = drawn(job, REUSE), drawn(job, RECOMPUTE)
    assert reused.picture.text.ids == recomputed.picture.text.ids
    _assert_same_picture(reused, recomputed)
    report, other = reused.picture.reuse, recomputed.picture.reuse
    assert (report.status, other.status) == ("hit", "recompute")
    positive, negative = report.branches
    # All that the AR stage was fed is taken over; the negative row shares [system, images].
    assert positive.reused == report.ar_prefill_tokens + report.ar_decode_tokens
    assert negative.reused < positive.reused
    for branch, fresh in zip(report.branches, other.branches, strict=True):
        assert branch.reused + branch.shared + branch.computed == fresh.computed
        assert (fresh.reused, fresh.shared) == (0, 0)


def test_with_a_ratio_to_choose_all_but_its_token_is_reused(
    several_ratios: Any, drawn: Tell, job: ImageJob
) -> None:
    """`<answer> <boi> <img_size>` are fed to choose the ratio, and so are there already."""
    job = replace(job, num_inference_steps=1)
    reused, recomputed = drawn(job, REUSE, several_ratios), drawn(job, RECOMPUTE, several_ratios)
    _assert_same_picture(reused, recomputed)
    assert reused.picture.reuse.branches[0].computed == 1
    assert reused.picture.text.ending[-1] in several_ratios.prompter.allowed_ratios


def test_a_given_size_leaves_the_closing_tag_to_compute(drawn: Tell, job: ImageJob) -> None:
    job = replace(job, size=SQUARE, bot_task="recaption")
    reused, recomputed = drawn(job, REUSE), drawn(job, RECOMPUTE)
    _assert_same_picture(reused, recomputed)
    # </recaption> <answer> <boi> <img_size> <img_ratio>: decided, but never fed. At the token limit
    # the tag is ours, and the last word before it was not fed either.
    is_truncated = bool(reused.picture.text.cut)
    assert reused.picture.reuse.branches[0].computed == 5 + is_truncated
    assert reused.picture.reuse.status == "hit"


@pytest.mark.parametrize("bot_task", ["none", "think", "recaption", "think_recaption"])
def test_every_bot_task(drawn: Tell, job: ImageJob, bot_task: Any) -> None:
    job = replace(job, bot_task=bot_task)
    _assert_same_picture(drawn(job, REUSE), drawn(job, RECOMPUTE))


@pytest.mark.parametrize("ahead", [1, 2, 9])
def test_rows_whose_reusable_lengths_differ_by_any_count(
    family: Any, drawn: Tell, job: ImageJob, sources: tuple[str, ...], ahead: int
) -> None:
    """A context that stops `ahead` tokens behind what both rows share, against no context."""
    job = replace(job, images=sources[:1], size=SQUARE, bot_task="none")
    image = read_image(Path(job.images[0]))
    encoded = [family.encode_source(image.pixels, image.digest)]
    canvas = family.canvas(job, encoded, GeneratedText())
    bucket, layout = canvas.bucket, canvas.branches[0].layout
    stop = shared_length(layout) + ahead
    buffer = family.new_buffer()
    with torch.no_grad():
        family.network.prefill(
            [Prefill(layout, layout.ids, [e.rows for e in encoded], buffer, stop)]
        )
    velocities, tokens = [], []
    for context in (Context(list(layout.ids[:stop]), buffer, None), Context([], None, None)):
        builder = BranchBuilder(
            family,
            canvas,
            encoded,
            prefixes=Prefixes(KVTree(0), "test") if context.buffer else None,
            clock=PhaseClock(0.0, lambda: None),
        )
        ((_, branches),) = prefill_together(family, [builder.build(context)], stop)
        assert not isinstance(branches, JobError)
        noise = family.initial_latents(bucket, 7)
        live = DenoiseInput(noise, FIRST, 3.0, branches[0])
        velocities += family.velocities([live])
        tokens.append(branches[1])
    torch.testing.assert_close(velocities[0], velocities[1], atol=1e-5, rtol=1e-5)
    assert tokens[0][0].reused == stop
    assert max(tokens[0][1].reused, tokens[0][1].shared) == shared_length(layout)


def test_another_source_image_changes_the_picture(
    drawn: Tell, job: ImageJob, sources: tuple[str, ...]
) -> None:
    job = replace(job, bot_task="none")
    pictures = [drawn(replace(job, images=(path,))).picture.pixels for path in sources]
    assert not np.array_equal(pictures[0], pictures[1])
    assert not np.array_equal(pictures[0], pictures[2])


def test_the_order_of_source_images_counts(
    drawn: Tell, job: ImageJob, sources: tuple[str, ...]
) -> None:
    job = replace(job, bot_task="none")
    one = drawn(replace(job, images=sources[:2])).picture.pixels
    other = drawn(replace(job, images=sources[1::-1])).picture.pixels
    assert not np.array_equal(one, other)


@pytest.mark.parametrize("behind", [4, 3, 2, 1], ids=["boi", "img_size", "img_ratio", "timestep"])
def test_each_special_token_reaches_the_image(
    drawn: Tell, family: Any, job: ImageJob, monkeypatch: pytest.MonkeyPatch, behind: int
) -> None:
    """Hiding the row `behind` tokens before the image from its queries changes the velocity."""
    job = replace(job, bot_task="none", size=SQUARE)
    honest = drawn(job)
    cells, last = 16, honest.picture.canvas.branches[0]

    def without_one(q_THD: Any, keys: Any, values: Any, is_causal: bool) -> Any:
        stop = keys.shape[1]
        if not is_causal and stop == last.live_stop:  # only the image's own queries see to the end
            kept = [slot for slot in range(stop) if slot != stop - cells - behind]
            keys, values = keys[:, kept], values[:, kept]
        return masked_attention(q_THD, keys, values, is_causal)

    for layer in family.network.model.layers:
        monkeypatch.setattr(layer.self_attn, "span_attention", without_one)
    hidden = drawn(job)
    difference = (honest.velocities[0] - hidden.velocities[0]).abs().max()
    assert difference > 1e-4


def test_what_follows_the_image_does_not_reach_it(family: Any, job: ImageJob) -> None:
    """Other tokens behind the image, or none: the same velocity to the bit."""
    job = replace(job, bot_task="none", size=SQUARE)
    canvas = family.canvas(job, [], GeneratedText())
    bucket, layout = canvas.bucket, canvas.branches[0].layout
    velocities = []
    for tail in (layout.ids[layout.live_stop :], (5, 6, 7), ()):
        ids = (*layout.ids[: layout.live_stop], *tail)
        buffer = family.new_buffer()
        family.prefill([Prefill(layout, ids, [], buffer, layout.live_start)])
        branch = family.branch(layout, buffer)
        noise = family.initial_latents(bucket, 1)
        velocities += family.velocities([DenoiseInput(noise, FIRST, 3.0, [branch])])
    assert torch.equal(velocities[0], velocities[1])
    assert torch.equal(velocities[0], velocities[2])


def test_dropping_the_reasoning_makes_reuse_partial(drawn: Tell, job: ImageJob) -> None:
    job = replace(job, drop_think=True, bot_task="think_recaption")
    reused, recomputed = drawn(job, REUSE), drawn(job, RECOMPUTE)
    _assert_same_picture(reused, recomputed)
    report = reused.picture.reuse
    assert report.status == "partial"
    assert "differ from token" in report.reason


def test_required_reuse_fails_the_job_that_has_none(drawn: Tell, job: ImageJob) -> None:
    required = ReuseConfig(required=True)
    assert drawn(job, required).picture.reuse.status == "hit"
    with pytest.raises(ReuseError, match="KV reuse is none"):
        drawn(replace(job, bot_task="none", size=SQUARE), required)
    with pytest.raises(ReuseError, match="KV reuse is partial"):
        drawn(replace(job, drop_think=True), required)


def test_counts_are_those_of_the_transformer(
    drawn: Tell, family: Any, job: ImageJob, sources: tuple[str, ...]
) -> None:
    """Rows that a hook sees entering equal the figures of the report, stage by stage."""
    rows: list[int] = []
    hook = family.network.model.register_forward_pre_hook(
        lambda _module, arguments: rows.append(arguments[0].shape[0])
    )
    picture = drawn(replace(job, images=sources[:2])).picture
    hook.remove()
    report = picture.reuse
    prefix = sum(branch.computed for branch in report.branches)
    steps = picture.denoise_steps * sum(branch.per_step for branch in report.branches)
    told = report.ar_prefill_tokens + report.ar_decode_tokens + prefix + steps
    assert sum(rows) == told
    assert rows[0] == report.ar_prefill_tokens


def test_without_guidance_there_is_one_branch(drawn: Tell, job: ImageJob) -> None:
    picture = drawn(replace(job, guidance_scale=1.0)).picture
    assert len(picture.reuse.branches) == 1


@pytest.mark.parametrize(
    ("place", "name"),
    [
        (model, "query_spans"),
        (rope, "positions"),
        (rope, "rope"),
        (ops, "rotate"),
        (model.HunyuanImage3ForCausalMM, "prefill"),
        (model.HunyuanImage3ForCausalMM, "velocity"),
        (model.Vae, "decode"),
    ],
)
def test_generate_calls_what_the_golden_tests_check(
    drawn: Tell,
    family: Any,
    job: ImageJob,
    monkeypatch: pytest.MonkeyPatch,
    place: Any,
    name: str,
) -> None:
    """Break one function that the golden cases hold, and the picture that `generate` draws
    changes.
    """
    job = replace(job, bot_task="none")
    before = drawn(job).picture.pixels
    original = getattr(place, name)
    monkeypatch.setattr(place, name, _broken(name, original))
    arch = family.network.arch
    tables = rope.RopeTables(head_dim=arch.head_dim, theta=arch.rope_theta)
    monkeypatch.setattr(family.network, "angles", tables)
    assert not np.array_equal(before, drawn(job).picture.pixels)


def _broken(name: str, original: Any) -> Any:
    def broken(*arguments: Any, **options: Any) -> Any:
        if name == "query_spans":
            return original(*arguments[:2], ())  # images become causal
        result = original(*arguments, **options)
        if name == "positions":
            return result + 1 + torch.arange(len(result))[:, None]
        if name == "rope":
            return torch.stack([result[0], -result[1]])
        if name == "rotate":
            return result * torch.linspace(0.5, 1.5, result.shape[-1])
        if name == "prefill":
            for one in arguments[1]:
                change(one.buffer, 0, one.buffer.length, lambda rows: rows * 0.5, "v")
            return result
        return [part * 0.9 for part in result] if isinstance(result, list) else result * 0.9

    return broken
