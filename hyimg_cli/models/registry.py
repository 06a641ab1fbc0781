"""Which families exist and where their checkpoints are; imports neither torch nor transformers.

A family is a folder beside this file. Its `Prompter` knows sequences without weights; its `load`
brings the network.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from hyimg_cli.errors import CheckpointError, require
from hyimg_cli.loading import checkpoint
from hyimg_cli.manifest.cost import JobTokens
from hyimg_cli.models.diffusers_video import card as video
from hyimg_cli.models.diffusers_video import layout
from hyimg_cli.models.diffusers_video.lengths import check_texts
from hyimg_cli.models.hunyuan_image3 import split
from hyimg_cli.models.hunyuan_image3.prompter import Prompter
from hyimg_cli.spec import digest
from hyimg_cli.spec.card import ModelCard, RankBytes, VideoCard
from hyimg_cli.spec.job import ImageJob, Job, Size, VideoJob
from hyimg_cli.spec.run import ModelChoice

if TYPE_CHECKING:
    from hyimg_cli.models.latent_video import LatentVideoModel
    from hyimg_cli.models.protocols import MixedModel
    from hyimg_cli.parallel.ranks import RankPool

EMBEDDED = "tiny-image"
EMBEDDED_VIDEO = "tiny-video"
_ASSETS = Path(__file__).parent.parent / "assets"


def resolve_model(model: str, revision: str | None = None, *, with_weights: bool = True) -> Path:
    """Where the checkpoint lies: an embedded one, a folder, or a hub id fetched into its cache.

    `with_weights` off fetches only its small files: enough to check and to plan. Raises
    CheckpointError where there is no such folder, or a hub id cannot be had.
    """
    if model in (EMBEDDED, EMBEDDED_VIDEO):
        return _ASSETS / model
    if Path(model).expanduser().is_dir():
        return Path(model).expanduser()
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise CheckpointError(
            f"there is no checkpoint folder {model}",
            hint=f'give a folder, "{EMBEDDED}", "{EMBEDDED_VIDEO}", or a hub id '
            "(tencent/HunyuanImage-3.0-Instruct)",
            code="checkpoint.missing",
        )
    return _fetched(model, revision, with_weights=with_weights)


@lru_cache(maxsize=8)
def prompter(model: str, revision: str | None = None) -> Prompter:
    """Sequences and facts of a checkpoint, read once; its weights need not be there."""
    return Prompter(resolve_model(model, revision, with_weights=False), model)


def model_card(model: str, revision: str | None = None) -> ModelCard:
    """Facts of a checkpoint without its weights."""
    return prompter(model, revision).card


@lru_cache(maxsize=8)
def video_card(model: str, revision: str | None = None) -> VideoCard:
    """Facts of a video checkpoint without its weights."""
    return video.video_card(resolve_model(model, revision, with_weights=False), model)


@lru_cache(maxsize=8)
def fingerprint(model: str, revision: str | None = None) -> str:
    """A digest that changes when the checkpoint's files do.

    A folder of the hub's cache is named by its commit, which is a digest already.
    """
    folder = resolve_model(model, revision, with_weights=False)
    if folder.parent.name == "snapshots":
        return digest.of_bytes(f"hub:{folder.name}".encode())
    if layout.is_video_checkpoint(folder):
        return layout.read_layout(folder).fingerprint()
    return checkpoint.fingerprint(folder)


@dataclass(frozen=True)
class StoredWeights:
    """Weights of a component as they lie on disk: how many, and their bytes."""

    count: int
    nbytes: int


def stored_weights(model: str, revision: str | None = None) -> dict[str, StoredWeights]:
    """The weights of each component by name, counted in their files' headers; none is loaded.

    Raises CheckpointError where a file is missing, cut short, or not what its index says.
    """
    folder = resolve_model(model, revision, with_weights=False)
    if not layout.is_video_checkpoint(folder):
        return {"model": _counted(checkpoint.tensor_index(folder))}
    parts = [part for part in layout.read_layout(folder).components.values() if part.has_weights]
    return {part.name: _counted(checkpoint.tensor_index(part.folder, part.stem)) for part in parts}


def refuse_other_weights(model: str, revision: str | None = None) -> None:
    """Passes a picture checkpoint that holds every tensor of its configuration, and no other.

    Videos' are diffusers' own to check. Imports torch. Raises CheckpointError.
    """
    from hyimg_cli.models.hunyuan_image3.weights import checked

    folder = resolve_model(model, revision, with_weights=False)
    if not layout.is_video_checkpoint(folder):
        checked(folder)


def _counted(tensors: Mapping[str, checkpoint.TensorInfo]) -> StoredWeights:
    count = sum(math.prod(tensor.shape) for tensor in tensors.values())
    return StoredWeights(count, checkpoint.weight_bytes(tensors))


def check(job: Job, revision: str | None = None) -> None:
    """Passes a job whose text its checkpoint can take; see `Prompter.check`. Raises JobError."""
    if isinstance(job, VideoJob):
        folder = resolve_model(job.model, revision, with_weights=False)
        check_texts(job, folder, video_card(job.model, revision))
    else:
        prompter(job.model, revision).check(job)


def job_tokens(
    job: ImageJob,
    source_sizes: Sequence[Size],
    *,
    assumed_think: int,
    revision: str | None = None,
) -> JobTokens:
    """Tokens that a job will take; `source_sizes` are its pictures' pixels, in order."""
    return prompter(job.model, revision).count(job, source_sizes, assumed_think)


