"""Which families there are and where their checkpoints lie; imports neither torch nor
transformers.

A family is a folder beside this file with a record in it: its name in `_BUILT_IN` is all that is
needed here.
"""

import math
import os
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from hyimg_cli.errors import CheckpointError, UsageError
from hyimg_cli.loading import checkpoint
from hyimg_cli.manifest.resolved import public_model
from hyimg_cli.models import licences
from hyimg_cli.models.family import Family, ImageCheckpoint, Reading, VideoCheckpoint
from hyimg_cli.settings.run import ModelChoice
from hyimg_cli.settings.table import SETTINGS
from hyimg_cli.spec import digest
from hyimg_cli.spec.card import ModelCard, VideoCard
from hyimg_cli.spec.gc_paused import gc_paused
from hyimg_cli.spec.job import Job, VideoJob

if TYPE_CHECKING:
    from hyimg_cli.models.common.model import DecoderModel
    from hyimg_cli.models.diffusers_image.model import LatentImageModel
    from hyimg_cli.models.latent_video import LatentVideoModel
    from hyimg_cli.parallel.ranks import RankPool

# In the order in which they are asked; a folder of no family is taken for the last of its kind,
# which says what is missing.
_BUILT_IN = ("bagel", "lingbot_world", "diffusers_image", "hunyuan_image3", "diffusers_video")
_REGISTERED: list[Family] = []
EMBEDDED = "tiny-image"
EMBEDDED_VIDEO = "tiny-video"
# What a newcomer must know of results, by the setting whose default made them.
TOYS = {
    "model": "tiny-image is a toy that ships with hyimg: one coloured shape in 64x64 pixels; "
    "for real pictures name a checkpoint with --model",
    "video_model": "tiny-video is a toy that ships with hyimg: one moving shape in 9 frames; "
    "for real videos name a checkpoint with --video-model",
}
_ASSETS = Path(__file__).parent.parent / "assets"
Kind = Literal["pictures", "videos"]


def resolve_model(model: str, revision: str | None = None, *, with_weights: bool = True) -> Path:
    """Where the checkpoint lies: an embedded one, a folder, or a hub id fetched into its cache.

    `with_weights` off fetches only its small files: enough to check and to plan. Raises
    CheckpointError where there is no such folder, or a hub id cannot be had.
    """
    if model in (EMBEDDED, EMBEDDED_VIDEO):
        return _ASSETS / model
    # Unlike those of Path these raise for no name, however long it is and whose home it means.
    folder = os.path.expanduser(model)
    if os.path.isdir(folder):
        return Path(folder)
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise CheckpointError(
            f"there is no checkpoint folder {model}",
            hint=f'give a folder, "{EMBEDDED}", "{EMBEDDED_VIDEO}", or a hub id '
            "(tencent/HunyuanImage-3.0-Instruct)",
            code="checkpoint.missing",
        )
    return _fetched(model, revision, with_weights=with_weights)


def in_cache(model: str, revision: str | None = None) -> Path | None:
    """Where a hub id lies in the hub's cache; None where nothing of it does. Asks nobody."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (OSError, ValueError):
        return None


def licence(model: str, revision: str | None = None) -> str:
    """The licence of a checkpoint, by its files on this machine, else as a release of the hub.
    Fetches nothing.
    """
    folder = Path(os.path.expanduser(model))
    if model in (EMBEDDED, EMBEDDED_VIDEO):
        folder = _ASSETS / model
    elif not folder.is_dir():
        folder = in_cache(model, revision) or folder
    found = licences.licence_in(folder)
    return licences.licence_of_release(public_model(model)) if found == licences.UNKNOWN else found


def register(family: Family) -> None:
    """Have checkpoints of one more family known; it is asked before the built-in ones."""
    _REGISTERED.insert(0, family)
    for known in (_opened, _fingerprint):
        known.cache_clear()


def families() -> tuple[Family, ...]:
    """Every family, in the order in which they are asked."""
    modules = (import_module(f"hyimg_cli.models.{name}.record") for name in _BUILT_IN)
    return (*_REGISTERED, *(module.FAMILY for module in modules))


def _family(folder: Path, makes: Kind | None = None) -> Family:
    """The family of the checkpoint in `folder`; `makes`: by what a job wants of it."""
    asked = [family for family in families() if makes in (None, family.makes)]
    built_in = [family for family in asked if family not in _REGISTERED]
    return next((family for family in asked if family.is_one(folder)), built_in[-1])


def sequences(model: str, revision: str | None = None) -> ImageCheckpoint:
    """A picture checkpoint, read once; its weights need not be there."""
    return cast(ImageCheckpoint, _opened(os.getcwd(), "pictures", model, revision, None)[1])


def _films(
    model: str, revision: str | None = None, components: str | None = None
) -> VideoCheckpoint:
    """`components`: a folder with the text encoder and VAE of families that let them be there."""
    return cast(VideoCheckpoint, _opened(os.getcwd(), "videos", model, revision, components)[1])


@lru_cache(maxsize=16)  # What is kept of `./model` is that of the folder it leads `_from`.
def _opened(
    _from: str, makes: Kind, model: str, revision: str | None, components: str | None
) -> tuple[Family, ImageCheckpoint | VideoCheckpoint]:
    folder = resolve_model(model, revision, with_weights=False)
    family = _family(folder, makes)
    return family, family.open(folder, model, *_components_for(family, components))


def _components_for(family: Family, components: str | None) -> list[Path]:
    """The folder with a checkpoint's other parts, where it was given and the family takes one."""
    if components is None or not family.takes_components:
        return []
    return [Path(os.path.expanduser(components))]


