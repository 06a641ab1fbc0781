"""Known families, and where their checkpoints are; imports neither torch nor transformers.

A family is a folder next to this file with a record in it. Here it only needs its name in
`_BUILT_IN`.
"""

import math
import os
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hyimg_cli.cache.disk import DiskStore
from hyimg_cli.errors import CheckpointError, UsageError
from hyimg_cli.loading import checkpoint, hub
from hyimg_cli.manifest.resolved import public_model
from hyimg_cli.mistyped import nearest_path
from hyimg_cli.models import (
    fetching,
    licences,
    lora_files,
    nearby,
    releases,
    single_files,
    whole,
)
from hyimg_cli.models.family import Family, ImageCheckpoint, Reading, VideoCheckpoint
from hyimg_cli.settings.run import JobKind, ModelChoice
from hyimg_cli.settings.table import SETTINGS
from hyimg_cli.spec import digest
from hyimg_cli.spec.card import ModelCard, VideoCard
from hyimg_cli.spec.gc_paused import gc_paused
from hyimg_cli.spec.job import Job, VideoJob
from hyimg_cli.spec.model_name import names_file, parts_of
from hyimg_cli.spec.units import names_text

if TYPE_CHECKING:
    from hyimg_cli.models.common.model import DecoderModel
    from hyimg_cli.models.diffusers_image.model import LatentImageModel
    from hyimg_cli.models.latent import Rewriter
    from hyimg_cli.models.latent_video import LatentVideoModel
    from hyimg_cli.parallel.ranks import RankPool

# In the order in which they are asked. A folder of no family counts as the last family of its kind,
# whose error names what is missing.
# The page of a model on the hub, as a browser shows it.
_HUB_PAGE = re.compile(r"https?://[\w.]*huggingface\.co/([\w.-]+/[\w.-]+)(?:/.*)?$")
_BUILT_IN = (
    *("bagel", "lingbot_world", "diffusers_image", "diffusers_image.rewriter", "hunyuan_image3"),
    "diffusers_video",
)
_REGISTERED: list[Family] = []
# Errors of a checkpoint of which only small files were downloaded so far, without weights.
NOT_FETCHED = ("checkpoint.no-weights", "checkpoint.missing-shard")
EMBEDDED = "tiny-image"
EMBEDDED_VIDEO = "tiny-video"
# Facts about results that new users must know, by the setting whose default causes them.
TOYS = {
    "model": "tiny-image is a toy that ships with hyimg: one coloured shape in 64x64 pixels; "
    "for real pictures name a checkpoint with --model",
    "video_model": "tiny-video is a toy that ships with hyimg: one moving shape in 9 frames; "
    "for real videos name a checkpoint with --video-model",
}
_ASSETS = Path(__file__).parent.parent / "assets"


def resolve_model(
    model: str, revision: str | None = None, *, with_weights: bool = True, without: str = ""
) -> Path:
    """Return the checkpoint's folder: an embedded one, a given one, or a hub id's in the cache.

    Without `with_weights` only small files are fetched: enough to check and to plan.
    `without`: a part whose weights are not fetched. Raises CheckpointError for a folder or hub id
    that is not found.
    """
    if model in (EMBEDDED, EMBEDDED_VIDEO):
        return _ASSETS / model
    # Unlike Path's methods, these never raise, not for long names or unknown users.
    folder = os.path.expanduser(model)
    if os.path.isdir(folder):
        return nearby.snapshot_of(Path(folder)) or Path(folder)
    if os.path.isfile(folder):
        nearby.refuse_file(Path(folder))
    if not hub.is_id(model):
        hint = f'give a folder, "{EMBEDDED}", "{EMBEDDED_VIDEO}", or a hub id '
        hint += "(tencent/HunyuanImage-3.0-Instruct)"
        if "/" not in model and (ids := releases.meant_by(model)):
            hint = f"did you mean {' or '.join(ids)}? Or give the path of a downloaded checkpoint"
        elif near := nearest_path(folder):
            hint = near
        if page := _HUB_PAGE.match(model):
            hint = f"give its id alone: {page[1]}"
        what = f"checkpoint folder not found: {model}"
        raise CheckpointError(what, hint=hint, code="checkpoint.missing")
    return fetching.fetch(model, revision, _family, with_weights=with_weights, without=without)


