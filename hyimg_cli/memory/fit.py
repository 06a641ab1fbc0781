"""Judge whether a model and its jobs fit into memory, and find what would make them fit.

`plan`, `doctor` and the run ask here, about pictures and videos, one process, ranks and replicas. A
run of a model that does not fit with any of its jobs alone is refused before anything is loaded.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from hyimg_cli.errors import MachineError, UsageError
from hyimg_cli.journal.keys import precision
from hyimg_cli.memory.footprint import Need, need
from hyimg_cli.memory.gpu_settings import OFFLOAD, OFFLOAD_EXPERTS, refuse_offload_on_ranks
from hyimg_cli.memory.present import Present, present
from hyimg_cli.memory.tensor_ranks import refuse_unsplit
from hyimg_cli.settings.run import OFFLOADS, Quantization, RunConfig
from hyimg_cli.spec.job import ImageJob, Job
from hyimg_cli.spec.units import bytes_text

# In the order of what they change.
FORMS: tuple[Quantization, ...] = ("none", "fp8", "nf4")


@dataclass(frozen=True)
class Fit:
    """A model's need beside what is present, and a remedy where that is too little."""

    needed: Need
    present: Present
    remedy: str = ""

    @property
    def is_enough(self) -> bool:
        return fits(self.needed, self.present)

    def refusal(self) -> MachineError:
        """The error of a run that is not begun."""
        there, main = self.present, self.present.main
        room = f"{there.limit} allows" if there.limit else f"{there.place} has"
        left = "" if there.limit else " free"
        found = f"{room} {bytes_text(there.free)}{left}"
        if self.needed.total <= there.free and main is not None:
            found = f"main memory has {bytes_text(main)} free for those that wait"
        return _too_large(self.needed, found, self.remedy)


def fits(needed: Need, there: Present) -> bool:
    """The one rule. What is not known to be missing is there."""
    return needed.total <= there.free and (there.main is None or needed.waiting <= there.main)


def judged(model: str, jobs: Sequence[Job], config: RunConfig, there: Present) -> Fit:
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
def room_for(model: str, jobs: Sequence[Job], config: RunConfig) -> Iterator[None]:
    """Load a model inside: it is refused where it does not fit, or did not after all. Raises
    MachineError.
    """
    import torch

    found = judged(model, jobs, config, present(config))
    if not found.is_enough:
        raise found.refusal()
    try:
        yield
    except torch.OutOfMemoryError:
        less = found.present.at_most(found.needed.total - 1, found.present.limit)
        hint = remedy(model, jobs[:1], config, less)
        raise _too_large(found.needed, "the GPU ran out of memory", hint) from None


def remedy(model: str, jobs: Sequence[Job], config: RunConfig, there: Present) -> str:
    """Which settings make it fit, the one that changes least first; else how much is wanted."""
    hints = [f"raise {there.limit}"] if there.limit else []
    # A line may name another model than the run does.
    config = replace(config, model=replace(config.model, model=model))
    changes = list(_changes(jobs, config))
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
        hints.append(_wanted(own, have_room))
        if own.waiting:
            how = (
                OFFLOAD_EXPERTS if _are_pictures(jobs) else f"{OFFLOAD} {config.model.cpu_offload}"
            )
            hints.append(f"{how} is on already")
    if own.work and not _are_pictures(jobs):
        fewer = "--clips-together 1, " if config.batch.clips > 1 else ""
        hints.append(f"{fewer}fewer frames, or a smaller size, hold less K/V")
    if _are_pictures(jobs):
        hints += _over_gpus(model, jobs, config, there)
    return "; ".join(hints)


def can_be_split(config: RunConfig) -> bool:
    """True if the run's ranks can share its model in its quantization."""
    with suppress(UsageError):
        refuse_unsplit(config.model, config.parallel)
        return True
    return False


def in_forms(config: RunConfig) -> dict[Quantization, RunConfig]:
    """The run with each quantization that its ranks could share."""
    found = {
        form: replace(config, model=replace(config.model, quantization=form)) for form in FORMS
    }
    return {form: one for form, one in found.items() if can_be_split(one)}


def _changes(jobs: Sequence[Job], config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """Settings with which a model takes less, and the run with each."""
    choice, parallel = config.model, config.parallel
    kind, dtype = precision(choice)
    if not _are_pictures(jobs) and kind == "cuda":
        with suppress(UsageError):
            refuse_offload_on_ranks(parallel)
            for how in OFFLOADS[OFFLOADS.index(choice.cpu_offload) + 1 :]:
                changed = replace(config, model=replace(choice, cpu_offload=how))
                yield f"{OFFLOAD} {how}", changed
    forms = in_forms(config) if _are_pictures(jobs) else _of_videos(config, kind)
    for form, changed in forms.items():
        if FORMS.index(form) > FORMS.index(choice.quantization):
            yield f"--quantization {form}", changed
    is_on_one_gpu = kind == "cuda" and parallel.picture_ranks == 1 and choice.device != "balanced"
    if _are_pictures(jobs) and is_on_one_gpu:
        yield from _with_experts_outside(config)
    if kind == "cpu" and dtype == "float32":
        yield "--dtype bfloat16", replace(config, model=replace(choice, dtype="bfloat16"))


def _with_experts_outside(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """The run with its experts in main memory, in each quantization that takes no more than now."""
    choice = config.model
    for form in FORMS[FORMS.index(choice.quantization) :] if not choice.offloads_experts else ():
        in_form = "" if form == choice.quantization else f"--quantization {form} "
        changed = replace(choice, quantization=form, offloads_experts=True)
        yield f"{in_form}{OFFLOAD_EXPERTS}", replace(config, model=changed)


def _of_videos(config: RunConfig, kind: str) -> dict[Quantization, RunConfig]:
    """The run with each quantization of a video's transformer; 4 bits are a GPU's."""
    forms = FORMS if kind == "cuda" else FORMS[:-1]
    return {form: replace(config, model=replace(config.model, quantization=form)) for form in forms}


def _over_gpus(model: str, jobs: Sequence[Job], config: RunConfig, there: Present) -> Iterator[str]:
    """How more GPUs would hold it."""
    if precision(config.model)[0] == "cpu":
        return
    if config.parallel.tensor_ranks > 1 or config.model.device == "balanced":
        yield "more GPUs hold less each"
        return
    for ranks in range(2, there.gpus // config.parallel.cfg_ranks + 1):
        split = replace(config, parallel=replace(config.parallel, tensor_ranks=ranks))
        if can_be_split(split) and fits(need(model, jobs, split), there):
            spread = f"--tensor-parallel-size {ranks} or --device balanced"
            yield f"{spread} spreads it over the {there.gpus} GPUs here"
            return
    yield "more GPUs share it by --tensor-parallel-size or --device balanced"


def _wanted(own: Need, smaller: Sequence[tuple[str, Need]]) -> str:
    flag, least = min([("", own), *smaller], key=lambda pair: pair[1].total)
    more = f"free some, or use a machine with {bytes_text(least.total)}"
    return f"{more} for {flag}" if flag else more


def _are_pictures(jobs: Sequence[Job]) -> bool:
    return all(isinstance(job, ImageJob) for job in jobs)


def _too_large(needed: Need, found: str, hint: str) -> MachineError:
    work = f", one job beside them {bytes_text(needed.work)}" if needed.work else ""
    what = f"the weights take {bytes_text(needed.weights)}{work}; {found}"
    return MachineError(what, hint=hint, code="machine.memory")
