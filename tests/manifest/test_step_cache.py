"""The step cache as it is written: its numbers, whose jobs may have one, and their keys."""

import io
import json
from dataclasses import replace
from typing import Any

import pytest

from hyimg_cli.journal.keys import job_key
from hyimg_cli.manifest.manifest import read_manifest
from hyimg_cli.manifest.resolve import resolve_jobs
from hyimg_cli.manifest.resolved import job_to_json
from hyimg_cli.models import registry
from hyimg_cli.settings.config import settle
from hyimg_cli.settings.kinds import STEP_CACHE
from hyimg_cli.settings.values import BadValue
from hyimg_cli.spec.job import Job, VideoJob
from hyimg_cli.spec.step_cache import StepCache
from hyimg_cli.spec.work import video_work

PICTURE = {"custom_id": "picture", "prompt": "a circle", "num_inference_steps": 20}
VIDEO = {**PICTURE, "custom_id": "video", "task": "t2v"}


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("none", None),
        ("taylor", StepCache(3, 1, 3, 1)),
        ("taylor:interval=4", StepCache(4, 1, 3, 1)),
        ("taylor:tail=2,order=0,first=5,interval=2", StepCache(2, 0, 5, 2)),
    ],
)
def test_a_text_and_the_numbers_it_stands_for(text: str, rule: StepCache | None) -> None:
    assert STEP_CACHE.read(text) == rule
    if rule is not None:
        assert STEP_CACHE.read(str(rule)) == rule


@pytest.mark.parametrize(
    "text",
    [
        *("", "tailor", "taylor:", "taylor:3", "taylor:interval", "taylor:interval=x"),
        *("taylor:interval=1", "taylor:order=3", "taylor:first=0", "taylor:tail=0"),
        *("taylor:interval=3;order=1", "taylor:intervall=3", "taylor:interval=3,", 3, None, True),
    ],
)
def test_what_is_no_step_cache(text: Any) -> None:
    with pytest.raises(BadValue):
        STEP_CACHE.read(text)


def resolved(
    *lines: dict[str, Any], distilled: bool = False, **flags: Any
) -> tuple[list[Job], str]:
    """The jobs of lines, and what is wrong with them."""
    manifest = read_manifest("-", io.StringIO("".join(f"{json.dumps(line)}\n" for line in lines)))
    picture, video = registry.model_card("tiny-image"), registry.video_card("tiny-video")
    jobs, faults = resolve_jobs(
        manifest,
        settle(flags, {}, {}),
        lambda model: replace(picture, is_distilled=distilled),
        lambda model: replace(video, is_distilled=distilled),
    )
    return jobs, "; ".join(str(fault) for fault in [*manifest.faults, *faults])


@pytest.mark.parametrize("line", [PICTURE, VIDEO])
def test_a_line_stands_above_the_flag_and_is_written_whole(line: dict[str, Any]) -> None:
    own = {**line, "custom_id": "own", "step_cache": "taylor:order=2"}
    off = {**line, "custom_id": "off", "step_cache": "none"}
    jobs, faults = resolved(line, own, off, step_cache="taylor:interval=4")
    assert not faults
    assert [job.step_cache for job in jobs] == [StepCache(4), StepCache(3, 2), None]
    written = [job_to_json(job) for job in jobs]
    assert written[0]["step_cache"] == "taylor:interval=4,order=1,first=3,tail=1"
    assert "step_cache" not in written[2]
    again, _ = resolved(*written)
    assert [job.step_cache for job in again] == [job.step_cache for job in jobs]


@pytest.mark.parametrize(
    ("line", "more", "why"),
    [
        (
            PICTURE,
            {"num_inference_steps": 11},
            "a step cache needs at least 12 steps; the job has 11",
        ),
        (
            VIDEO,
            {"num_inference_steps": 11},
            "a step cache needs at least 12 steps; the job has 11",
        ),
        (
            PICTURE,
            {"step_cache": "taylor:first=20"},
            "the step cache would leave out none of the 20 steps",
        ),
        (PICTURE, {"distilled": True}, "distilled to few steps"),
        (VIDEO, {"distilled": True}, "distilled to few steps"),
        (VIDEO, {"scheduler": "euler"}, "distilled to few steps"),
    ],
)
def test_jobs_that_must_not_have_one(line: dict[str, Any], more: dict[str, Any], why: str) -> None:
    distilled = more.get("distilled", False)
    own = {name: value for name, value in more.items() if name != "distilled"}
    jobs, faults = resolved({"step_cache": "taylor", **line, **own}, distilled=distilled)
    assert not jobs
    assert why in faults
    if "step_cache" not in more:
        jobs, faults = resolved({**line, **own, "step_cache": "none"}, distilled=distilled)
        assert (len(jobs), faults) == (1, "")


@pytest.mark.parametrize("line", [PICTURE, VIDEO])
def test_every_number_is_in_the_key_and_nothing_where_it_is_off(line: dict[str, Any]) -> None:
    def key(**more: Any) -> str:
        (job,), _ = resolved({**line, **more})
        return job_key(job, (), "model", {})

    others = ("interval=5", "order=0", "first=4", "tail=2")
    found = [key(step_cache="taylor"), *(key(step_cache=f"taylor:{one}") for one in others)]
    assert len({*found, key()}) == 6
    assert key(step_cache="none") == key()
    assert key(step_cache="taylor:interval=3,order=1,first=3,tail=1") == found[0]


def test_what_it_keeps_is_in_the_forecast() -> None:
    """Two orders of two branches of a video's latents in float32."""
    (video,), _ = resolved({**VIDEO, "step_cache": "taylor", "size": "64x64", "num_frames": 9})
    assert isinstance(video, VideoJob)
    films = registry.video_card("tiny-video")
    frames, rows, columns = films.latent_grid(video.size, 9)
    assert (
        video_work(video, films).velocity_bytes
        == 4 * films.latent_channels * frames * rows * columns * 4
    )