def fetch(model: str, revision: str | None = None) -> Path:
    """Fetch all files of a hub id that are read into the hub's cache; return its folder there."""
    return fetching.fetch(model, revision, _family)


def write_skeleton(listing: hub.Listing, folder: Path) -> dict[str, list[str]]:
    """Write a checkpoint without numbers; see `fetching.write_skeleton`."""
    return fetching.write_skeleton(listing, folder, _family)


def makes(folder: Path) -> JobKind:
    """Return what the checkpoint in a folder makes."""
    return _family(folder).makes


def licence(model: str, revision: str | None = None) -> str:
    """Return a checkpoint's licence, from its local files or else from its name on the hub.

    Fetches nothing.
    """
    if names_file(model):
        # The components' card is not the file's.
        return licences.UNKNOWN
    folder = Path(os.path.expanduser(model))
    if model in (EMBEDDED, EMBEDDED_VIDEO):
        folder = _ASSETS / model
    elif not folder.is_dir():
        folder = hub.cached(model, revision) or folder
    found = licences.licence_in(folder)
    return licences.licence_of_release(public_model(model)) if found == licences.UNKNOWN else found


def register(family: Family) -> None:
    """Add a family; it is asked before the built-in ones."""
    _REGISTERED.insert(0, family)
    for known in (_opened, _fingerprint):
        known.cache_clear()


def families() -> tuple[Family, ...]:
    """Return every family, in the order in which they are asked."""
    modules = (import_module(f"hyimg_cli.models.{name}.record") for name in _BUILT_IN)
    return (*_REGISTERED, *(module.FAMILY for module in modules))


def _family(folder: Path, makes: JobKind | None = None) -> Family:
    """Return the family of the checkpoint in `folder`; `makes`: what the job wants."""
    asked = [family for family in families() if makes in (None, family.makes)]
    built_in = [family for family in asked if family not in _REGISTERED]
    return next((family for family in asked if family.is_one(folder)), built_in[-1])


def sequences(model: str, revision: str | None = None) -> ImageCheckpoint:
    """Return a picture checkpoint, read once; its weights may be missing."""
    return cast(ImageCheckpoint, _opened(os.getcwd(), "pictures", model, revision, None)[1])


def _films(
    model: str, revision: str | None = None, components: str | None = None
) -> VideoCheckpoint:
    """Return a video checkpoint; `components`: a folder with its encoder and VAE, if allowed."""
    return cast(VideoCheckpoint, _opened(os.getcwd(), "videos", model, revision, components)[1])


@lru_cache(maxsize=16)  # `_from` is in the key, because `./model` depends on the folder.
def _opened(
    _from: str, makes: JobKind, model: str, revision: str | None, components: str | None
) -> tuple[Family, ImageCheckpoint | VideoCheckpoint]:
    family, (folder, *others) = _found(model, revision, components, makes=makes)
    return family, family.open(folder, model, *others)


def _found(
    model: str,
    revision: str | None,
    components: str | None = None,
    *,
    makes: JobKind | None = None,
    with_weights: bool = False,
) -> tuple[Family, tuple[Path, ...]]:
    """Return a checkpoint's family, and the folder with what else belongs to it.

    A file of weights is beside the folder of its other parts. A folder is beside that of its
    `components`, if they are given and the family takes them.
    """
    weights, parts = parts_of(model)
    if names_file(weights) and not os.path.isdir(os.path.expanduser(weights)):
        file = single_files.find(weights)
        single_files.refuse_alone(file, parts, lambda one: hub.cached(one, revision) is not None)
        folder = resolve_model(
            parts, revision, with_weights=with_weights, without=single_files.REPLACED
        )
        nearby.refuse_nearby(folder)
        family = _family(folder, "pictures")
        if not (family.takes_weights and family.is_one(folder)):
            raise single_files.other_components(file, folder)
        return family, (folder, file)
    folder = resolve_model(model, revision, with_weights=with_weights)
    if makes is not None:
        nearby.refuse_nearby(folder)
    family = _family(folder, makes)
    if components is None or not family.takes_components:
        return family, (folder,)
    return family, (folder, Path(os.path.expanduser(components)))


