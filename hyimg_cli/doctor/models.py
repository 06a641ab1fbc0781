"""The chosen checkpoints: whether all of them is there, and whether it fits into memory. Headers
are read, no weights.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

from hyimg_cli.doctor import places
from hyimg_cli.doctor.check import Check, Subject
from hyimg_cli.engine import runner
from hyimg_cli.errors import CheckpointError, MachineError, UsageError
from hyimg_cli.journal.keys import precision
from hyimg_cli.manifest.manifest import manifest_of
from hyimg_cli.memory.footprint import footprint
from hyimg_cli.memory.gpu_settings import refuse_in_session, refuse_offload_on_cpu
from hyimg_cli.memory.present import available_bytes
from hyimg_cli.memory.tensor_ranks import rank_footprints, refuse_unsplit
from hyimg_cli.models import registry
from hyimg_cli.settings.precedence import settle
from hyimg_cli.spec.card import ModelCard, VideoCard
from hyimg_cli.spec.job import ImageJob
from hyimg_cli.spec.run import ModelChoice, Quantization, RunConfig
from hyimg_cli.spec.units import bytes_text

Card = ModelCard | VideoCard
CardOf = Callable[[str, str | None], Card]
# In the order of what they change.
FORMS: tuple[Quantization, ...] = ("none", "fp8", "nf4")
# An edit, as most jobs are; everything else is the checkpoint's own default.
_JOB = b'{"prompt": "an edit", "images": ["picture.png"]}'
_UNREAD = "what the model needs is not known: its checkpoint cannot be read"
_UNCOUNTED = "what the model needs is not known: neither its weights nor their indexes are here"
# What a folder lacks that has only been looked at: small files without weights.
_NOT_FETCHED = ("checkpoint.no-weights", "checkpoint.missing-shard")


def image_checkpoint(subject: Subject) -> Check:
    """The files of the picture model."""
    return _checkpoint("checkpoint", subject.image_model, subject, registry.model_card)


def video_checkpoint(subject: Subject) -> Check:
    """The files of the video model."""
    return _checkpoint("video checkpoint", subject.video_model, subject, registry.video_card)


def _checkpoint(name: str, model: str, subject: Subject, card_of: CardOf) -> Check:
    shown, revision = model_name(model), subject.config.model.revision
    try:
        stored = registry.stored_weights(model, revision)
        registry.refuse_other_weights(model, revision)
    except CheckpointError as error:
        return _incomplete(name, model, error, lambda: card_of(model, revision))
    parts = ", ".join(f"{part} {bytes_text(one.nbytes)}" for part, one in stored.items())
    count = sum(one.count for one in stored.values())
    found = f"{shown}: complete, {count / 1e6:,.1f} M weights ({parts})"
    # Reading the card also reads the configuration.
    is_trained = card_of(model, revision).is_trained
    return Check(name, "ok", found if is_trained else f"{found}; untrained, for trying out only")


def _incomplete(name: str, model: str, error: CheckpointError, card: Callable[[], Card]) -> Check:
    """A checkpoint of the hub may still be fetched by the first run; a folder is what it is."""
    shown = model_name(model)
    what = f"{shown}: {error.what}"
    if not _is_hub_id(model) or error.code not in _NOT_FETCHED:
        gated = "accept its terms on the hub, and log in with: hf auth login"
        more = () if _is_hub_id(model) else _also_wrong(error, card)
        found = "; ".join((what, *more))
        return Check(name, "failed", found, gated if "Gated" in error.what else error.hint)
    if os.environ.get("HF_HUB_OFFLINE"):
        hint = "unset HF_HUB_OFFLINE for the first run, or copy the checkpoint here"
        return Check(name, "failed", f"{what}, and HF_HUB_OFFLINE is set", hint)
    needed, free = _bytes_to_fetch(card()), _hub_room()
    found = (
        f"{shown}: the first run fetches about {bytes_text(needed)}; {bytes_text(free)} are free"
    )
    if needed > free:
        return Check(name, "failed", found, "set HF_HOME to a larger disk")
    return Check(name, "warning", found, f"fetch it now: hf download {model}")


def _also_wrong(known: CheckpointError, card: Callable[[], Card]) -> Iterator[str]:
    """What the small files lack beside what is known of the weights."""
    try:
        card()
    except CheckpointError as error:
        if error.what != known.what:
            yield error.what


def _bytes_to_fetch(card: Card) -> int:
    """Bytes of all weights; of a video model those that its indexes tell."""
    if isinstance(card, VideoCard):
        return sum(count for _, count in card.component_bytes)
    return card.weight_bytes


def _hub_room() -> int:
    from huggingface_hub import constants

    return places.free_bytes(Path(constants.HF_HUB_CACHE))


def image_memory(subject: Subject) -> Check:
    """Free memory against one edit and a full batch, and which quantizations would fit."""
    choice, free = subject.config.model, _free(subject)
    try:
        refuse_unsplit(choice, subject.config.parallel.tensor_ranks)
        forms = _forms(subject)
        needs = {form: _need(subject, replace(choice, quantization=form)) for form in forms}
    except CheckpointError:
        return Check("memory", "warning", _UNREAD)
    own = needs[choice.quantization]
    full = _need(subject, choice, jobs=subject.config.batch.max_size)
    most = f"{bytes_text(full.total)} with {full.thinking} together"
    found = f"{model_name(subject.image_model)}: {bytes_text(own.weights)} of weights, "
    found += f"{bytes_text(own.total)} with one edit, {most}{_place(subject.config)}; "
    found += f"{bytes_text(free)} free ({'; '.join(_fits(needs, free))})"
    if own.total > free:
        return Check("memory", "failed", found, _remedy(subject, free))
    if full.total > free:
        return Check("memory", "warning", found, "fewer jobs will work together")
    return Check("memory", "ok", found)


@dataclass(frozen=True)
class _Need:
    """Bytes in the memory that is looked at: of ranks and replicas, all that share it.

    `weights`, and `thinking` jobs, are the whole model's.
    """

    weights: int
    thinking: int
    total: int


def _forms(subject: Subject) -> list[Quantization]:
    """The quantizations that the run's ranks could share."""
    found, ranks = [], subject.config.parallel.tensor_ranks
    for form in FORMS:
        with suppress(UsageError):
            refuse_unsplit(replace(subject.config.model, quantization=form), ranks)
            found.append(form)
    return found


