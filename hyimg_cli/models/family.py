"""A family of checkpoints: a folder next to this file, with a record in its `record.py`.

All of this is known before weights are loaded, and without torch; only `load` imports it.
`registry` asks each record whether a checkpoint belongs to its family. Nothing outside `models/`
knows the name of a family.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from hyimg_cli.cache.disk import SOURCE_IMAGES
from hyimg_cli.errors import CheckpointError, UsageError
from hyimg_cli.kv.segments import Segment
from hyimg_cli.loading import checkpoint
from hyimg_cli.loading.checkpoint import TensorInfo
from hyimg_cli.manifest.cost import JobTokens
from hyimg_cli.media.images import stretched_digest
from hyimg_cli.settings.run import ModelChoice, Quantization, RunConfig
from hyimg_cli.spec.card import ModelCard, RankBytes, VideoCard
from hyimg_cli.spec.job import ImageJob, Size, VideoJob

if TYPE_CHECKING:
    from hyimg_cli.models.common.model import DecoderModel
    from hyimg_cli.models.latent import Rewriter
    from hyimg_cli.models.latent_video import LatentVideoModel
    from hyimg_cli.parallel.ranks import RankPool


class ImageCheckpoint(Protocol):
    """A checkpoint that writes text and draws: its facts, its sequences and what they share.

    Families derive from it and inherit these defaults.
    """

    card: ModelCard

    def check(self, job: ImageJob) -> None:
        """Raise JobError, with the field in `where`, for a job that the checkpoint cannot take."""

    def advice(self, job: ImageJob) -> Sequence[str]:
        """Return sentences that the author of a job should read before it runs."""
        return ()

    def count(self, job: ImageJob, source_sizes: Sequence[Size], assumed_think: int) -> JobTokens:
        """Count the job's tokens; unwritten text counts as `assumed_think` tokens.

        `source_sizes` are its pictures' sizes, in order.
        """

    def prefixes(self, job: ImageJob) -> list[list[Segment]]:
        """Return the sequences that jobs may share, with pictures named by their paths.

        Of the AR prompt; if the job has no AR stage, of each guidance branch.
        """
        return []

    def encodings(self, job: ImageJob, digests: Sequence[str]) -> list[tuple[str, Any]]:
        """Return what is encoded before the job draws, with its kind in the disk cache.

        `digests`: of its pictures as they are read.
        """
        seen = [view.digest_of(one) for view, one in zip(job.views, digests, strict=True)]
        is_fitted = job.infer_align_image_size
        return [(SOURCE_IMAGES, stretched_digest(one) if is_fitted else one) for one in seen]

    def encoding_key(self, item: Any, choice: ModelChoice, dtype: str, device: str) -> str:
        """Return the disk cache's key of one of `encodings`, for a model that denoises latents.

        Raises CheckpointError if weights are missing.
        """
        return ""

    def activations(self, job: ImageJob, config: RunConfig) -> tuple[int, int, int]:
        """Return the bytes, in 16 bits, of embedding the job's text, of a step, and of its decode.

        The last two with the K/V that are kept then. For a model that denoises latents.
        """
        return 0, 0, 0

    def find_rewriter(self) -> None:
        """Raise CheckpointError if the files of its prompt rewriter are not here.

        For a model whose card `rewrites`.
        """
        raise AssertionError("only a card that rewrites is asked")

    def load_rewriter(self, choice: ModelChoice) -> "Rewriter":
        """Load that rewriter. Raises CheckpointError, or MachineError for the device."""
        raise AssertionError("only a card that rewrites is asked")

    def batch_key(self, job: ImageJob) -> Hashable | None:
        """Return what jobs that are denoised together have in common; None if it is drawn alone.

        For a model that denoises latents.
        """
        return None

    def memo_counts(self) -> dict[str, dict[str, int]]:
        """Return hits and misses of cached texts and sequences, by kind."""
        return {}

    def refuse_uneven(self, ranks: int, quantization: Quantization) -> None:
        """Raise UsageError if layers cannot be split over `ranks` ranks."""
        raise UsageError(
            f"{self.card.name} cannot be split over processes",
            hint="remove --tensor-parallel-size and --cfg-parallel-size; --replicas divides the "
            "jobs",
            code="usage.tensor-parallel",
        )

    def rank_bytes(self, ranks: int, dtype: str, quantization: Quantization) -> RankBytes:
        """Return the bytes on each of `ranks` ranks that share the layers."""
        raise AssertionError("refused before")

    def load(
        self, choice: ModelChoice, *, is_batch_invariant: bool, pool: "RankPool | None"
    ) -> "DecoderModel":
        """Load the model; `is_batch_invariant` keeps a job's bits equal in any batch, on a CPU.

        With a `pool`, layers are split over its ranks, on their devices. Raises CheckpointError, or
        MachineError for the device.
        """


class VideoCheckpoint(Protocol):
    """A text-to-video checkpoint. Families derive from it and inherit these defaults."""

    card: VideoCard

    def check(self, job: VideoJob) -> None:
        """Raise JobError for a job whose texts are too long, or whose LoRAs do not fit.

        Texts by the encoders' limits, LoRAs by their headers.
        """

    def advice(self, job: VideoJob) -> Sequence[str]:
        """Return sentences that the author of a job should read before it runs."""
        return ()

    def load(self, choice: ModelChoice) -> "LatentVideoModel":
        """Load the model; text encoders stay on disk until a prompt needs them.

        Raises CheckpointError, or MachineError for the device.
        """


@dataclass(frozen=True)
class Reading:
    """Files of a checkpoint that are read, and `defaults` for keys that none of them has."""

    files: tuple[str, ...]
    defaults: Mapping[str, object]


@dataclass(frozen=True)
class Family:
    """How a kind of checkpoint is recognized and opened.

    The functions take its folder and raise CheckpointError. A folder is one of the family's
    checkpoints if it `marks` it, or if its `config.json` names the family as `model_type`. `open`
    reads the small files; weights may be missing. `tensors` reads the headers of each component's
    files; `weights` gives the folder and the stem of these files, by the small files alone.
    `check_headers` raises for faults of the files that headers show, without torch; if it is None,
    `tensors` does. `refuse_wrong` raises what loading would raise for the files. `reading` tells
    which files are read, if known. If a family `takes_components`, all but `marks`, `weights` and
    `reading` accept a second folder, with the checkpoint's text encoder and VAE. If it
    `takes_weights`, they accept a file, which replaces the weights of the folder's transformer.

    `helps`: a command that uses its checkpoints, if they make nothing by themselves.

    `follows`: settings that this family follows and not every family of its kind does, or
    `name=value` for one value only. Settings that a family does not follow are refused.
    """

    name: str
    makes: Literal["pictures", "videos"]
    open: Callable[..., ImageCheckpoint | VideoCheckpoint]
    marks: Callable[[Path], bool] = lambda folder: False
    takes_components: bool = False
    takes_weights: bool = False
    fingerprint: Callable[..., str] = checkpoint.fingerprint
    tensors: Callable[..., Mapping[str, Mapping[str, TensorInfo]]] = lambda folder: {
        "model": checkpoint.tensor_index(folder)
    }
    weights: Callable[[Path], Iterable[tuple[Path, str]]] = lambda folder: [
        (folder, checkpoint.STEM)
    ]
    refuse_wrong: Callable[..., object] = lambda folder: None
    check_headers: Callable[..., object] | None = None
    reading: Callable[[Path], Reading | None] = lambda folder: None
    follows: frozenset[str] = frozenset()
    helps: str = ""

    def is_one(self, folder: Path) -> bool:
        """Return True for a checkpoint of the family."""
        if self.marks(folder):
            return True
        try:
            return checkpoint.read_json(folder / "config.json").get("model_type") == self.name
        except CheckpointError:
            return False
