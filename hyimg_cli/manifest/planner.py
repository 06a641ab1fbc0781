"""The order of the jobs: one model and size together, the same images, texts or prompts side by
side. No torch.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cache
from typing import TypeVar

from hyimg_cli.spec.card import ModelCard
from hyimg_cli.spec.job import ImageJob, Job, VideoJob
from hyimg_cli.spec.plan import Group, Plan, VideoGroup

Key = TypeVar("Key", bound=Hashable)
One = TypeVar("One")


# All of a job that decides its text, with its size class, within one run and as long as its
# sources' files stay as they are: checkpoint, precision and ranks are the same for the whole run.
TextIdentity = tuple[Hashable, str]


def text_identity(job: ImageJob, card: ModelCard) -> TextIdentity | None:
    """The identity of a job's text; None where it writes none."""
    inputs = job.text_inputs
    return None if inputs is None else (inputs, size_class_of(job, card))


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
    by_model = _alike(jobs, lambda job: (isinstance(job, VideoJob), job.model))
    for (_, model), of_model in by_model.items():
        pictures = [job for job in of_model if isinstance(job, ImageJob)]
        by_size = _alike(pictures, lambda job: size_class_of(job, card(job.model)))
        for size_class, members in by_size.items():
            in_order = sorted(members, key=lambda job: job.writes_text)
            by_source = side_by_side(in_order, lambda job: (job.writes_text, job.images))
            by_text = side_by_side(
                by_source, lambda job: (job.writes_text, job.images, text_of(job))
            )
            groups.append(Group(model, size_class, by_text))
        # A LoRA is read once for all that want it.
        by_lora = side_by_side(
            (job for job in of_model if isinstance(job, VideoJob)), lambda job: job.lora
        )
        alike = _alike(by_lora, lambda job: (job.lora, job.size, job.num_frames))
        for (_, size, frames), films in alike.items():
            by_prompt = side_by_side(films, lambda job: (job.prompt, job.negative_prompt))
            groups.append(VideoGroup(model, f"{size}, {frames} frames", by_prompt))
    return Plan(tuple(groups))


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