def model_card(model: str, revision: str | None = None) -> ModelCard:
    """Facts of a checkpoint without its weights."""
    return sequences(model, revision).card


def video_card(model: str, revision: str | None = None, components: str | None = None) -> VideoCard:
    """Facts of a video checkpoint without its weights."""
    return _films(model, revision, components).card


def fingerprint(model: str, revision: str | None = None, components: str | None = None) -> str:
    """A digest that changes when the checkpoint's files do, those of its `components` too.

    A folder of the hub's cache is named by its commit, which is a digest already.
    """
    return _fingerprint(os.getcwd(), model, revision, components)


@lru_cache(maxsize=8)
def _fingerprint(_from: str, model: str, revision: str | None, components: str | None) -> str:
    folder = resolve_model(model, revision, with_weights=False)
    family = _family(folder)
    others = _components_for(family, components)
    if folder.parent.name == "snapshots" and not others:
        return digest.of_bytes(f"hub:{folder.name}".encode())
    return family.fingerprint(folder, *others)


def check_weights(model: str, revision: str | None = None) -> dict[str, tuple[int, int]]:
    """The number of weights of each component by name, and their bytes, counted in their files'
    headers; none is loaded. Imports torch.

    Raises CheckpointError where a file is missing, cut short, or not what its index says, and where
    the files have other tensors than the configuration's, as far as the family knows.
    """
    folder = resolve_model(model, revision, with_weights=False)
    family = _family(folder)
    stored = {
        part: (
            sum(math.prod(tensor.shape) for tensor in found.values()),
            checkpoint.weight_bytes(found),
        )
        for part, found in family.tensors(folder).items()
    }
    family.refuse_wrong(folder)
    return stored


def reading(model: str, revision: str | None = None) -> Reading | None:
    """Files of a checkpoint that are read, and what they leave to defaults; None where its family
    does not tell. Raises CheckpointError.
    """
    folder = resolve_model(model, revision, with_weights=False)
    return _family(folder).reading(folder)


def check(job: Job, revision: str | None = None, components: str | None = None) -> None:
    """Passes a job that its checkpoint can take. Raises JobError, or CheckpointError."""
    if isinstance(job, VideoJob):
        _films(job.model, revision, components).check(job)
    else:
        sequences(job.model, revision).check(job)


@gc_paused()
def load(
    choice: ModelChoice, *, is_batch_invariant: bool = True, pool: "RankPool | None" = None
) -> "DecoderModel":
    """The loaded model; see `ImageCheckpoint.load`. Imports torch."""
    resolve_model(choice.model, choice.revision)  # fetches the weights, too
    refuse_unfollowed(choice)
    known = sequences(choice.model, choice.revision)
    return known.load(choice, is_batch_invariant=is_batch_invariant, pool=pool)


def load_editor(choice: ModelChoice) -> "LatentImageModel":
    """The loaded model of a checkpoint that `denoises_latents`. Imports torch."""
    return cast("LatentImageModel", load(choice))


@gc_paused()
def load_video(choice: ModelChoice) -> "LatentVideoModel":
    """The loaded video model; see `VideoCheckpoint.load`. Imports torch."""
    resolve_model(choice.model, choice.revision)
    refuse_unfollowed(choice, "videos")
    return _films(choice.model, choice.revision, choice.components).load(choice)


def refuse_unfollowed(choice: ModelChoice, makes: Kind = "pictures", **parts: Any) -> None:
    """Passes settings that a model's family follows, of those that any of its kind does: how the
    model is loaded, and other `parts` of a run's. Raises UsageError.
    """
    components = choice.components if makes == "videos" else None
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
                f"{setting} {value} is not followed by {known.card.name}",
                where=row.flag if row.panel else "",
                hint="remove it",
                code="usage.not-followed",
            )


def _fetched(model: str, revision: str | None, *, with_weights: bool) -> Path:
    from huggingface_hub import snapshot_download

    # Code files are left where they are: nothing of theirs is ever run.
    # The patterns match in component folders too, where tokenizers have files of other kinds.
    small = ["README.md", "*.json", "system_prompt.py", "*.jinja", "*.txt", "*.model"]
    patterns = [*small, *(["*.safetensors"] if with_weights else [])]
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except Exception as error:  # the hub client raises a family of its own, OSError and ValueError
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
        raise CheckpointError(
            f"{model} is neither a folder nor in the hub's cache{offline}: {type(error).__name__}",
            hint="check the name and the connection, or give the path of a downloaded checkpoint",
            code="checkpoint.missing",
            retryable=True,
        ) from None
