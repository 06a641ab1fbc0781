"""Sessions on the embedded video checkpoint: order, company, failures, caches and kept latents
leave its frames alone.
"""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import thorough_but
from engine.fake_video import video_job
from event_kinds import is_step
from tiny_video import TINY_VIDEO, write_wan

from hyimg_cli.engine.session import Session
from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.manifest.planner import make_plan
from hyimg_cli.models import registry
from hyimg_cli.models.diffusers_video.model import DiffusersVideo
from hyimg_cli.settings.run import BatchConfig, CacheConfig, OutputConfig, ReuseConfig, RunConfig
from hyimg_cli.spec.events import JobEnded, Outcome
from hyimg_cli.spec.job import Size, VideoJob

COLD = BatchConfig(prewarm=False)
PROMPTS = ("a dog on a beach", 'a sign that says "open"', "clouds")


def tiny_job(custom_id: str, **changes: Any) -> VideoJob:
    return video_job(custom_id, **({"num_inference_steps": 2} | changes))


def run(jobs: list[VideoJob], out: Path, **config: Any) -> dict[str, Outcome]:
    settings = RunConfig(**({"output": OutputConfig(out), "batch": COLD} | config))
    with RunFolder(out) as folder:
        events = list(Session(settings).run(make_plan(jobs, registry.model_card), folder))
    return {e.outcome.custom_id: e.outcome for e in events if isinstance(e, JobEnded)}


def pixels(outcomes: dict[str, Outcome]) -> dict[str, str]:
    return {
        name: outcome.outputs[0].pixel_sha256
        for name, outcome in outcomes.items()
        if outcome.status == "done"
    }


def runs_of(outcomes: dict[str, Outcome]) -> dict[str, int]:
    return list(outcomes.values())[-1].cache["encoder_runs"]


