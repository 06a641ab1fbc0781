"""Videos that run out of memory: each stage once more with all dropped that can be, to the bit."""

import json
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine.fake_video import FakeDenoiser, FakeEncoder, FakeVideo, Studios, video_job
from engine.test_video import COLD, pixels, run
from event_kinds import is_step

from hyimg_cli.engine.session import Session
from hyimg_cli.models import registry
from hyimg_cli.pipelines.image.pipeline import ImagePipeline
from hyimg_cli.settings.run import FailurePolicy, OutputConfig, ReuseConfig, RunConfig

STAGES: dict[str, tuple[type, str]] = {
    "encode": (FakeEncoder, "encode"),
    "denoise": (FakeDenoiser, "step"),
    "decode": (FakeVideo, "decode_latents"),
}
NOTE = "out of memory; continued after dropping the text encoders and the prefixes of pictures"
DECODE_NOTE = NOTE.replace("encoders and", "encoders, the transformer and")
# The fake's tiles are two cells of 16 pixels.
TILES_NOTE = (
    "out of memory in the decode; continued in tiles of 32 pixels, which changes pixels near their "
    "borders"
)
KEPT_NOTE = "its denoised latents are saved, so the next attempt only decodes them"


@pytest.fixture(autouse=True)
def studios(monkeypatch: pytest.MonkeyPatch) -> Studios:
    opened = Studios()
    monkeypatch.setattr(registry, "load_video", opened)
    return opened


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Has calls of a stage fail, by their numbers; gives what was alive in each that failed."""

    def refuse(stage: str, at: range) -> list[Any]:
        owner, name = STAGES[stage]
        original, calls, held = getattr(owner, name), [0], list[Any]()

        def refusing(*arguments: Any) -> Any:
            calls[0] += 1
            if calls[0] - 1 in at:
                activations = torch.zeros(8)
                held.append(weakref.ref(activations))
                raise torch.OutOfMemoryError("tried to allocate 80 GiB\nof 79")
            assert not any(ref() is not None for ref in held), "a failed call is still alive"
            return original(*arguments)

        monkeypatch.setattr(owner, name, refusing)
        return held

    return refuse


@pytest.mark.parametrize(("stage", "at"), [("encode", 0), ("denoise", 2), ("decode", 0)])
def test_a_stage_is_tried_once_more_to_the_bit(
    tmp_path: Path, studios: Studios, short: Any, stage: str, at: int
) -> None:
    # Off: strings are embedded by the job itself, and the encoders stay on the device.
    off = ReuseConfig(prompt_cache=False)
    _, clean = run([video_job()], tmp_path / "clean", batch=COLD, reuse=off)
    held = short(stage, range(at, at + 1))
    events, outcomes = run([video_job()], tmp_path / "short", batch=COLD, reuse=off)
    assert len(held) == 1
    assert pixels(outcomes["job"]) == pixels(clean["job"])
    note = DECODE_NOTE if stage == "decode" else NOTE
    assert (outcomes["job"].attempt, outcomes["job"].warnings) == (1, (note,))
    assert outcomes["job"].denoise_steps == 4
    assert "release" in studios.models[1].log, "the encoders have left the device"
    assert ("release transformer" in studios.models[1].log) == (stage == "decode")
    steps = [event.done for event in events if is_step(event)]
    assert steps == ([1, 2, 1, 2, 3, 4] if stage == "denoise" else [1, 2, 3, 4])
    assert not list((tmp_path / "short").glob("latents/*"))


@pytest.mark.parametrize("stage", STAGES)
def test_what_never_fits_is_lost_alone(tmp_path: Path, short: Any, stage: str) -> None:
    off = ReuseConfig(prompt_cache=False)
    times = 3 if stage == "decode" else 2
    held = short(stage, range(times))
    jobs = [video_job("first"), video_job("second")]
    _, outcomes = run(jobs, tmp_path, batch=COLD, reuse=off)
    assert len(held) == times, "once more, a decode in smaller tiles too, and no more"
    error = outcomes["first"].error
    assert error is not None
    assert (error.code, error.retryable) == ("job.out-of-memory", True)
    assert error.message == "tried to allocate 80 GiB"
    assert "--enable-cpu-offload" in error.hint
    is_decoded = stage == "decode"
    assert outcomes["first"].warnings == ((DECODE_NOTE, TILES_NOTE) if is_decoded else (NOTE,))
    assert outcomes["first"].notes == (KEPT_NOTE,) * is_decoded
    assert (outcomes["second"].status, outcomes["second"].warnings) == ("done", ())


def test_a_decode_goes_on_in_smaller_tiles_and_the_next_job_in_its_own(
    tmp_path: Path, short: Any
) -> None:
    jobs = [video_job("first"), video_job("second")]
    _, clean = run(jobs, tmp_path / "clean", batch=COLD)
    held = short("decode", range(2))
    _, outcomes = run(jobs, tmp_path / "short", batch=COLD)
    assert len(held) == 2
    assert (outcomes["first"].status, outcomes["first"].attempt) == ("done", 1)
    assert outcomes["first"].warnings == (DECODE_NOTE, TILES_NOTE)
    assert pixels(outcomes["first"]) != pixels(clean["first"])
    assert pixels(outcomes["second"]) == pixels(clean["second"])
    assert outcomes["second"].warnings == ()
    assert not list((tmp_path / "short").glob("latents/*"))


def test_a_film_begins_anew_where_a_later_piece_finds_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the transformer the file is that of an undisturbed run, to the byte; in smaller tiles
    its record says so, and the next job's does not.
    """
    jobs = [video_job("first", seed=1), video_job("second", seed=2)]
    png = OutputConfig(tmp_path, frames="png")
    _, clean = run(jobs, tmp_path / "clean", batch=COLD, output=png)
    decode, tries, times = FakeVideo.decode_latents, [0], 0

    def short(self: FakeVideo, *latents: Any) -> Iterator[np.ndarray]:
        tries[0] += 1
        for number, piece in enumerate(decode(self, *latents)):
            if number == 1 and tries[0] <= times:
                names = {path.name for path in (out / "outputs").iterdir()}
                assert not {"first.mp4", "first.json", "first.frames"} & names
                raise torch.OutOfMemoryError("no room for a later piece")
            yield piece

    monkeypatch.setattr(FakeVideo, "decode_latents", short)
    for times in (1, 2, 3):
        tries[0], out = 0, tmp_path / f"short-{times}"
        _, found = run(jobs, out, batch=COLD, output=png)
        files = {path.name for path in (out / "outputs").iterdir()}
        made = {"second.mp4", "second.json", "second.frames"}
        assert files == made | (
            set() if times == 3 else {name.replace("second", "first") for name in made}
        )
        assert found["second"].outputs[0].sha256 == clean["second"].outputs[0].sha256
        if times == 3:
            assert found["first"].status == "failed"
            continue
        same = found["first"].outputs[0].sha256 == clean["first"].outputs[0].sha256
        assert same == (times == 1)
        settings = [
            json.loads((out / "outputs" / f"{name}.json").read_text())["settings"].get("decode")
            for name in ("first", "second")
        ]
        assert settings == [None if same else "half", None]
        assert found["first"].warnings == (DECODE_NOTE, TILES_NOTE)[:times]


