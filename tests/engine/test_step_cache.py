"""Pictures under a lossy step cache: the same in any batch, after any job, in any attempt."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.conftest import studio_of
from engine.test_group import SQUARE, _pixels, _run
from engine.test_video_tiny import run as run_videos
from engine.test_video_tiny import tiny_job

from hyimg_cli.models.diffusers_video.model import DiffusersVideo
from hyimg_cli.pipelines.image.stages import ImageRequest
from hyimg_cli.pipelines.request import Lost
from hyimg_cli.spec.job import ImageJob, Size
from hyimg_cli.spec.step_cache import StepCache

RULE = StepCache(5, 1)
FULL = (0, 1, 2, 7, 11)


@pytest.fixture(scope="module")
def jobs(job: ImageJob) -> list[ImageJob]:
    """Two schedules, guided or not."""
    plain = replace(job, bot_task="none", size=SQUARE, num_inference_steps=12, step_cache=RULE)
    found = [replace(plain, custom_id=f"{n}", seed=n, guidance_scale=3.0 - n % 2) for n in range(3)]
    other = StepCache(4, 0, first=1, tail=2)
    return [
        *found,
        *(replace(one, custom_id=f"{one.custom_id}-other", step_cache=other) for one in found[:2]),
    ]


@pytest.fixture(scope="module")
def together(family: Any, jobs: list[ImageJob]) -> dict[str, ImageRequest | Lost]:
    return _run(jobs, studio_of(family), 16)


def test_same_pixels_in_any_batch(
    family: Any, jobs: list[ImageJob], together: dict[str, ImageRequest | Lost]
) -> None:
    """To the bit: 16 = 2 = 1; jobs of other full steps are drawn with them."""
    expected = _pixels(together)
    assert len(expected) == len(jobs)
    assert _pixels(_run(jobs[::-1], studio_of(family), 2)) == expected
    for one in (jobs[0], jobs[-1]):
        assert _pixels(_run([one], studio_of(family), 1))[one.custom_id] == expected[one.custom_id]
    assert {end.batch["denoise"] for end in together.values()} == {5}


def test_the_line_tells_what_the_transformer_saw(
    family: Any, jobs: list[ImageJob], together: dict[str, ImageRequest | Lost]
) -> None:
    """Counts of the loop, against the rows that entered the network at each step."""
    before = family.rows_seen
    (done,) = _run(jobs[:1], studio_of(family), 1).values()
    assert isinstance(done, ImageRequest)
    prefix = sum(branch.computed for branch in done.reuse.branches)
    per_step = sum(branch.per_step for branch in done.reuse.branches)
    assert family.rows_seen - before == prefix + len(FULL) * per_step
    numbers = {"interval": 5, "order": 1, "first": 3, "tail": 1, "full": 5, "estimated": 7}
    report = done.step_cache
    assert report is not None
    assert asdict(report) == {"kind": "taylor"} | numbers
    assert done.denoise_steps == 12


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), RuntimeError("a kernel failed")])
def test_a_batch_that_fails_half_way_leaves_nothing(
    family: Any,
    jobs: list[ImageJob],
    together: dict[str, ImageRequest | Lost],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    """Halves begin anew, with a state of their own; a job that is lost leaves none to the next."""
    velocity, asked = family.network.velocity, 0

    def failing(pictures: Sequence[Any]) -> Any:
        nonlocal asked
        asked += 1
        if asked == 4:
            raise error
        return velocity(pictures)

    is_short = isinstance(error, torch.OutOfMemoryError)
    monkeypatch.setattr(family.network, "velocity", failing)
    ends = _run(jobs[:3], studio_of(family), 3 if is_short else 1)
    expected = _pixels(together)
    lost = {name for name, end in ends.items() if isinstance(end, Lost)}
    assert lost == (set() if is_short else {"0"})
    assert _pixels(ends) == {name: expected[name] for name in ends.keys() - lost}


def test_a_video_that_is_only_decoded_again_tells_its_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are kept with its last latents, where nothing else of the cache is."""
    small = {"size": Size(32, 32), "num_frames": 5, "guidance_scale": 1.0}
    film = tiny_job("film", num_inference_steps=12, step_cache=RULE, **small)

    def fails(*_: object) -> None:
        raise RuntimeError("a kernel failed")

    with monkeypatch.context() as patch:
        patch.setattr(DiffusersVideo, "decode_latents", fails)
        assert run_videos([film], tmp_path)["film"].status == "failed"
    again = run_videos([film], tmp_path)["film"]
    assert (again.status, again.denoise_steps) == ("done", 0)
    assert again.step_cache is not None
    assert (again.step_cache.full, again.step_cache.estimated) == (len(FULL), 12 - len(FULL))
