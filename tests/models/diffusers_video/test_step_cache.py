"""Videos under a lossy step cache: which steps run a network, resume, jobs one after another."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from models.diffusers_video.conftest import latents_of
from models.diffusers_video.test_denoise import embedded, host_reads
from safetensors.torch import load, save
from torch import Tensor

from hyimg_cli.models.diffusers_video.model import DiffusersVideo
from hyimg_cli.models.latent import LatentDenoiser
from hyimg_cli.models.latent_video import BranchInputs
from hyimg_cli.spec.job import Size, VideoJob
from hyimg_cli.spec.step_cache import StepCache
from hyimg_cli.spec.work import video_work

RULE = StepCache(3, 2, first=2)
UNIPC = "UniPCMultistepScheduler"
NAMES = ("hunyuan", "wan22")


@pytest.fixture
def job(job: VideoJob) -> VideoJob:
    small = replace(job, size=Size(32, 32), num_frames=5)
    return replace(small, num_inference_steps=12, flow_shift=3.0, step_cache=RULE)


@contextmanager
def forwards(model: DiffusersVideo) -> Iterator[list[int]]:
    """The number of the network of each forward."""
    seen: list[int] = []
    at = {id(network): number for number, network in enumerate(model.networks)}
    parts = [network.proj_out for network in model.networks]
    handles = [
        part.register_forward_hook(partial(_noted, seen, at[id(network)]))
        for part, network in zip(parts, model.networks, strict=True)
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _noted(seen: list[int], number: int, *_: object) -> None:
    seen.append(number)


@pytest.mark.parametrize("name", NAMES)
def test_full_steps_alone_run_a_network_and_both_begin_with_one(
    models: dict[str, DiffusersVideo], job: VideoJob, name: str
) -> None:
    model = models[name]
    networks = model.network_of(model.schedule(job))
    expected = [n for n, full in zip(networks, RULE.full_steps(networks), strict=True) if full]
    with forwards(model) as seen:
        denoiser = embedded(model, job)
        latents = denoiser.latents
        for index in range(12):
            latents = denoiser.step(index, latents)
    assert seen[::2] == seen[1::2] == expected
    assert set(seen) == set(range(len(model.networks)))
    report = denoiser.velocities.report()
    assert report is not None
    assert (report.full, report.estimated) == (len(expected), 12 - len(expected))
    # What the plan says beforehand: of two transformers it may count a step more.
    assert video_work(job, model.card).full_steps - len(expected) in (0, len(set(networks)) - 1)
    assert torch.isfinite(latents).all()
    assert not torch.equal(latents, latents_of(model, replace(job, step_cache=None)))


@pytest.mark.parametrize("name", NAMES)
def test_a_job_goes_on_to_the_bit_between_any_two_steps(
    models: dict[str, DiffusersVideo], job: VideoJob, name: str
) -> None:
    """The state behind each step, through bytes: one step more gives the same latents and state."""
    model = models[name]
    whole = embedded(model, job)
    latents = whole.latents
    states = []
    for index in range(12):
        states.append(save({**whole.state(), "latents": latents.contiguous()}))
        latents = whole.step(index, latents)
    last = {**whole.state(), "latents": latents}
    for index in range(1, 12):
        kept = load(states[index])
        before = kept.pop("latents")
        again = embedded(model, job)
        again.restore(index, before, kept)
        moved = again.step(index, before)
        found = {**again.state(), "latents": moved}
        expected = load(states[index + 1]) if index < 11 else last
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_nothing_is_left_for_the_next_job(tiny: DiffusersVideo, job: VideoJob) -> None:
    """Neither by a whole one, nor by one that ended between two full steps."""
    clean = latents_of(tiny, job)
    broken = embedded(tiny, replace(job, seed=job.seed + 1))
    latents = broken.latents
    for index in range(6):
        latents = broken.step(index, latents)
    assert torch.equal(latents_of(tiny, job), clean)


def test_the_loop_reads_nothing_back(
    models: dict[str, DiffusersVideo], job: VideoJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    denoiser: LatentDenoiser = embedded(models["wan22"], job)
    assert host_reads(denoiser, monkeypatch, range(1, 12)) == []


class Ranks:
    """A runner elsewhere: how often it was begun, and which steps it was asked for."""

    def __init__(self) -> None:
        self.begun = 0
        self.asked: list[int] = []

    def begin(self, inputs: Sequence[BranchInputs]) -> None:
        self.begun += 1

    def velocity(self, step: int, latents_BCFYX: Tensor, timestep_B: Tensor) -> Sequence[Tensor]:
        self.asked.append(step)
        return [latents_BCFYX, 2 * latents_BCFYX]


def begun_at(ranks: Ranks, model: DiffusersVideo, job: VideoJob) -> LatentDenoiser:
    """A denoiser whose branches are elsewhere."""
    before, model.branch_runner = model.branch_runner, lambda: ranks
    try:
        return embedded(model, job)
    finally:
        model.branch_runner = before


def test_other_ranks_are_not_called_at_an_estimated_step(
    tiny: DiffusersVideo, job: VideoJob
) -> None:
    ranks = Ranks()
    denoiser = begun_at(ranks, tiny, job)
    latents = denoiser.latents
    for step in range(12):
        latents = denoiser.step(step, latents)
    assert ranks.asked == [0, 1, 4, 7, 10, 11]
    assert ranks.begun == 1


def test_branches_are_begun_with_the_first_full_step(tiny: DiffusersVideo, job: VideoJob) -> None:
    """Also by another process, which goes on with an estimated one."""
    ranks, others = Ranks(), Ranks()
    first = begun_at(ranks, tiny, job)
    latents = first.latents
    for step in range(5):
        latents = first.step(step, latents)
    second = begun_at(others, tiny, job)
    second.restore(5, latents, first.state())
    for step in range(5, 8):
        latents = second.step(step, latents)
        assert others.begun == (step == 7)
    assert others.asked == [7]