def test_each_stage_is_tried_once_more(tmp_path: Path, short: Any) -> None:
    short("denoise", range(1))
    short("decode", range(1))
    _, outcomes = run([video_job()], tmp_path, batch=COLD)
    assert (outcomes["job"].status, outcomes["job"].attempt) == ("done", 1)


def test_steps_that_were_kept_on_the_way_are_not_run_again(tmp_path: Path, short: Any) -> None:
    _, clean = run([video_job()], tmp_path / "clean", batch=COLD)
    short("denoise", range(3, 4))
    config = OutputConfig(tmp_path, checkpoint_every=2)
    events, outcomes = run([video_job()], tmp_path, output=config, batch=COLD)
    assert [event.done for event in events if is_step(event)] == [1, 2, 3, 3, 4]
    assert pixels(outcomes["job"]) == pixels(clean["job"])
    assert outcomes["job"].denoise_steps == 4, "all of this run"
    assert outcomes["job"].warnings == (NOTE,)
    assert outcomes["job"].notes == ("resumed after denoise step 2, from saved latents",)


def test_what_pictures_keep_beside_is_dropped(
    tmp_path: Path, short: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten: list[ImagePipeline] = []
    monkeypatch.setattr(ImagePipeline, "forget", lambda self: forgotten.append(self))
    session = Session(RunConfig(OutputConfig(tmp_path), batch=COLD))
    short("decode", range(1))
    run([video_job()], tmp_path, session=session)
    assert forgotten == [session._images]


def test_another_fault_is_not_tried_again(tmp_path: Path) -> None:
    events, outcomes = run([video_job(prompt="it fails in step 2")], tmp_path, batch=COLD)
    assert [event.done for event in events if is_step(event)] == [1, 2]
    assert outcomes["job"].warnings == ()


def test_a_retry_of_the_run_comes_behind_it(tmp_path: Path, short: Any) -> None:
    held = short("decode", range(4))
    policy = FailurePolicy(max_retries=1)
    _, outcomes = run([video_job()], tmp_path, batch=COLD, failure=policy)
    assert (len(held), outcomes["job"].attempt, outcomes["job"].denoise_steps) == (4, 2, 0)
