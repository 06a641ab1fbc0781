"""Video sessions whose networks take turns on the device: frames of a session that holds all."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine.fake_video import frames_by_seed, video_job
from event_kinds import is_done

from hyimg_cli.engine.session import Session
from hyimg_cli.errors import UsageError
from hyimg_cli.kernels.offload import Offload
from hyimg_cli.manifest.planner import make_plan
from hyimg_cli.memory import fit
from hyimg_cli.memory.videos import networks_need
from hyimg_cli.models import registry
from hyimg_cli.settings.run import (
    BatchConfig,
    ModelChoice,
    OutputConfig,
    ParallelConfig,
    ReuseConfig,
    RunConfig,
)
from hyimg_cli.spec.events import JobEnded, ModelLoaded
from hyimg_cli.spec.job import ImageJob, Size, VideoJob

PLAIN = RunConfig(
    OutputConfig(Path("unused")),
    model=ModelChoice(device="cpu", dtype="float32"),
    batch=BatchConfig(prewarm=False),
)
OFFLOADED = replace(PLAIN, model=replace(PLAIN.model, cpu_offload="model"))
TALL = Size(272, 48)
Frames = dict[int, list[bytes]]


@pytest.fixture
def frames(monkeypatch: pytest.MonkeyPatch) -> Frames:
    return frames_by_seed(monkeypatch)


@pytest.fixture
def brought(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Classes of the networks that this process brought to the device, in order."""
    seen: list[str] = []
    inner = Offload.onload

    def onload(self: Offload, *networks: Any) -> None:
        before = self._onloaded
        inner(self, *networks)
        if self._onloaded != before:
            seen.extend(type(network).__name__ for network in networks)

    monkeypatch.setattr(Offload, "onload", onload)
    return seen


@pytest.fixture
def jobs() -> list[VideoJob]:
    """Two videos of two prompts that are cut into two tiles."""
    facts: dict[str, Any] = {"size": TALL, "num_frames": 1, "num_inference_steps": 2}
    return [video_job("a", seed=1, **facts), video_job("b", seed=2, prompt="a cat", **facts)]


def run(config: RunConfig, jobs: list[VideoJob]) -> None:
    with Session(config) as session:
        events = list(session.run(make_plan(jobs, registry.model_card)))
    assert not [event for event in events if isinstance(event, JobEnded) and not event.is_done]
    assert len([event for event in events if is_done(event)]) == len(jobs)


@pytest.mark.thorough
def test_the_same_frames_in_any_arrangement(
    jobs: list[VideoJob], frames: Frames, brought: list[str]
) -> None:
    run(PLAIN, jobs)
    expected = dict(frames)
    assert brought == []
    encoder, network, vae = (
        "Qwen2_5_VLTextModel",
        "HunyuanVideo15Transformer3DModel",
        "AutoencoderKLHunyuanVideo15",
    )
    uncached = replace(OFFLOADED, reuse=ReuseConfig(prompt_cache=False))
    for config, turns in (
        (OFFLOADED, [encoder, network, vae, network, vae]),
        (uncached, [encoder, network, vae] * 2),
        # The other rank has its VAE, or its transformer, to itself.
        (
            replace(OFFLOADED, parallel=ParallelConfig(vae_ranks=2, cfg_ranks=1)),
            [encoder, *[network, vae] * 2],
        ),
        (
            replace(OFFLOADED, parallel=ParallelConfig(vae_ranks=1, cfg_ranks=2)),
            [encoder, *[network, vae] * 2],
        ),
    ):
        frames.clear()
        brought.clear()
        run(config, jobs)
        assert frames == expected
        assert brought == turns


@pytest.mark.thorough
def test_a_session_takes_the_offload_with_which_its_model_fits(
    jobs: list[VideoJob],
    frames: Frames,
    brought: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU that has no room for all networks: the same frames, and the event says so."""
    run(PLAIN, jobs[:1])
    expected = dict(frames)
    frames.clear()
    offloaded = replace(PLAIN, model=replace(PLAIN.model, cpu_offload="model"))
    monkeypatch.setattr(fit, "_fitted", lambda jobs, config, there: offloaded)
    with Session(PLAIN) as session:
        events = [*session.run(make_plan(jobs[:1], registry.model_card))]
        (loaded,) = (event for event in events if isinstance(event, ModelLoaded))
        assert "one network at a time is on the GPU (--cpu-offload model)" in loaded.offload
        assert len(brought) == 3
    assert frames == expected


def test_ranks_that_would_hold_two_networks_are_refused(jobs: list[VideoJob]) -> None:
    with pytest.raises(UsageError, match="a process holds a VAE in addition to its transformer"):
        run(replace(OFFLOADED, parallel=ParallelConfig(vae_ranks=2, cfg_ranks=2)), jobs)


def test_a_session_refuses_pictures(job: ImageJob) -> None:
    with pytest.raises(UsageError, match="this model uses one network") as raised:
        list(Session(OFFLOADED).run(make_plan([job], registry.model_card)))
    assert "--quantization nf4" in raised.value.hint


def test_the_largest_network_counts_on_a_gpu() -> None:
    card = registry.video_card(registry.EMBEDDED_VIDEO)
    sizes = card.loaded_bytes("bfloat16")
    on_gpu = replace(OFFLOADED, model=ModelChoice(device="cuda", cpu_offload="model"))
    found = networks_need(card, on_gpu)
    assert (found.total, found.waiting) == (max(sizes.values()), sum(sizes.values()))
    plain = networks_need(card, replace(on_gpu, model=ModelChoice(device="cuda")))
    assert plain.total > found.total
    assert plain.waiting == 0
