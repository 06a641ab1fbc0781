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
from hyimg_cli.memory.footprint import Need, Together, held_weights, in_fullest_memory, needs
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

    def refusal(self) -> MachineError:
        """The error of a run that is not begun."""
        there, main = self.available, self.available.main
        room = f"{there.limit} allows" if there.limit else f"{there.place} has"
        left = "" if there.limit else " free"
        found = f"{room} {bytes_text(there.free)}{left}"
        if self.needed.total <= there.free and main is not None:
            found = f"main memory has {bytes_text(main)} free for those that wait"
        return _too_large(self.needed, found, self.remedy)


def need(model: str, jobs: Sequence[Job], config: RunConfig, *, together: int = 1) -> Need:
    """The need of a model with so many of `jobs` at work `together`; without jobs, its weights."""
    revision = config.model.revision
    if videos := [job for job in jobs if isinstance(job, VideoJob)]:
        return video_need(video_card(model, revision, config.model.components), config, videos)
    card = model_card(model, revision)
    weights, waiting = held_weights(card, config), 0
    if config.model.offloads_experts:
        form = precision(config.model)[1], config.model.quantization
        waiting = card.weights.experts_nbytes(*form) + card.encoder_bytes + card.decoder_bytes
    pictures = [job for job in jobs if isinstance(job, ImageJob)]
    if not pictures:
        return Need(weights, waiting=waiting)
    found = in_fullest_memory(needs(pictures, card, config, prefixes=0), card, config)
    return Need(weights, found.widest(Together(together, together)).total, waiting)


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
        raise _too_large(found.needed, "the GPU ran out of memory", hint) from None


def remedy(model: str, jobs: Sequence[Job], config: RunConfig, there: AvailableMemory) -> str:
    """Which settings make it fit, the one that changes least first; else how much is wanted."""
    hints = [f"raise {there.limit}"] if there.limit else []
    are_pictures = _are_pictures(jobs)
    # A line may name another model than the run does.
    config = _changed(config, model=model)
    changes = [(flag, one) for flag, one in _changes(jobs, config) if can_follow(jobs, one)]
    sizes = [(flag, need(model, jobs, changed)) for flag, changed in changes]
    fitting = [
        f"{flag} would fit with {bytes_text(n.total)}" for flag, n in sizes if fits(n, there)
    ]
    own = need(model, jobs, config)
    if fitting:
        hints.append(fitting[0])
    elif own.total <= there.free:
        hints.append("main memory is too small for the networks that wait there")
    else:
        main = there.main
        have_room = [pair for pair in sizes if main is None or pair[1].waiting <= main]
        flag, least = min([("", own), *have_room], key=lambda pair: pair[1].total)
        more = f"free some, or use a machine with {bytes_text(least.total)}"
        hints.append(f"{more} for {flag}" if flag else more)
        if own.waiting:
            offload = f"{OFFLOAD} {config.model.cpu_offload}"
            hints.append(f"{OFFLOAD_EXPERTS if are_pictures else offload} is on already")
    if are_pictures:
        hints += _over_gpus(model, jobs, config, there)
    elif own.work:
        fewer = "--clips-together 1, " if config.batch.clips > 1 else ""
        hints.append(f"{fewer}fewer frames, or a smaller size, hold less K/V")
    return "; ".join(hints)


def can_follow(jobs: Sequence[Job], config: RunConfig) -> bool:
    """True if a run of these jobs, or without any of its picture model, does not refuse its
    settings on this machine.
    """
    with suppress(UsageError):
        here = replace(config, parallel=replace(config.parallel, ray_address=None))
        if _are_pictures(jobs):
            refusals.refuse_unsplit(here.model, here.parallel)
            if here.model.offloads_experts:
                refusals.refuse_experts(here)
        else:
            refusals.refuse_settings(jobs, here)
        return True
    return False


def in_forms(config: RunConfig) -> dict[Quantization, RunConfig]:
    """The run with each quantization that its ranks could share."""
    found = {form: _changed(config, quantization=form) for form in QUANTIZATIONS}
    return {form: one for form, one in found.items() if can_follow((), one)}


def _changed(config: RunConfig, **choice: Any) -> RunConfig:
    """The run with other settings of its model."""
    return replace(config, model=replace(config.model, **choice))


def _changes(jobs: Sequence[Job], config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """Settings with which a model takes less, and the run with each; it may refuse some."""
    choice, are_pictures = config.model, _are_pictures(jobs)
    if not are_pictures:
        for how in OFFLOADS[OFFLOADS.index(choice.cpu_offload) + 1 :]:
            yield f"{OFFLOAD} {how}", _changed(config, cpu_offload=how)
    smaller = QUANTIZATIONS[QUANTIZATIONS.index(choice.quantization) + 1 :]
    for form in smaller:
        yield f"--quantization {form}", _changed(config, quantization=form)
    if are_pictures and not choice.offloads_experts:
        yield OFFLOAD_EXPERTS, _changed(config, offloads_experts=True)
        for form in smaller:
            changed = _changed(config, quantization=form, offloads_experts=True)
            yield f"--quantization {form} {OFFLOAD_EXPERTS}", changed
    if precision(choice) == ("cpu", "float32"):
        yield "--dtype bfloat16", _changed(config, dtype="bfloat16")


def _over_gpus(
    model: str, jobs: Sequence[Job], config: RunConfig, there: AvailableMemory
) -> Iterator[str]:
    """How more GPUs would hold it."""
    if precision(config.model)[0] == "cpu":
        return
    if config.parallel.tensor_ranks > 1 or config.model.device == "balanced":
        yield "more GPUs hold less each"
        return
    for ranks in range(2, there.gpus // config.parallel.cfg_ranks + 1):
        split = replace(config, parallel=replace(config.parallel, tensor_ranks=ranks))
        if can_follow(jobs, split) and fits(need(model, jobs, split), there):
            spread = f"--tensor-parallel-size {ranks} or --device balanced"
            yield f"{spread} spreads it over the {there.gpus} GPUs here"
            return
    yield "more GPUs share it by --tensor-parallel-size or --device balanced"


def _are_pictures(jobs: Sequence[Job]) -> bool:
    return all(isinstance(job, ImageJob) for job in jobs)


def _too_large(needed: Need, found: str, hint: str) -> MachineError:
    work = f", one job beside them {bytes_text(needed.work)}" if needed.work else ""
    what = f"the weights take {bytes_text(needed.weights)}{work}; {found}"
    return MachineError(what, hint=hint, code="machine.memory")
