"""Decide whether a model and its jobs fit into memory, and find what would make them fit.

`plan`, `doctor` and the run ask here, about pictures and videos, one process, ranks and replicas.
A model of several networks that does not fit takes an offload by itself, which changes no pixel. If
a model fits with none of its jobs alone, its run is refused before anything is loaded.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from hyimg_cli.errors import MachineError, UsageError
from hyimg_cli.journal.keys import precision
from hyimg_cli.memory.available import AvailableMemory, available_memory
from hyimg_cli.memory.footprint import Need, picture_need, usable_bytes
from hyimg_cli.memory.refusals import is_latent, refuse_settings
from hyimg_cli.memory.videos import needs_of, networks_need
from hyimg_cli.models.registry import model_card, video_card
from hyimg_cli.settings.run import OFFLOADS, QUANTIZATIONS, MachineInfo, Quantization, RunConfig
from hyimg_cli.spec.card import Networks
from hyimg_cli.spec.job import ImageJob, Job, VideoJob
from hyimg_cli.spec.units import bytes_text
from hyimg_cli.spec.work import video_work

# Bytes of common cards; the driver uses some of each.
GPU_SIZES = {f"{gb} GB": gb * 1_000_000_000 for gb in (12, 16, 24, 48)}


@dataclass(frozen=True)
class Fit:
    """A model's need, the available memory, and a remedy if that is too little.

    `config`: the run, with the offload that the model takes by itself if it takes one.
    """

    needed: Need
    available: AvailableMemory
    config: RunConfig
    remedy: str = ""
    takes_offload: bool = False

    @property
    def is_enough(self) -> bool:
        return fits(self.needed, self.available)

    @property
    def offload(self) -> str:
        """Return the offload that the model takes by itself, in words; empty if it takes none."""
        turn = self.config.model.cpu_offload
        what = "one network" if turn == "model" else "one block of a network"
        said = f"{what} at a time is on the GPU (--cpu-offload {turn}); same pixels"
        return f"{self.available}: {said}" if self.takes_offload else ""

    def refusal(self, why: str = "") -> MachineError:
        """Return the error of a run that does not start, or that turned out to have too little."""
        needed, main = self.needed, self.available.main
        if not why and main is not None and needed.total <= self.available.free:
            waiting = f"the networks that wait take {bytes_text(needed.waiting)} of main memory"
            what = f"{waiting}, which has {bytes_text(main)} free"
            return MachineError(what, hint=self.remedy, code="machine.memory")
        work = f" and one job another {bytes_text(needed.work)}" if needed.work else ""
        what = f"the weights take {bytes_text(needed.weights)}{work}; {why or self.available}"
        return MachineError(what, hint=self.remedy, code="machine.memory")


def need(model: str, jobs: Sequence[Job], config: RunConfig, *, together: int = 1) -> Need:
    """Return a model's need with this many of `jobs` at work `together`; without jobs, weights."""
    revision = config.model.revision
    if videos := [job for job in jobs if isinstance(job, VideoJob)]:
        films = video_card(model, revision, config.model.video_components)
        return networks_need(films, config, [video_work(job, films) for job in videos])
    pictures = [job for job in jobs if isinstance(job, ImageJob)]
    card = model_card(model, revision)
    if card.networks is not None:
        return networks_need(card.networks, config)
    return picture_need(card, config, pictures, together)


def fits(needed: Need, there: AvailableMemory) -> bool:
    """Apply the one rule; unknown memory counts as sufficient."""
    return needed.total <= there.free and (there.main is None or needed.waiting <= there.main)


def check_fit(model: str, jobs: Sequence[Job], config: RunConfig, there: AvailableMemory) -> Fit:
    """Check a model with only the one of `jobs` at work that needs least; without jobs, weights.

    With the offload that it takes by itself, if nothing else fits.
    """
    given, config = config, _fitted(jobs, config, there)
    tried = list[tuple[Need, Sequence[Job]]]()
    for alone in (jobs[at : at + 1] for at in range(max(1, len(jobs)))):
        needed = need(model, alone, config)
        if fits(needed, there):
            return Fit(needed, there, config, takes_offload=config is not given)
        tried.append((needed, alone))
    least, smallest = min(tried, key=lambda one: one[0].total)
    return Fit(least, there, config, remedy(model, smallest, config, there))