def _fits(needs: Mapping[Quantization, _Need], free: int) -> Iterator[str]:
    for form, need in needs.items():
        verb = "fits" if need.total <= free else "does not fit"
        yield f"{form} {verb} with {bytes_text(need.total)}"


def _place(config: RunConfig) -> str:
    """Which processes are in the memory that is looked at."""
    ranks, copies = config.parallel.tensor_ranks, _copies(config)
    if ranks > 1:
        is_one = precision(config.model)[0] == "cpu"
        return f" on all {ranks} ranks" if is_one else f" on rank 0 of {ranks}"
    return f" in {copies} replicas" if copies > 1 else ""


def _copies(config: RunConfig) -> int:
    """Models in one memory: replicas have a GPU each, and on a CPU one memory."""
    return config.parallel.replicas if precision(config.model)[0] == "cpu" else 1


def _remedy(subject: Subject, free: int) -> str:
    """The quantization that makes it fit and changes least; else how much is wanted.

    Tiles do not help: the VAE encodes a source image whole.
    """
    choice = subject.config.model
    least, smallest = _need(subject, choice).total, choice.quantization
    for form in _forms(subject):
        if FORMS.index(form) <= FORMS.index(choice.quantization):
            continue
        least, smallest = _need(subject, replace(choice, quantization=form)).total, form
        if least <= free:
            return f"--quantization {form} would fit"
    more = f"free some, or use a machine with {bytes_text(least)} for {smallest}"
    if precision(choice)[0] == "cpu":
        return more
    return f"{more}; more GPUs share it by --tensor-parallel-size or --device balanced"


