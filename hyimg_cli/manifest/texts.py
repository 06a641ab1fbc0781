"""Which jobs write the same text: the AR stage's inputs are equal. No torch."""

from collections.abc import Hashable
from dataclasses import dataclass

from hyimg_cli.spec.card import ModelCard
from hyimg_cli.spec.job import ImageJob


@dataclass(frozen=True)
class TextIdentity:
    """All of a job that decides its text, within one run and as long as its sources' files stay as
    they are: the checkpoint's files, precision and ranks are the same for the whole run.
    """

    inputs: Hashable
    size_class: str


def text_identity(job: ImageJob, card: ModelCard) -> TextIdentity | None:
    """The identity of a job's text; None where it writes none."""
    inputs = job.text_inputs
    return None if inputs is None else TextIdentity(inputs, size_class_of(job, card))


def text_of(job: ImageJob) -> Hashable:
    """Equal for jobs of one group that write the same text, and for no others."""
    return job.text_inputs or job.custom_id


def size_class_of(job: ImageJob, card: ModelCard) -> str:
    """The size that the job will be drawn in, or `auto`."""
    bucket = card.bucket_of(job.size)
    return "auto" if bucket is None else str(bucket.size)
