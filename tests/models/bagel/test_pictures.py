"""Pictures by the engine: against the published code's latents, counted forwards, equal bits."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from event_kinds import is_step, is_token
from processors import is_same
from torch import Tensor

from hyimg_cli.diffusion.schedule import Step
from hyimg_cli.errors import JobError
from hyimg_cli.models.bagel.family import Bagel
from hyimg_cli.models.bagel.guidance import Guidance, packed, unpacked
from hyimg_cli.models.bagel.sequence import contexts
from hyimg_cli.spec.job import ImageJob, Size, SizeRequest
from hyimg_cli.spec.options import TextSampling
from hyimg_cli.spec.step_cache import StepCache

from .conftest import CASES, JOB, Runs, give_golden, golden_job, latents, noise_picture
from .test_vae import Written

PUBLISHED = {"atol": 2e-4, "rtol": 1e-4}
# What a manifest can ask for: sources first, then one prompt.
RUNS = [name for name in sorted(CASES["runs"]) if name not in ("08b", "08c")]
Picture = Callable[[str], str]


@pytest.fixture(scope="module")
def written(bagel_folder: Path) -> Written:
    return Written(bagel_folder)


@torch.no_grad()
def pixels_by_formula(rows: Tensor, grid: Sequence[int], written: Written) -> np.ndarray:
    """Of published latents, int16 [H, W, 3], cut to whole levels."""
    levels = written.decoded(unpacked(rows, *grid)[None] / 0.3611 + 0.1159)[0] * 0.5 + 0.5
    found: np.ndarray = (levels.clamp(0, 1) * 255).to(torch.int16).permute(1, 2, 0).numpy()
    return found


@pytest.mark.parametrize("name", RUNS)
def test_latents_of_the_published_code(
    bagel: Bagel, golden: dict[str, Tensor], pictures: Picture, written: Written, name: str
) -> None:
    """Renorm modes, interval, scales, one source and two, thinking: from prompt to last latents,
    and to the pixels that the autoencoder's formulas make of the published ones.
    """
    run = CASES["runs"][name]
    give_golden(bagel, golden, name)
    runs = Runs(bagel)
    done = runs.one(golden_job(run, pictures))
    torch.testing.assert_close(packed(latents(done)), golden[f"{name}.latents"], **PUBLISHED)
    off = np.abs(done.pixels - pixels_by_formula(golden[f"{name}.latents"], run["grid"], written))
    assert (off.max(), (off > 0).sum() <= 10) in [(0, True), (1, True)]
    # "N timesteps" are N - 1 evaluations, and as many are told.
    assert done.denoise_steps == run["num_timesteps"] - 1
    steps = [one for one in runs.events if is_step(one)]
    assert [one.done for one in steps] == list(range(1, done.denoise_steps + 1))
    assert {one.total for one in steps} == {done.denoise_steps}
    if "text" in run:
        assert done.text.text == run["text"]
        assert list(done.text.ids or ())[1:-1] == run["decoded_ids"]
        assert done.reuse.status == ("hit" if run["round_trip"] else "partial")
        assert bool(done.notes) is not run["round_trip"]
    else:
        assert not any(is_token(one) for one in runs.events)
        assert done.reuse.ar_decode_tokens == done.reuse.ar_prefill_tokens == 0


@pytest.mark.parametrize("name", ["08b", "08c"])
def test_texts_between_pictures(
    bagel: Bagel, golden: dict[str, Tensor], pictures: Picture, name: str, monkeypatch: Any
) -> None:
    """What no manifest can say: a text between two pictures, and one before a picture, where the
    context without the text is the full one.
    """
    run = CASES["runs"][name]
    give_golden(bagel, golden, name)

    def interleaved(job: ImageJob, shapes: Any, written: Any = None) -> Any:
        left = iter(shapes)
        parts = [
            next(left) if text.startswith("<") else bagel.prompter.vocabulary.encode(text)
            for text in run["inputs"]
        ]
        return contexts(bagel.prompter.markers, parts)

    monkeypatch.setattr(bagel.prompter, "contexts", interleaved)
    done = Runs(bagel).one(golden_job(run, pictures))
    torch.testing.assert_close(packed(latents(done)), golden[f"{name}.latents"], **PUBLISHED)


@pytest.mark.parametrize(("steps", "forwards"), [(50, 90), (10, 17)])
def test_a_new_picture_runs_two_branches_of_three(bagel: Bagel, steps: int, forwards: int) -> None:
    """Without thinking the context without images is the full one: 131 and 25 with all three."""
    job = replace(JOB, num_inference_steps=steps)
    counted = bagel.prompter.count(job, [], 0)
    assert (counted.forwards, counted.steps, counted.branches) == (forwards, steps - 1, 2)
    Runs(bagel).one(job)
    assert bagel.network.branch_forwards == forwards


def test_a_step_cache_begins_anew_where_guidance_ends(bagel: Bagel) -> None:
    """Of 14 steps the first 6 are guided, by two branches: 0 1 2 5 and 6 9 12 13 are full."""
    job = replace(JOB, num_inference_steps=15, flow_shift=1.0, guidance_interval=(0.6, 1.0))
    job = replace(job, step_cache=StepCache(3, 2))
    done = Runs(bagel).one(job)
    report = done.step_cache
    assert report is not None
    assert (report.full, report.estimated) == (8, 6)
    assert bagel.network.branch_forwards == 4 * 2 + 4
    assert bagel.prompter.count(job, [], 0).forwards == bagel.network.branch_forwards
    assert torch.isfinite(latents(done)).all()


def test_two_branches_are_as_good_as_three() -> None:
    velocities = torch.randn(3, 16, 4, 6, generator=torch.Generator().manual_seed(1))
    velocities[2] = velocities[0]
    step = Step(0, 0.9, 0.8, 900.0, 800.0, -0.1)
    for renorm in ("global", "channel", "text_channel", "none"):
        of_three = Guidance(4.0, 1.5, renorm, (0.4, 1.0), 1, 2)
        of_two = replace(of_three, image=0)
        assert torch.equal(of_two(velocities[:2], step), of_three(velocities, step))
    # The text's scale is 1 + 1.5 (4 - 1) then.
    plain = Guidance(5.5, 1.0, "none", (0.4, 1.0), 1, None)(velocities[:2], step)
    torch.testing.assert_close(of_two(velocities[:2], step), plain)


def test_renorm_is_of_one_picture() -> None:
    """Its length is over all tokens and channels, or a token's; never over a batch."""
    full = torch.ones(16, 4, 6)
    velocities = torch.stack([full, torch.zeros_like(full)])
    step = Step(0, 0.9, 0.8, 900.0, 800.0, -0.1)
    for renorm in ("global", "channel"):
        guidance = Guidance(4.0, 0.0, renorm, (0.0, 1.0), 1, None)
        torch.testing.assert_close(guidance(velocities, step), full)
    unrenormed = Guidance(4.0, 0.0, "none", (0.0, 1.0), 1, None)(velocities, step)
    torch.testing.assert_close(unrenormed, 4 * full)


