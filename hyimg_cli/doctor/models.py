"""Check whether the chosen checkpoints are complete and fit into memory.

Reads headers, not weights.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path, PurePath
from typing import Any

from hyimg_cli.doctor import folders
from hyimg_cli.doctor.check import Check
from hyimg_cli.engine import runner
from hyimg_cli.errors import CheckpointError, MachineError
from hyimg_cli.journal.keys import precision
from hyimg_cli.loading import hub
from hyimg_cli.manifest.manifest import manifest_of
from hyimg_cli.manifest.resolved import public_model
from hyimg_cli.memory import refusals
from hyimg_cli.memory.available import AvailableMemory, available_memory, copies_of
from hyimg_cli.memory.fit import cards_for, cards_text, check_fit, fits, in_forms, need
from hyimg_cli.memory.videos import needs_of
from hyimg_cli.models import registry
from hyimg_cli.settings.config import settle
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.spec.card import ModelCard, Networks, VideoCard
from hyimg_cli.spec.job import Job
from hyimg_cli.spec.model_name import names_file
from hyimg_cli.spec.units import bytes_text

Card = ModelCard | VideoCard
Weights = Mapping[str, tuple[int, int]]
# An edit, like most jobs; all other values are the checkpoint's defaults.
_EDIT = {"prompt": "an edit", "images": ["picture.png"]}
_SHOWN = 8
_FORMS = {"none": "unquantized"}
_UNREAD = "memory need unknown: the checkpoint cannot be read"
_UNCOUNTED = "memory need unknown: neither the weights nor their index are here"


def image_checkpoint(config: RunConfig) -> Check:
    """Check the files of the picture model."""
    model, revision = config.model.model, config.model.revision
    return _checkpoint(
        model,
        lambda: registry.check_weights(model, revision),
        lambda: registry.model_card(model, revision),
    )


def image_files(config: RunConfig) -> Check:
    """Report which files of the picture model are read, and which values are defaults."""
    model = config.model.model
    try:
        found = registry.reading(model, config.model.revision)
    except CheckpointError:
        return Check("warning", f"{model_name(model)}: none read; see checkpoint")
    if found is None:
        return Check("ok", f"{model_name(model)}: not known")
    names = found.files if len(found.files) <= _SHOWN else (*found.files[:_SHOWN], "...")
    said = f"{model_name(model)}: {len(found.files)} read: {', '.join(names)}"
    absent = ", ".join(f"{key} {value}" for key, value in found.defaults.items())
    return Check("ok", f"{said}; by default: {absent or 'nothing'}")


def video_checkpoint(config: RunConfig) -> Check:
    """Check the files of the video model, and the package that repairs its prompts."""
    model, place = config.model.video_model, (config.model.revision, config.model.video_components)
    found = _checkpoint(
        model,
        lambda: registry.check_weights(model, *place),
        lambda: registry.video_card(model, *place),
    )
    if found.status != "ok":
        return found
    cleaner = registry.video_card(model, *place).cleaner
    if not cleaner or find_spec(cleaner) is not None:
        return found
    said = (
        f"{found.found}; {cleaner} is not installed, so broken Unicode in prompts is not repaired"
    )
    hint = f"pip install {cleaner}; prompts are then encoded again, and some results may change"
    return Check("warning", said, hint)


def _checkpoint(model: str, weights: Callable[[], Weights], read: Callable[[], Card]) -> Check:
    shown = model_name(model)
    try:
        stored = weights()
    except CheckpointError as error:
        return _incomplete(model, error, read)
    parts = ", ".join(f"{part} {bytes_text(nbytes)}" for part, (_, nbytes) in stored.items())
    count = sum(weights for weights, _ in stored.values())
    found = f"{shown}: complete, {count / 1e6:,.1f} M weights ({parts})"
    # Reading the card also reads the configuration.
    card = read()
    if isinstance(card, ModelCard) and card.licence:
        found += f"; licence: {card.licence}"
    if isinstance(card, ModelCard) and card.made_as:
        found += f"; {card.made_as}"
    return Check("ok", found if card.is_trained else f"{found}; untrained, for tests only")


def _incomplete(model: str, error: CheckpointError, card: Callable[[], Card]) -> Check:
    """Return the check of an incomplete checkpoint.

    The first run may still download a hub checkpoint, but it cannot complete a folder.
    """
    shown, is_of_hub = model_name(model), hub.is_id(model)
    what = f"{shown}: {error.what}"
    if not is_of_hub:
        # Also report faults in the small files, in addition to those of the weights.
        try:
            card()
        except CheckpointError as other:
            what += f"; {other.what}" if other.what != error.what else ""
    if not is_of_hub or error.code not in registry.NOT_FETCHED:
        gated = "accept its terms on the hub, then log in with: hf auth login"
        return Check("failed", what, gated if "Gated" in error.what else error.hint)
    if os.environ.get("HF_HUB_OFFLINE"):
        hint = "unset HF_HUB_OFFLINE for the first run, or copy the checkpoint to this machine"
        return Check("failed", f"{what}, and HF_HUB_OFFLINE is set", hint)
    from huggingface_hub import constants

    facts, free = card(), folders.free_bytes(Path(constants.HF_HUB_CACHE))
    # For a video model, the sizes of the weights in its indexes.
    parts = facts.component_bytes if isinstance(facts, VideoCard) else [("", facts.weight_bytes)]
    needed = sum(count for _, count in parts)
    found = f"{shown}: its weights are not here, about {bytes_text(needed)}"
    found += f"; {bytes_text(free)} are free"
    if needed > free:
        return Check("failed", found, "set HF_HOME to a larger disk")
    return Check("warning", found, f"fetch it now: hyimg pull {model}")


def image_memory(config: RunConfig) -> Check:
    """Check free memory for one edit and for a full batch, and which quantizations would fit."""
    name, revision = config.model.model, config.model.revision
    there, size = _available(config), config.batch.max_size
    try:
        card, (kind, dtype) = registry.model_card(name, revision), precision(config.model)
        line = _EDIT if card.most_images else {"prompt": "a picture"}
        edit = _sample(line, model=name, revision=revision)
        if card.networks is not None:
            return _fit_in_turns(name, card.networks, edit, config)
        # This offload does not apply to models without separate networks.
        config = replace(config, model=replace(config.model, cpu_offload="none"))
        refusals.refuse_conflicts(edit, config)
        found = check_fit(name, edit, config, there)
        forms = {form: need(name, edit, one) for form, one in in_forms(edit, config).items()}
        full = need(name, [*edit] * size, config, together=size)
    except CheckpointError:
        return Check("warning", _UNREAD)
    copies = copies_of(config, config.parallel.replicas)
    weights = card.loaded_bytes(dtype, config.model.quantization)
    most, processes = f"{bytes_text(full.total * copies)} with {size} together", ""
    if (ranks := config.parallel.picture_ranks) > 1:
        processes = f" on all {ranks} ranks" if kind == "cpu" else f" on rank 0 of {ranks}"
    elif copies > 1:
        processes = f" in {copies} replicas"
    said = f"{model_name(name)}: {bytes_text(weights)} of weights, "
    if waiting := found.needed.waiting:
        said += f"{bytes_text(waiting)} of them wait in main memory; on the GPU "
    said += f"{bytes_text(found.needed.total * copies)} with one edit, {most}{processes}; "
    verbs = {True: "fits", False: "does not fit"}
    told = [
        f"{_FORMS.get(form, form)} {verbs[fits(one, there)]} with {bytes_text(one.total * copies)}"
        for form, one in forms.items()
    ]
    said += f"{bytes_text(there.free * copies)} free ({'; '.join(told)})"
    if not found.is_enough:
        return Check("failed", said, found.remedy)
    if not fits(full, there):
        return Check("warning", said, "batches will be smaller")
    return Check("ok", said)


def _sample(line: Mapping[str, Any], **flags: str | None) -> Sequence[Job]:
    """Return the job of a line, with its checkpoint's defaults."""
    manifest = manifest_of(json.dumps(line).encode(), "doctor")
    found, faults = runner.examine(manifest, settle(flags, {}, {}))
    for fault in faults:
        raise fault
    return found


