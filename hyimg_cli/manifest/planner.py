"""The order of the jobs: one model and size together, the same images, texts or prompts side by
side. No torch.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

from hyimg_cli.spec.card import ModelCard
from hyimg_cli.spec.job import ImageJob, Job, VideoJob
from hyimg_cli.spec.plan import Group, Plan, VideoGroup

Key = TypeVar("Key", bound=Hashable)
One = TypeVar("One")


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


def make_plan(jobs: Sequence[Job], card_of: Callable[[str], ModelCard]) -> Plan:
    """Every job once, in groups of one model and one size class, or one size and frames.

    Models, then groups, then sets of source images or prompts stand in the order of their first
    job, as do jobs that write the same text within a set; else the manifest's order holds. So a
    model is loaded once, and an image encoded and a text written once in a row. In a group, jobs
    that need no text come first: they wait for nobody's. `card_of` is asked once per model of
    pictures.
    """
    card = cache(card_of)
    groups: list[Group | VideoGroup] = []
    for of_model in _alike(jobs, lambda job: (isinstance(job, VideoJob), job.model)).values():
        groups += _image_groups([job for job in of_model if isinstance(job, ImageJob)], card)
        groups += _video_groups([job for job in of_model if isinstance(job, VideoJob)])
    return Plan(tuple(groups))


def _image_groups(jobs: Sequence[ImageJob], card_of: Callable[[str], ModelCard]) -> Iterator[Group]:
    by_size = _alike(jobs, lambda job: size_class_of(job, card_of(job.model)))
    for size_class, members in by_size.items():
        in_order = sorted(members, key=lambda job: job.writes_text)
        by_source = side_by_side(in_order, lambda job: (job.writes_text, job.images))
        jobs = side_by_side(by_source, lambda job: (job.writes_text, job.images, text_of(job)))
        yield Group(members[0].model, size_class, jobs)


def _video_groups(jobs: Sequence[VideoJob]) -> Iterator[VideoGroup]:
    # A LoRA is read once for all that want it.
    by_lora = side_by_side(jobs, lambda job: job.lora)
    alike = _alike(by_lora, lambda job: (job.lora, job.size, job.num_frames))
    for (_, size, frames), members in alike.items():
        in_order = side_by_side(members, lambda job: (job.prompt, job.negative_prompt))
        yield VideoGroup(members[0].model, size, frames, in_order)


def side_by_side(ones: Iterable[One], key: Callable[[One], Hashable]) -> tuple[One, ...]:
    """All of them, equal ones by `key` together, where the first of them was."""
    # By their hashes: a million keys would take more memory than their jobs.
    places: dict[int, int] = {}
    return tuple(sorted(ones, key=lambda one: places.setdefault(hash(key(one)), len(places))))


def _alike(ones: Iterable[One], key: Callable[[One], Key]) -> dict[Key, list[One]]:
    """They by `key`, in the order in which each key first appears."""
    by_key: dict[Key, list[One]] = {}
    for one in ones:
        by_key.setdefault(key(one), []).append(one)
    return by_key