def test_branches_by_scales(bagel: Bagel, pictures: Picture) -> None:
    """A missing context never weakens guidance: there are as many as the scales ask for."""
    edit = replace(JOB, task="it2i", images=(pictures("RGB"),), size=SizeRequest())
    asked = {(4.0, 2.0): 3, (4.0, 1.0): 2, (1.0, 2.0): 1}
    for (text, image), branches in asked.items():
        job = replace(edit, guidance_scale=text, image_guidance_scale=image)
        done = Runs(bagel).one(job)
        assert len(done.reuse.branches) == branches
    thinking = replace(JOB, bot_task="think", text=TextSampling(0.0, 0, 1.0, 5))
    assert len(Runs(bagel).one(thinking).reuse.branches) == 3


def test_what_is_not_computed_again(bagel: Bagel, pictures: Picture) -> None:
    """The context without the text is a prefix of the full one; the one without images is a text's
    prefill. An end is put behind a text that was written: one token.
    """
    edit = replace(JOB, task="it2i", images=(pictures("RGB"),), size=SizeRequest())
    full, text, image = Runs(bagel).one(edit).reuse.branches
    length = CASES["runs"]["07a"]["length"]["text_cfg"]
    assert (text.computed, text.shared) == (0, length)
    assert (full.computed, image.computed) == (length + 9, 9)
    recomputed = Runs(bagel, kv_reuse=False).one(edit).reuse
    assert [one.shared for one in recomputed.branches] == [0, 0, 0]
    thought = Runs(bagel).one(replace(JOB, bot_task="think")).reuse
    assert (thought.status, thought.branches[0].computed) == ("hit", 1)


def test_what_branches_share_is_held_once(bagel: Bagel, pictures: Picture) -> None:
    """The context without the text is the beginning of the full one: the same pages."""
    edit = replace(JOB, task="it2i", images=(pictures("RGB"),), size=SizeRequest())
    for job in (edit, JOB):
        seen: dict[int, Any] = {}
        bagel.velocities = lambda live, seen=seen: (  # type: ignore[method-assign]
            seen.update({id(b): b.buffer for one in live for b in one.branches})
            or Bagel.velocities(bagel, live)
        )
        Runs(bagel).one(job)
        pages = {page for buffer in seen.values() for page in buffer.pages}
        count = bagel.prompter.count(job, [Size(112, 80)] * len(job.images), 9)
        assert 0 <= len(pages) * bagel.arena.page - count.kv_rows < len(seen) * bagel.arena.page


def test_it_draws_while_others_still_write(bagel: Bagel) -> None:
    """A job that needs no text waits for nobody's; its pixels are its own."""
    text = TextSampling(5.0, 0, 1.0, 40)
    new = replace(JOB, custom_id="new")
    thought = replace(JOB, custom_id="thought", bot_task="think", text=text)
    runs = Runs(bagel)
    found = runs.all([thought, new])
    drawn = next(n for n, one in enumerate(runs.events) if one is found["new"])
    told = [n for n, one in enumerate(runs.events) if is_token(one)]
    assert drawn < max(told) - 20
    assert torch.equal(latents(found["new"]), latents(Runs(bagel).one(new)))