def video_memory(config: RunConfig) -> Check:
    """Check free memory for the video model: first its text encoders, then its other weights.

    The other weights include the K/V of a clip, if any. The memory for a decode at the model's
    default size is reported, but does not fail the check.
    """
    choice = config.model
    name, revision, folder = choice.video_model, choice.revision, choice.video_components
    try:
        card = registry.video_card(name, revision, folder)
    except CheckpointError:
        return Check("warning", _UNREAD)
    # A line of the checkpoint's task.
    line: dict[str, Any] = {"prompt": "a film", "task": "t2v"}
    if card.start is not None and card.needs_start:
        line |= {"task": "i2v", "images": ["picture.png"] * card.start.fewest}
        line |= {"camera": "none-1"} if card.has_camera else {}
    sample = _sample(line, revision=revision, video_model=name, video_components=folder)
    return _fit_in_turns(name, card, sample, config)


def _fit_in_turns(name: str, networks: Networks, sample: Sequence[Job], config: RunConfig) -> Check:
    """Check free memory for a model whose text encoders are unloaded before the rest loads.

    Also reports how the sample fits on each GPU.
    """
    there = _available(config)
    if config.model.cpu_offload != "none":
        refusals.refuse_offload_on_cpu(config.model)
    loaded = networks.loaded_bytes(precision(config.model)[1], config.model.quantization)
    if not loaded:
        return Check("warning", _UNCOUNTED)
    refusals.refuse_conflicts(sample, config)
    found = check_fit(name, sample, config, there)
    config, copies = found.config, copies_of(config, config.parallel.replicas)
    said = f"{model_name(name)}: "
    if config.model.cpu_offload != "none":
        said += f"{bytes_text(found.needed.waiting)} of weights in main memory, "
        said += f"{bytes_text(found.needed.weights)} of them at most on the GPU; "
        said += f"{bytes_text(there.free)} free there"
        if found.takes_offload:
            said += f", so a run takes --cpu-offload {config.model.cpu_offload} by itself"
    else:
        encoders = sum(n for part, n in loaded.items() if part.startswith("text_encoder"))
        rest = sum(loaded.values()) - encoders
        each = f", in {copies} replicas each" if copies > 1 else ""
        if found.needed.work:
            each = f", of that {bytes_text(found.needed.work)} of K/V and rows{each}"
        said += f"{bytes_text(encoders)} of text encoders, then {bytes_text(rest)} of weights and "
        said += f"the job's own{each}; {bytes_text(there.free * copies)} free"
    said += f"; a decode about {bytes_text(needs_of(sample[0], networks, config)['decode'].work)}"
    said += f"; on a GPU: {cards_text(cards_for(sample[0], networks, config))}"
    return Check("ok" if found.is_enough else "failed", said, found.remedy)


def _available(config: RunConfig) -> AvailableMemory:
    """Return the memory for a model on the run's device. Raises MachineError without a GPU."""
    refusals.refuse_gpu_part(config)
    there = available_memory(config, replicas=config.parallel.replicas)
    if precision(config.model)[0] == "cuda" and not there.gpus:
        raise MachineError("no GPU found", hint="run with --device cpu")
    return there


def model_name(model: str) -> str:
    """Return a hub id unchanged, or the last name of a folder."""
    if names_file(model):
        return public_model(model)
    return model if hub.is_id(model) else PurePath(model).name
