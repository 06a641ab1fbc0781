"""The order of the jobs: same model and size together, same source images side by side."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cache
from typing import TypeVar

from hyimg_cli.spec.card import ModelCard
from hyimg_cli.spec.job import ImageJob
from hyimg_cli.spec.plan import Group, Plan

Key = TypeVar("Key", bound=Hashable)


def make_plan(jobs: Sequence[ImageJob], card_of: Callable[[str], ModelCard]) -> Plan:
    """Every job once, in groups of one model and one size class.

    Models, then groups, then sets of source images stand in the order of their first job; within a
    set the manifest's order holds. So a model is loaded once and an image encoded once in a row.
    `card_of` is asked once per model.
    """
    card = cache(card_of)
    groups = []
    for of_model in _alike(jobs, lambda job: job.model).values():
        by_size = _alike(of_model, lambda job: _size_class(job, card(job.model)))
        for size_class, members in by_size.items():
            by_images = _alike(members, lambda job: job.images)
            in_order = tuple(job for same in by_images.values() for job in same)
            groups.append(Group(of_model[0].model, size_class, in_order))
    return Plan(tuple(groups))


def _size_class(job: ImageJob, card: ModelCard) -> str:
    bucket = card.bucket_of(job.size)
    return "auto" if bucket is None else str(bucket.size)


def _alike(jobs: Iterable[ImageJob], key: Callable[[ImageJob], Key]) -> dict[Key, list[ImageJob]]:
    """Jobs by `key`, in the order in which each key first appears."""
    by_key: dict[Key, list[ImageJob]] = {}
    for job in jobs:
        by_key.setdefault(key(job), []).append(job)
    return by_key
