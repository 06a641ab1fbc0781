"""A family of checkpoints: a folder beside this file, with one of these records in its `record.py`.

Everything here is known before weights are loaded, and without torch; `load` alone imports it.
`registry` finds the family of a checkpoint by asking each record, and nothing outside `models/`
knows a family's name.
"""

from collections.abc import Callable, Mapping, Sequence
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
from hyimg_cli.settings.run import ModelChoice, Quantization
from hyimg_cli.spec.card import ModelCard, RankBytes, VideoCard
from hyimg_cli.spec.job import ImageJob, Size, VideoJob

if TYPE_CHECKING:
    from hyimg_cli.models.common.model import DecoderModel
    from hyimg_cli.models.latent_video import LatentVideoModel
    from hyimg_cli.parallel.ranks import RankPool


class ImageCheckpoint(Protocol):
    """A checkpoint that writes text and draws: its facts, what its sequences are and share.

    A family's own one is made from it: what it leaves out is as here.
    """

    card: ModelCard

    def check(self, job: ImageJob) -> None:
        """Passes a job whose text fits. Raises JobError with the manifest's field in `where`."""

    def count(self, job: ImageJob, source_sizes: Sequence[Size], assumed_think: int) -> JobTokens:
        """Tokens that the job will take; text not yet written counts as `assumed_think` tokens.
        `source_sizes` are its pictures' pixels, in order.
        """

    def prefixes(
        self, job: ImageJob, source_sizes: Sequence[Size], digests: Sequence[str]
    ) -> list[list[Segment]]:
        """Segments that jobs may share: of the AR prompt, or of each guidance branch where the job
        has no AR stage.
        """

    def encodings(self, job: ImageJob, digests: Sequence[str]) -> list[tuple[str, Any]]:
        """What is encoded before the job draws, each with its kind of the disk cache; `digests`: of
        its pictures' files.
        """
        is_fitted = job.infer_align_image_size
        return [(SOURCE_IMAGES, stretched_digest(one) if is_fitted else one) for one in digests]

    def encoding_key(self, item: Any, choice: ModelChoice, dtype: str, device: str) -> str:
        """The place of one of `encodings` in the disk cache, of one that denoises latents. Raises
        CheckpointError where the weights are not here.
        """
        return ""

    def activations(self, job: ImageJob, choice: ModelChoice) -> tuple[int, int]:
        """Bytes in 16 bits that a step of the job works with, and its decode, of one that denoises
        latents.
        """
        return 0, 0

    def memo_counts(self) -> dict[str, dict[str, int]]:
        """By kind, hits and misses of what is kept of texts and sequences."""
        return {}

    def refuse_uneven(self, ranks: int, quantization: Quantization) -> None:
        """Passes layers that can be split over so many ranks. Raises UsageError."""
        raise UsageError(
            f"layers and branches of {self.card.name} are not spread over processes",
            hint="leave --tensor-parallel-size and --cfg-parallel-size out; --replicas shares the "
            "jobs",
            code="usage.tensor-parallel",
        )

    def rank_bytes(self, ranks: int, dtype: str, quantization: Quantization) -> RankBytes:
        """Bytes on each of `ranks` ranks that the layers are split over."""
        raise AssertionError("refused before")

    def load(
        self, choice: ModelChoice, *, is_batch_invariant: bool, pool: "RankPool | None"
    ) -> "DecoderModel":
        """The loaded model; `is_batch_invariant` keeps a job's bits equal in any batch, on the CPU.

        With a `pool` its layers are split over the ranks, whose devices they are on. Raises
        CheckpointError, or MachineError for the device.
        """


class VideoCheckpoint(Protocol):
    """A text-to-video checkpoint."""

    @property
    def card(self) -> VideoCard: ...

    def check(self, job: VideoJob) -> None:
        """Passes a job whose texts its encoders read to their ends, and whose LoRAs fit by their
        headers. Raises JobError.
        """

    def load(self, choice: ModelChoice) -> "LatentVideoModel":
        """The model; its text encoders stay on disk until a prompt needs them. Raises
        CheckpointError, or MachineError for the device.
        """


@dataclass(frozen=True)
class Reading:
    """Files of a checkpoint that are read (`files`), and the keys that none of them has, which are
    taken to be as in `defaults`.
    """

    files: tuple[str, ...]
    defaults: Mapping[str, object]


@dataclass(frozen=True)
class Family:
    """How a kind of checkpoint is known and opened; the functions are given its folder.

    A folder is one of its checkpoints by what `marks` it, or where its `config.json` names the
    family as its `model_type`. `open` reads the small files: weights need not be there. `tensors`:
    of each component, what its files' headers say. `refuse_wrong` passes a checkpoint with every
    tensor of its configuration, and no other. `reading`: what of it is read, where that is known.
    Where a family `takes_components`, `open` and `fingerprint` may be given a second folder, with
    the checkpoint's text encoder and VAE. All raise CheckpointError.

    `follows`: settings of a run that not every family of the kind follows, and this one does; a
    `name=value` is of that value alone. What a family does not follow is refused by one rule.
    """

    name: str
    makes: Literal["pictures", "videos"]
    open: Callable[..., ImageCheckpoint | VideoCheckpoint]
    marks: Callable[[Path], bool] = lambda folder: False
    takes_components: bool = False
    fingerprint: Callable[..., str] = checkpoint.fingerprint
    tensors: Callable[[Path], Mapping[str, Mapping[str, TensorInfo]]] = lambda folder: {
        "model": checkpoint.tensor_index(folder)
    }
    refuse_wrong: Callable[[Path], None] = lambda folder: None
    reading: Callable[[Path], Reading | None] = lambda folder: None
    follows: frozenset[str] = frozenset()

    def is_one(self, folder: Path) -> bool:
        """True for a checkpoint of the family."""
        if self.marks(folder):
            return True
        try:
            return checkpoint.read_json(folder / "config.json").get("model_type") == self.name
        except CheckpointError:
            return False