@pytest.fixture(scope="module")
def ten_jobs() -> list[VideoJob]:
    """Ten jobs, three distinct prompts, unlike in seed, size, steps and guidance."""
    sizes = (Size(32, 48), Size(48, 32))
    return [
        tiny_job(
            f"job-{n}",
            prompt=PROMPTS[n % 3],
            seed=n,
            size=sizes[n % 2],
            num_inference_steps=1 + n % 3,
            guidance_scale=1.0 if n == 4 else 6.0,
        )
        for n in range(10)
    ]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A disk cache that the first run of the ten jobs fills."""
    return tmp_path_factory.mktemp("kept")


@pytest.fixture(scope="module")
def first(
    ten_jobs: list[VideoJob], kept: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Outcome]:
    """The ten jobs prewarmed, with an empty cache."""
    out = tmp_path_factory.mktemp("first")
    return run(ten_jobs, out, cache=CacheConfig(kept), batch=BatchConfig())


@pytest.mark.thorough
def test_three_prompts_are_embedded_once(
    first: dict[str, Outcome], ten_jobs: list[VideoJob], kept: Path, tmp_path: Path
) -> None:
    # Three prompts and the empty negative one; one of them quotes.
    assert runs_of(first) == {"text_encoder": 4, "text_encoder_2": 1}
    second = run(ten_jobs[::-1], tmp_path / "second", cache=CacheConfig(kept))
    assert runs_of(second) == {}
    off = ReuseConfig(prompt_cache=False)
    plain = run(ten_jobs, tmp_path / "plain", reuse=off)
    assert runs_of(plain) == {"text_encoder": 19, "text_encoder_2": 3}
    assert len(set(pixels(first).values())) == 10
    # Shuffled, not prewarmed, from disk, without any cache: the same.
    assert pixels(first) == pixels(second) == pixels(plain)


def test_alone_is_the_same(
    first: dict[str, Outcome], ten_jobs: list[VideoJob], kept: Path, tmp_path: Path
) -> None:
    for job in ten_jobs[1:5]:
        alone = run([job], tmp_path / job.custom_id, cache=CacheConfig(kept))
        assert pixels(alone)[job.custom_id] == pixels(first)[job.custom_id]


def test_a_failing_job_in_the_middle_leaves_no_trace(
    first: dict[str, Outcome],
    ten_jobs: list[VideoJob],
    kept: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    denoiser = DiffusersVideo.denoiser

    def faulty(self: Any, job: VideoJob, embeddings: Any) -> Any:
        made = denoiser(self, job, embeddings)
        step = made.step

        def fails(index: int, latents: torch.Tensor) -> torch.Tensor:
            if index == 2:
                raise RuntimeError("a kernel failed")
            return step(index, latents)

        if job.custom_id == "in-step":
            monkeypatch.setattr(made, "step", fails, raising=False)
        return made

    monkeypatch.setattr(DiffusersVideo, "denoiser", faulty)
    broken = [
        tiny_job("in-step", num_inference_steps=4, size=Size(32, 48)),
        tiny_job("height-17", size=Size(17, 48)),
    ]
    jobs = [ten_jobs[0], *broken, *ten_jobs[1:4]]
    mixed = run(jobs, tmp_path, cache=CacheConfig(kept))
    assert {name for name, outcome in mixed.items() if outcome.status == "failed"} == {
        "in-step", "height-17",
    }  # fmt: skip
    assert all(pixels(first)[name] == found for name, found in pixels(mixed).items())


def test_other_weights_of_the_encoder_are_a_miss(
    first: dict[str, Outcome], ten_jobs: list[VideoJob], kept: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(TINY_VIDEO, folder)
    same = [replace(ten_jobs[0], model=str(folder))]
    assert runs_of(run(same, tmp_path / "same", cache=CacheConfig(kept))) == {}
    weights = folder / "text_encoder" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-2] ^= 1
    weights.write_bytes(data)
    # The look-up of fingerprints is for one process; files do not change under it.
    for known in (registry._fingerprint, registry._opened):
        known.cache_clear()
    other = run(same, tmp_path / "other", cache=CacheConfig(kept))
    assert runs_of(other)["text_encoder"] == 2


@pytest.mark.parametrize("family", thorough_but(["wan"], ["hunyuan", "wan"]))
def test_kept_latents_lead_to_the_same_frames(
    family: str, tmp_path: Path, wan: Callable[[], Path]
) -> None:
    """Wan's scheduler remembers earlier steps: its state must come back with the latents."""
    model = registry.EMBEDDED_VIDEO if family == "hunyuan" else str(wan())
    job = tiny_job("job", model=model, num_inference_steps=5, prompt=PROMPTS[0])
    cache = CacheConfig(tmp_path / "cache")
    whole = run([job], tmp_path / "whole", cache=cache)
    for stop in (1, 3, 4, 5):
        out = tmp_path / f"stopped-{stop}"
        config = RunConfig(OutputConfig(out, checkpoint_every=1), batch=COLD, cache=cache)
        with RunFolder(out) as folder:
            for event in Session(config).run(make_plan([job], registry.model_card), folder):
                if is_step(event) and event.done == stop:
                    break
        resumed = run([job], out, cache=cache)
        assert resumed["job"].denoise_steps == 5 - stop
        assert pixels(resumed) == pixels(whole)


@pytest.fixture
def wan(tmp_path: Path) -> Callable[[], Path]:
    return lambda: write_wan(tmp_path / "wan")


@pytest.mark.usefixtures("processor_clock")
def test_phases_of_a_real_job_add_up(tmp_path: Path) -> None:
    size = Size(64, 96)
    (outcome,) = run([tiny_job("job", size=size, num_inference_steps=24)], tmp_path).values()
    timings = outcome.timings_s
    own = timings["total"] - timings["queue"]
    assert timings["unattributed"] < 0.05 * own
    parts = sum(seconds for name, seconds in timings.items() if name != "total")
    assert parts == pytest.approx(timings["total"], abs=1e-4)