def _fitted(jobs: Sequence[Job], config: RunConfig, there: AvailableMemory) -> RunConfig:
    """Return the run with the fastest offload with which each of a model's jobs fits alone.

    Or with which one of them does; the run as it is if that is enough, if nothing helps, or if it
    may not be changed. What a job needs is what `cards_for` counts.
    """
    choice = config.model
    is_open = choice.auto_fit and choice.cpu_offload == "none" and precision(choice)[0] == "cuda"
    networks = _networks_of(jobs[0], config) if jobs and is_open else None
    if networks is None:
        return config
    alike = {_shape(job): job for job in jobs}.values()
    ways = [config, *(_changed(config, cpu_offload=turn) for turn in OFFLOADS[1:])]
    ways = [one for one in ways if one is config or _can_follow(jobs, one)]
    have_room = [[_has_room(job, networks, one, there) for job in alike] for one in ways]
    for enough in (all, any):
        for one, has_room in zip(ways, have_room, strict=True):
            if enough(has_room):
                return one
    return config


def _networks_of(job: Job, config: RunConfig) -> Networks | None:
    """Return the networks of a job's model; None if it uses one network for everything."""
    choice = config.model
    if isinstance(job, VideoJob):
        return video_card(job.model, choice.revision, choice.video_components)
    return model_card(job.model, choice.revision).networks


def _shape(job: Job) -> tuple[Any, ...]:
    """Return what decides a job's memory."""
    if isinstance(job, VideoJob):
        return job.size, job.num_frames
    return job.size, len(job.images), job.layers


def _has_room(job: Job, networks: Networks, config: RunConfig, there: AvailableMemory) -> bool:
    """Return True if a job has room at each moment, alone."""
    waiting = networks_need(networks, config).waiting
    moments = needs_of(job, networks, config).values()
    return all(fits(replace(one, waiting=waiting), there) for one in moments)


def need_of_second(model: str, jobs: Sequence[Job], config: RunConfig) -> Need:
    """Return the need of a model that stays loaded with another: with a full batch.

    If its work is unknown, its weights and as much again.
    """
    found = need(model, jobs, config, together=config.batch.max_size)
    return found if found.work else replace(found, work=found.weights)


def spare_bytes(jobs: Sequence[ImageJob], config: RunConfig, there: AvailableMemory) -> int:
    """Return the bytes for experts that may stay on the GPU with a full batch of a model's jobs."""
    full = need(jobs[0].model, jobs, config, together=config.batch.max_size)
    return max(0, usable_bytes(there.free - full.total))


@contextmanager
def memory_guard(model: str, jobs: Sequence[Job], config: RunConfig) -> Iterator[Fit]:
    """Load a model in this block as its fit says; raise MachineError if it does not fit."""
    import torch

    found = check_fit(model, jobs, config, available_memory(config))
    if not found.is_enough:
        raise found.refusal()
    try:
        yield found
    except torch.OutOfMemoryError:
        less = found.available.at_most(found.needed.total - 1, found.available.limit)
        short = check_fit(model, jobs[:1], _changed(found.config, auto_fit=False), less)
        raise short.refusal("the GPU ran out of memory") from None


def remedy(model: str, jobs: Sequence[Job], config: RunConfig, there: AvailableMemory) -> str:
    """Return the settings that make it fit, the smallest change first; else the memory needed."""
    hints = [f"raise {there.limit}"] if there.limit else []
    held: dict[str, Need] = {}
    # A line may name another model than the run does.
    config = _changed(config, model=model)
    for flags, one in _alternatives(jobs, config, there.gpus):
        needed = need(model, jobs, one)
        if flags and fits(needed, there):
            fitting = f"{flags} would fit with {bytes_text(needed.total)}"
            return "; ".join([*hints, fitting, *_too_narrow(jobs, one, there)])
        if not flags or there.main is None or needed.waiting <= there.main:
            held[flags] = needed
    own, takes_turns = held[""], any(is_latent(job, config) for job in jobs)
    if own.total <= there.free:
        waiting = f"the networks that wait there, {bytes_text(own.waiting)}"
        return "; ".join([*hints, f"main memory cannot hold {waiting}"])
    flags, least = min(held.items(), key=lambda pair: pair[1].total)
    which = f" for {flags}" if flags else ""
    hints.append(f"free some memory, or use a machine with {bytes_text(least.total)}{which}")
    if own.waiting:
        on = f"--cpu-offload {config.model.cpu_offload}" if takes_turns else "--offload-experts"
        hints.append(f"{on} is already on")
    if takes_turns and own.work:
        fewer = "--clips-together 1, " if config.batch.clips > 1 else ""
        hints.append(f"use {fewer}fewer frames or a smaller size, which need less K/V")
    elif not takes_turns and precision(config.model)[0] == "cuda":
        hints.append("split it over more GPUs with --tensor-parallel-size or --device balanced")
    return "; ".join(hints)