def _need(subject: Subject, choice: ModelChoice, *, jobs: int = 1) -> _Need:
    """Of so many edits together, with the checkpoint's own defaults."""
    flags = {"model": choice.model, "revision": choice.revision}
    found, faults = runner.examine(manifest_of(_JOB, "doctor"), settle(flags, {}, {}))
    for fault in faults:
        raise fault
    (job,) = found
    assert isinstance(job, ImageJob), "the sample job is an edit"
    card = registry.model_card(job.model, choice.revision)
    config = replace(subject.config, model=choice)
    whole = footprint([job] * jobs, card, config)
    by_rank = rank_footprints({choice.model: whole}, config).get(choice.model)
    total = whole.total * _copies(config)
    if by_rank:
        every = [one.total for one in by_rank]
        total = sum(every) if precision(choice)[0] == "cpu" else max(every)
    return _Need(whole.weights, whole.thinking, total)


def video_memory(subject: Subject) -> Check:
    """Free memory against the video model's weights: first its text encoders, then the rest.

    What a video's latents and the decode take is not known before the sizes are.
    """
    choice, free = subject.config.model, _free(subject)
    if choice.cpu_offload:
        refuse_offload_on_cpu(choice)
    try:
        card = registry.video_card(subject.video_model, choice.revision)
    except CheckpointError:
        return Check("video memory", "warning", _UNREAD)
    loaded = card.loaded_bytes(precision(choice)[1])
    if not loaded:
        return Check("video memory", "warning", _UNCOUNTED)
    encoders = sum(n for part, n in loaded.items() if part.startswith("text_encoder"))
    rest = sum(loaded.values()) - encoders
    shown = model_name(subject.video_model)
    if choice.cpu_offload:
        return _offloaded(f"{shown}: ", max(loaded.values()), sum(loaded.values()), free)
    found = f"{shown}: {bytes_text(encoders)} of text encoders, then "
    copies = _copies(subject.config)
    each = f", in {copies} replicas each" if copies > 1 else ""
    found += f"{bytes_text(rest)} of weights and the video's own{each}; {bytes_text(free)} free"
    if max(encoders, rest) * copies <= free:
        return Check("video memory", "ok", found)
    hint = "free some, or use a machine with more; --quantization is for pictures"
    if precision(choice)[0] == "cuda" and max(loaded.values()) <= free:
        hint = "--enable-cpu-offload would fit: one network at a time is on the GPU then"
    return Check("video memory", "failed", found, hint)


def _offloaded(found: str, largest: int, every: int, free: int) -> Check:
    """With one network at a time on the GPU, and all of them in main memory."""
    found += f"{bytes_text(every)} of weights in main memory, {bytes_text(largest)} of them at "
    found += f"most on the GPU; {bytes_text(free)} free there"
    if largest > free:
        hint = "free some, or use a larger GPU: --enable-cpu-offload is on already"
        return Check("video memory", "failed", found, hint)
    if every > available_bytes():
        hint = "main memory is too small for the networks that wait there"
        return Check("video memory", "failed", found, hint)
    return Check("video memory", "ok", found)


def _free(subject: Subject) -> int:
    refuse_in_session(subject.config)
    return free_bytes(subject.config.model, subject.config.batch.gpu_memory_utilization)


def free_bytes(choice: ModelChoice, part: float | None = None) -> int:
    """Memory for a model where `choice` puts it, of a GPU no more than `part` of it. Raises
    MachineError where there is no GPU.
    """
    if precision(choice)[0] == "cpu":
        return available_bytes()
    import torch

    from hyimg_cli.memory.room import room_bytes

    if not torch.cuda.is_available():
        raise MachineError("there is no GPU to put it on", hint="run with --device cpu")
    return room_bytes(choice, part)


def model_name(model: str) -> str:
    """A hub id as it is, a folder by its last name."""
    return model if _is_hub_id(model) else PurePath(model).name


def _is_hub_id(model: str) -> bool:
    is_path = model.startswith((".", "/", "~")) or Path(model).expanduser().is_dir()
    return not is_path and model.count("/") == 1