def test_equal_to_the_bit(bagel: Bagel, pictures: Picture) -> None:
    """Alone, in a batch, in any order, with the tree off; a run after an edit is not changed by
    it.
    """
    edit = replace(JOB, task="it2i", images=(pictures("RGB"),), size=SizeRequest())
    text = TextSampling(0.0, 0, 1.0, 9)
    jobs = [
        replace(JOB, custom_id="new"),
        replace(JOB, custom_id="other", prompt="two cats", seed=7),
        replace(edit, custom_id="edit"),
        replace(edit, custom_id="same picture", prompt="two cats", seed=7),
        replace(JOB, custom_id="thought", bot_task="think", text=text),
        replace(edit, custom_id="edit thought", bot_task="think", text=text),
    ]
    expected = {job.custom_id: latents(Runs(bagel, tree_bytes=0).one(job)) for job in jobs}
    for order in (jobs, jobs[::-1]):
        for name, done in Runs(bagel).all(order).items():
            assert is_same(latents(done), expected[name]), name


def test_a_sampled_text_follows_its_seed(bagel: Bagel) -> None:
    def written(seed: int) -> Any:
        text = TextSampling(5.0, 0, 1.0, 9)
        return Runs(bagel).one(replace(JOB, bot_task="think", text=text, ar_seed=seed)).text.ids

    assert written(3) == written(3) != written(4)


def test_a_given_text_is_the_one_that_was_written(bagel: Bagel) -> None:
    job = replace(JOB, bot_task="think")
    wrote = Runs(bagel).one(job)
    for given in (
        {"cot_text": wrote.text.text},
        {"cot_token_ids": wrote.text.ids},
        {"cot_token_ids": (wrote.text.ids or ())[1:-1]},
    ):
        found = Runs(bagel).one(replace(job, **given))
        torch.testing.assert_close(latents(found), latents(wrote), atol=1e-4, rtol=0)


def test_sizes(bagel: Bagel, tmp_path: Path, pictures: Picture) -> None:
    """Any multiples of 16 up to the table's side; an edit has its last source's resized size."""
    sizes = {
        SizeRequest(64, 96): (64, 96),
        SizeRequest(70, 90): (64, 96),
        SizeRequest(256, 128): (128, 64),
        SizeRequest(16, 9, is_ratio=True): (128, 64),
        SizeRequest(): (128, 128),
    }
    for request, expected in sizes.items():
        assert Runs(bagel).one(replace(JOB, size=request)).pixels.shape[:2] == expected
    wide = noise_picture(tmp_path / "wide.png", 40, 130)
    job = replace(JOB, task="it2i", images=(pictures("RGB"), wide), size=SizeRequest())
    assert Runs(bagel).one(job).pixels.shape == (32, 128, 3)


def test_sources_are_encoded_the_same_every_time(bagel: Bagel, golden: dict[str, Tensor]) -> None:
    """The posterior is drawn by the picture's own bytes; packed and unpacked no bit is lost."""
    pixels = golden["source.rgb.pixels"].numpy()
    first, second = (bagel.encode_source(pixels, "digest") for _ in range(2))
    assert torch.equal(first.rows.vae_NM, second.rows.vae_NM)
    other = bagel.encode_source(pixels, "another")
    assert not torch.equal(first.rows.vae_NM, other.rows.vae_NM)
    back = bagel.unpack_source(bagel.pack_source(first), "digest")
    assert back.shape == first.shape
    assert all(torch.equal(vars(back.rows)[n], rows) for n, rows in vars(first.rows).items())
    with pytest.raises(ValueError, match="another key"):
        bagel.unpack_source(bagel.pack_source(first), "another")


def test_pixels_are_cut_not_rounded(bagel: Bagel) -> None:
    levels = torch.tensor([[-2.0, 0.0, 0.999, 2.0]]).expand(3, 1, 4)
    vars(bagel.codec)["decode"] = lambda latents_CYX: levels
    found = (bagel.decode_latents(torch.zeros(1)) * 255).round()
    assert found[0, :, 0].tolist() == [0, 127, 254, 255]


@pytest.mark.parametrize(
    ("asked", "where"),
    [
        ({"bot_task": "recaption"}, "bot_task"),
        ({"num_inference_steps": 1}, "num_inference_steps"),
        ({"prompt": "a <|im_end|> b"}, "prompt"),
        ({"cot_text": "<|vision_start|>"}, "cot_text"),
        ({"cot_token_ids": (512,)}, "cot_token_ids"),
        ({"prompt": "word " * 33000}, "prompt"),
        (
            {"guidance_scale": 1.0, "user_fields": frozenset(["guidance_renorm"])},
            "guidance_renorm",
        ),
    ],
)
def test_what_is_not_read_is_refused(bagel: Bagel, asked: dict[str, Any], where: str) -> None:
    with pytest.raises(JobError) as found:
        bagel.prompter.check(replace(JOB, **asked))
    assert found.value.where == where