def refuse_uneven(choice: ModelChoice, ranks: int) -> None:
    """Passes a checkpoint whose layers can be split over so many ranks. Raises UsageError."""
    arch = prompter(choice.model, choice.revision).arch
    split.refuse_uneven(arch, ranks, choice.quantization)


def rank_bytes(choice: ModelChoice, ranks: int, dtype: str) -> RankBytes:
    """Bytes of a checkpoint on each of `ranks` ranks that its layers are split over."""
    known = prompter(choice.model, choice.revision)
    assert known.card.weights is not None, "a checkpoint's weights are counted by kind"
    return split.rank_bytes(
        known.card.weights, known.arch, ranks, dtype=dtype, quantization=choice.quantization
    )


def load(
    choice: ModelChoice, *, is_batch_invariant: bool = True, pool: "RankPool | None" = None
) -> "MixedModel":
    """The loaded model; `is_batch_invariant` keeps a job's bits equal in any batch, on the CPU.

    With a `pool` its layers are split over the ranks, whose devices they are on. Imports torch.
    Raises CheckpointError, or MachineError for the device.
    """
    from hyimg_cli.models.hunyuan_image3.family import load_family

    folder = resolve_model(choice.model, choice.revision)
    return load_family(
        prompter(choice.model, choice.revision),
        folder,
        choice,
        is_batch_invariant=is_batch_invariant,
        pool=pool,
    )


def load_video(
    choice: ModelChoice, *, is_fast: bool = True, is_tiled: bool = True
) -> "LatentVideoModel":
    """The loaded video model; its text encoders stay on disk until a prompt needs them.

    `is_fast` off takes the library's own transformer forward, `is_tiled` off decodes latents whole.
    Imports torch. Raises CheckpointError, or MachineError for the device or a missing package."""
    # What writes videos too: nothing is drawn that could not be kept.
    require("diffusers", "av")
    from hyimg_cli.models.diffusers_video.loading import load_video as load_folder

    folder = resolve_model(choice.model, choice.revision)
    card = video_card(choice.model, choice.revision)
    return load_folder(folder, card, choice, is_fast=is_fast, is_tiled=is_tiled)


def _fetched(model: str, revision: str | None, *, with_weights: bool) -> Path:
    from huggingface_hub import snapshot_download

    # Code files are left where they are: nothing of theirs is ever run.
    # The patterns match in component folders too, where tokenizers have files of other kinds.
    small = ["*.json", "system_prompt.py", "*.jinja", "*.txt", "*.model"]
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
