"""Which jobs write the same text: the AR stage's inputs are equal. No torch."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from hyimg_cli.spec.card import ModelCard
from hyimg_cli.spec.job import ImageJob, TextInputs


@dataclass(frozen=True)
class TextIdentity:
    """All of a job that decides its text, within one run: `inputs` name images by their bytes.

    What else does is the same for the whole run: the checkpoint's files, precision, ranks.
    """

    inputs: TextInputs
    size_class: str


def text_identity(
    job: ImageJob, source_digests: Sequence[str], card: ModelCard
) -> TextIdentity | None:
    """The identity of a job's text; None where it writes none. `source_digests`: of the bytes of
    its source images, in order.
    """
    inputs = job.text_inputs
    if inputs is None:
        return None
    return TextIdentity(replace(inputs, images=tuple(source_digests)), size_class_of(job, card))


def text_of(job: ImageJob) -> Hashable:
    """Equal for jobs of one group that write the same text, as far as can be told without reading
    a file, and for no others.
    """
    return job.text_inputs or job.custom_id


def size_class_of(job: ImageJob, card: ModelCard) -> str:
    """The size that the job will be drawn in, or `auto`."""
    bucket = card.bucket_of(job.size)
    return "auto" if bucket is None else str(bucket.size)