def model_card(model: str, revision: str | None = None) -> ModelCard:
    """Return the facts of a checkpoint without its weights."""
    return sequences(model, revision).card


def video_card(model: str, revision: str | None = None, components: str | None = None) -> VideoCard:
    """Return the facts of a video checkpoint without its weights."""
    return _films(model, revision, components).card


def fingerprint(model: str, revision: str | None = None, components: str | None = None) -> str:
    """Return a digest that changes with the checkpoint's files, its `components` included.

    A folder of the hub's cache is named by its commit, which is already a digest.
    """
    return _fingerprint(os.getcwd(), model, revision, components)


@lru_cache(maxsize=8)
def _fingerprint(_from: str, model: str, revision: str | None, components: str | None) -> str:
    family, folders = _found(model, revision, components)
    if folders[0].parent.name == "snapshots" and len(folders) == 1:
        return digest.of_bytes(f"hub:{folders[0].name}".encode())
    return family.fingerprint(*folders)


def check_weights(
    model: str, revision: str | None = None, components: str | None = None
) -> dict[str, tuple[int, int]]:
    """Return the number of weights of each component and their bytes, from the files' headers.

    Nothing is loaded, but torch is imported. Raises CheckpointError for a file that is missing,
    truncated or contradicts its index, and for tensors other than the configuration's, as far as
    the family knows.
    """
    family, folders = _found(model, revision, components)
    stored = {
        part: (
            sum(math.prod(tensor.shape) for tensor in found.values()),
            checkpoint.weight_bytes(found),
        )
        for part, found in family.tensors(*folders).items()
    }
    family.refuse_wrong(*folders)
    return stored


def check_headers(models: Iterable[str], choice: ModelChoice, store: DiskStore) -> list[str]:
    """Raise the error with which loading a checkpoint would fail; no weight is read, and no torch.

    `models`: of the jobs; the rest of `choice` is theirs. Returns a sentence for each checkpoint
    whose weights are not here yet. `store` keeps which checkpoints were whole (see `whole`).
    """
    said = []
    for model in sorted(set(models)):
        family, folders = _found(model, choice.revision, choice.video_components)
        try:
            (family.check_headers or family.tensors)(*folders)
        except CheckpointError as error:
            if not _may_come(error, parts_of(model)[1] or model, folders[0]):
                raise
            what = "they are not compared with its configuration"
            more = f"; hyimg pull {model} fetches them" if hub.is_id(model) else ""
            said.append(f"the weights of {model} are not here: {what}{more}")
            continue
        if model not in (EMBEDDED, EMBEDDED_VIDEO):
            whole.refuse_wrong(family, folders, store)
    return said


def check_complete(model: str, choice: ModelChoice, store: DiskStore) -> None:
    """Raise the error with which loading a checkpoint would fail, also if weights are missing."""
    family = _family(folder := resolve_model(model, choice.revision, with_weights=False))
    (family.check_headers or family.tensors)(folder)
    whole.refuse_wrong(family, (folder,), store)


def _may_come(error: CheckpointError, model: str, folder: Path) -> bool:
    """Return True if weights are missing that a run will find.

    It fetches those of a hub id. Into a folder they must be copied: an index promises them, and
    none is there.
    """
    if hub.is_id(model):
        return error.code in NOT_FETCHED and not os.environ.get("HF_HUB_OFFLINE")
    is_promised = error.code == "checkpoint.missing-shard"
    return is_promised and not any(folder.rglob("*.safetensors"))


def refuse_wrong(folder: Path, *components: Path) -> None:
    """Raise the error with which loading the checkpoint in `folder` would fail. Imports torch.

    `components`: the folder or file beside it, if there is one.
    """
    _family(folder).refuse_wrong(folder, *components)


