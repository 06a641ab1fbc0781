"""Judge whether a model and its jobs fit into memory, and find what would make them fit.

`plan`, `doctor` and the run ask here, about pictures and videos, one process, ranks and replicas. A
run of a model that does not fit with any of its jobs alone is refused before anything is loaded.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from hyimg_cli.errors import MachineError, UsageError
from hyimg_cli.journal.keys import precision
from hyimg_cli.memory import refusals
from hyimg_cli.memory.available import AvailableMemory, available_memory
from hyimg_cli.memory.footprint import Need, picture_need
from hyimg_cli.memory.refusals import OFFLOAD, OFFLOAD_EXPERTS
from hyimg_cli.memory.videos import video_need
from hyimg_cli.models.registry import model_card, video_card
from hyimg_cli.settings.run import OFFLOADS, QUANTIZATIONS, Quantization, RunConfig
from hyimg_cli.spec.job import ImageJob, Job, VideoJob
from hyimg_cli.spec.units import bytes_text


@dataclass(frozen=True)
class Fit:
    """A model's need beside what is present, and a remedy where that is too little."""

    needed: Need
    available: AvailableMemory
    remedy: str = ""

    @property
    def is_enough(self) -> bool:
        return fits(self.needed, self.available)

    def refusal(self, found: str = "") -> MachineError:
        """The error of a run that is not begun, or that `found` too little after all."""
        needed, there = self.needed, self.available
        if not found and needed.total <= there.free and there.main is not None:
            found = f"main memory has {bytes_text(there.main)} free for those that wait"
        work = f", one job beside them {bytes_text(needed.work)}" if needed.work else ""
        what = f"the weights take {bytes_text(needed.weights)}{work}; {found or there}"
        return MachineError(what, hint=self.remedy, code="machine.memory")


def need(model: str, jobs: Sequence[Job], config: RunConfig, *, together: int = 1) -> Need:
    """The need of a model with so many of `jobs` at work `together`; without jobs, its weights."""
    revision = config.model.revision
    if videos := [job for job in jobs if isinstance(job, VideoJob)]:
        return video_need(video_card(model, revision, config.model.components), config, videos)
    pictures = [job for job in jobs if isinstance(job, ImageJob)]
    return picture_need(model_card(model, revision), config, pictures, together)


def fits(needed: Need, there: AvailableMemory) -> bool:
    """The one rule. What is not known to be missing is there."""
    return needed.total <= there.free and (there.main is None or needed.waiting <= there.main)


def check_fit(model: str, jobs: Sequence[Job], config: RunConfig, there: AvailableMemory) -> Fit:
    """Judge a model with one job at work, whichever of `jobs` takes least."""
    found: list[tuple[Need, Sequence[Job]]] = []
    # Without jobs, its weights.
    for alone in (jobs[at : at + 1] for at in range(max(1, len(jobs)))):
        needed = need(model, alone, config)
        if fits(needed, there):
            return Fit(needed, there)
        found.append((needed, alone))
    needed, least = min(found, key=lambda pair: pair[0].total)
    return Fit(needed, there, remedy(model, least, config, there))


def need_of_second(model: str, jobs: Sequence[Job], config: RunConfig) -> Need:
    """The need of a model that is to stay beside another: with a full batch; where its work is not
    known, as much again as its weights.
    """
    found = need(model, jobs, config, together=config.batch.max_size)
    return found if found.work else replace(found, work=found.weights)


@contextmanager
def memory_guard(model: str, jobs: Sequence[Job], config: RunConfig) -> Iterator[None]:
    """Load a model inside: it is refused where it does not fit, or did not after all. Raises
    MachineError.
    """
    import torch

    found = check_fit(model, jobs, config, available_memory(config))
    if not found.is_enough:
        raise found.refusal()
    try:
        yield
    except torch.OutOfMemoryError:
        less = found.available.at_most(found.needed.total - 1, found.available.limit)
        hint = remedy(model, jobs[:1], config, less)
        raise replace(found, remedy=hint).refusal("the GPU ran out of memory") from None