def _too_narrow(jobs: Sequence[Job], config: RunConfig, there: AvailableMemory) -> Iterator[str]:
    """Yield what is short although the weights fit: the largest moment of the smallest job."""
    networks = _networks_of(jobs[0], config) if jobs else None
    if networks is None:
        return
    largest = (
        max(needs_of(job, networks, config).items(), key=lambda moment: moment[1].total)
        for job in jobs
    )
    moment, needed = min(largest, key=lambda found: found[1].total)
    if needed.total > there.free:
        what = f"one job needs about {bytes_text(needed.total)}"
        if moment == "decode":
            yield f"{what} to decode, or is decoded in smaller tiles, which changes pixels"
        elif moment == "denoise":
            yield f"{what} in a step: use a smaller size"


def cards_for(job: Job, networks: Networks, config: RunConfig) -> dict[str, str | None]:
    """Return by GPU size the flags that change least and let it take a job.

    Empty if none is needed; None if none is enough.
    """
    gpu = MachineInfo(has_gpu=True, has_triton=True)
    plain = _changed(config, device="cuda", quantization="none", cpu_offload="none", machine=gpu)
    held = {
        flags: max(needed.total for needed in needs_of(job, networks, one).values())
        for flags, one in _alternatives([job], plain)
    }
    return {
        name: next((flags for flags, most in held.items() if most <= room), None)
        for name, room in GPU_SIZES.items()
    }


def cards_text(cards: Mapping[str, str | None]) -> str:
    """Return these flags in words."""
    words = {None: "is too small", "": "as is"}
    return ", ".join(f"{name} {words.get(flags, f'with {flags}')}" for name, flags in cards.items())


def in_forms(jobs: Sequence[Job], config: RunConfig) -> dict[Quantization, RunConfig]:
    """Return the run with each quantization that its jobs' model supports."""
    found = {form: _changed(config, quantization=form) for form in QUANTIZATIONS}
    return {form: one for form, one in found.items() if _can_follow(jobs, one)}


def _changed(config: RunConfig, **choice: Any) -> RunConfig:
    """Return the run with other settings of its model."""
    return replace(config, model=replace(config.model, **choice))


def _can_follow(jobs: Sequence[Job], config: RunConfig) -> bool:
    """Return True if a run of these jobs accepts its settings on this machine."""
    with suppress(UsageError):
        refuse_settings(jobs, replace(config, parallel=replace(config.parallel, ray_address=None)))
        return True
    return False


def _alternatives(
    jobs: Sequence[Job], config: RunConfig, gpus: int = 0
) -> Iterator[tuple[str, RunConfig]]:
    """Yield the run as it is, then with each memory-saving setting, the smallest change first.

    As flags; without settings that the run refuses.
    """
    choice, parallel = config.model, config.parallel
    forms = QUANTIZATIONS[QUANTIZATIONS.index(choice.quantization) + 1 :]
    turns = OFFLOADS[OFFLOADS.index(choice.cpu_offload) + 1 :]
    counts = range(parallel.tensor_ranks + 1, gpus // parallel.cfg_ranks + 1)
    is_wide = precision(choice)[1] == "float32"
    # By setting, from the one that is changed last.
    options: tuple[list[tuple[str, dict[str, Any]]], ...] = (
        [("--dtype bfloat16", {"dtype": "bfloat16"})] if is_wide else [],
        [("--offload-experts", {"offloads_experts": True})],
        [(f"--quantization {form}", {"quantization": form}) for form in forms],
        [(f"--cpu-offload {turn}", {"cpu_offload": turn}) for turn in turns],
        [(f"--tensor-parallel-size {count}", {"tensor_ranks": count}) for count in counts],
    )
    for picked in product(*([("", {}), *some] for some in options)):
        flags = " ".join(flag for flag, _ in reversed(picked) if flag)
        changes = {name: value for _, change in picked for name, value in change.items()}
        ranks = changes.pop("tensor_ranks", parallel.tensor_ranks)
        one = replace(_changed(config, **changes), parallel=replace(parallel, tensor_ranks=ranks))
        if not flags or _can_follow(jobs, one):
            yield flags, one