def reading(model: str, revision: str | None = None) -> Reading | None:
    """Return the files of a checkpoint that are read, and the defaults of missing keys.

    None if its family does not say. Raises CheckpointError.
    """
    family, (folder, *_) = _found(model, revision)
    return family.reading(folder)


def check(job: Job, revision: str | None = None, components: str | None = None) -> None:
    """Raise JobError for a job that its checkpoint cannot take, or CheckpointError."""
    if isinstance(job, VideoJob):
        _films(job.model, revision, components).check(job)
    else:
        sequences(job.model, revision).check(job)


def advice(
    jobs: Iterable[Job], revision: str | None = None, components: str | None = None
) -> Iterator[str]:
    """Yield sentences of the checkpoints that the author of the jobs should read, each once.

    The last one names LoRAs of the hub that are not in the local cache.
    """
    told, loras = set[str](), dict[str, None]()
    for job in jobs:
        loras |= dict.fromkeys(one.file for one in job.lora)
        if isinstance(job, VideoJob):
            said = _films(job.model, revision, components).advice(job)
        else:
            said = sequences(job.model, revision).advice(job)
        yield from (one for one in said if one not in told)
        told.update(said)
    if awaited := [name for name in loras if lora_files.is_awaited(name)]:
        what = "the run fetches them, and compares each with its model when a job uses it"
        if os.environ.get("HF_HUB_OFFLINE"):
            what = "HF_HUB_OFFLINE is set, so jobs with them will fail"
        yield f"LoRAs that are not in the hub's cache: {names_text(awaited)}; {what}"


@gc_paused()
def load(
    choice: ModelChoice, *, is_batch_invariant: bool = True, pool: "RankPool | None" = None
) -> "DecoderModel":
    """Load a model; see `ImageCheckpoint.load`. Imports torch."""
    _found(choice.model, choice.revision, with_weights=True)  # fetches the weights
    refuse_unfollowed(choice)
    known = sequences(choice.model, choice.revision)
    return known.load(choice, is_batch_invariant=is_batch_invariant, pool=pool)


def find_rewriter(model: str, revision: str | None = None) -> None:
    """Raise CheckpointError if a model's card `rewrites` and its rewriter is not here."""
    sequences(model, revision).find_rewriter()


def load_rewriter(choice: ModelChoice) -> "Rewriter":
    """Load the prompt rewriter of a model whose card `rewrites`. Imports torch."""
    return sequences(choice.model, choice.revision).load_rewriter(choice)


def helps(folder: Path) -> str:
    """Return a command that uses a checkpoint which makes nothing by itself; else empty."""
    return _family(folder).helps


def load_editor(choice: ModelChoice) -> "LatentImageModel":
    """Load a model that `denoises_latents`. Imports torch."""
    return cast("LatentImageModel", load(choice))


@gc_paused()
def load_video(choice: ModelChoice) -> "LatentVideoModel":
    """Load a video model; see `VideoCheckpoint.load`. Imports torch."""
    resolve_model(choice.model, choice.revision)
    refuse_unfollowed(choice, "videos")
    return _films(choice.model, choice.revision, choice.video_components).load(choice)


def refuse_unfollowed(choice: ModelChoice, makes: JobKind = "pictures", **parts: Any) -> None:
    """Raise UsageError for settings that only other families of the model's kind follow.

    In `choice`, and in other `parts` of a run's settings.
    """
    components = choice.video_components if makes == "videos" else None
    model, parts = (choice.model, choice.revision), {**parts, "model": choice}
    family, known = _opened(os.getcwd(), makes, *model, components)
    kin = (one.follows for one in families() if one.makes == family.makes)
    for name in sorted(frozenset[str]().union(*kin) - family.follows):
        setting, _, asked = name.partition("=")
        row = SETTINGS[setting]
        if row.table not in parts:
            continue
        value = getattr(parts[row.table], row.attribute)
        if value == asked if asked else value != row.default:
            raise UsageError(
                f"{known.card.name} does not follow {setting} {value}",
                where=row.flag if row.panel else "",
                hint="remove it",
                code="usage.not-followed",
            )