def remedy(model: str, jobs: Sequence[Job], config: RunConfig, there: AvailableMemory) -> str:
    """Which settings make it fit, the one that changes least first; else how much is wanted."""
    # A line may name another model than the run does.
    config = _changed(config, model=model)
    own, are_pictures = need(model, jobs, config), _are_pictures(jobs)
    sizes = {flag: need(model, jobs, one) for flag, one in _smaller(jobs, config).items()}
    hints = [f"raise {there.limit}"] if there.limit else []
    if fitting := [flag for flag, one in sizes.items() if fits(one, there)]:
        hints.append(f"{fitting[0]} would fit with {bytes_text(sizes[fitting[0]].total)}")
    elif own.total <= there.free:
        hints.append("main memory is too small for the networks that wait there")
    else:
        main = there.main
        held = {f: one for f, one in sizes.items() if main is None or one.waiting <= main}
        flag, least = min([("", own), *held.items()], key=lambda pair: pair[1].total)
        which = f" for {flag}" if flag else ""
        hints.append(f"free some, or use a machine with {bytes_text(least.total)}{which}")
        if own.waiting:
            on = OFFLOAD_EXPERTS if are_pictures else f"{OFFLOAD} {config.model.cpu_offload}"
            hints.append(f"{on} is on already")
    if are_pictures and precision(config.model)[0] == "cuda":
        hints.append(_over_gpus(model, jobs, config, there))
    elif own.work and not are_pictures:
        fewer = "--clips-together 1, " if config.batch.clips > 1 else ""
        hints.append(f"{fewer}fewer frames, or a smaller size, hold less K/V")
    return "; ".join(hints)


def can_follow(jobs: Sequence[Job], config: RunConfig) -> bool:
    """True if a run of these jobs, or without any of its picture model, does not refuse its
    settings on this machine.
    """
    config = replace(config, parallel=replace(config.parallel, ray_address=None))
    with suppress(UsageError):
        if _are_pictures(jobs):
            refusals.refuse_unsplit(config.model, config.parallel)
            if config.model.offloads_experts:
                refusals.refuse_experts(config)
        else:
            refusals.refuse_settings(jobs, config)
        return True
    return False


def in_forms(config: RunConfig) -> dict[Quantization, RunConfig]:
    """The run with each quantization that its ranks could share."""
    found = {form: _changed(config, quantization=form) for form in QUANTIZATIONS}
    return {form: one for form, one in found.items() if can_follow((), one)}


def _changed(config: RunConfig, **choice: Any) -> RunConfig:
    """The run with other settings of its model."""
    return replace(config, model=replace(config.model, **choice))


def _smaller(jobs: Sequence[Job], config: RunConfig) -> dict[str, RunConfig]:
    """The run with each of the settings by which a model takes less, unless it refuses them."""
    choice, found = config.model, dict[str, RunConfig]()
    if not _are_pictures(jobs):
        for how in OFFLOADS[OFFLOADS.index(choice.cpu_offload) + 1 :]:
            found[f"{OFFLOAD} {how}"] = _changed(config, cpu_offload=how)
    for form in QUANTIZATIONS[QUANTIZATIONS.index(choice.quantization) + 1 :]:
        found[f"--quantization {form}"] = _changed(config, quantization=form)
    if _are_pictures(jobs) and not choice.offloads_experts:
        for flag, one in [("", config), *found.items()]:
            found[f"{flag} {OFFLOAD_EXPERTS}".lstrip()] = _changed(one, offloads_experts=True)
    if precision(choice) == ("cpu", "float32"):
        found["--dtype bfloat16"] = _changed(config, dtype="bfloat16")
    return {flag: one for flag, one in found.items() if can_follow(jobs, one)}


def _over_gpus(model: str, jobs: Sequence[Job], config: RunConfig, there: AvailableMemory) -> str:
    """How more GPUs would hold it."""
    if config.parallel.tensor_ranks > 1 or config.model.device == "balanced":
        return "more GPUs hold less each"
    for ranks in range(2, there.gpus // config.parallel.cfg_ranks + 1):
        split = replace(config, parallel=replace(config.parallel, tensor_ranks=ranks))
        if can_follow(jobs, split) and fits(need(model, jobs, split), there):
            flags = f"--tensor-parallel-size {ranks} or --device balanced"
            return f"{flags} spreads it over the {there.gpus} GPUs here"
    return "more GPUs share it by --tensor-parallel-size or --device balanced"


def _are_pictures(jobs: Sequence[Job]) -> bool:
    return all(isinstance(job, ImageJob) for job in jobs)
