"""Cut a plan into pieces, each for one replica at a time: large ones first, small ones at the end.

Pieces shrink with the number of jobs left (guided self-scheduling, Polychronopoulos & Kuck 1987). A
slow replica therefore takes fewer jobs and does not delay the end. This module knows nothing about
processes.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from hyimg_cli.manifest.planner import text_of
from hyimg_cli.spec.job import ImageJob, Job
from hyimg_cli.spec.plan import Group, Plan

# A piece is an even share divided by this; the remaining jobs balance differences in speed.
_ROUNDS = 2
# No piece is smaller than an even share divided by this: each costs a lock and a file.
_MOST_EACH = 64
# Pictures that write and draw together cost less than single ones. Pieces are smaller than this
# only if another replica would have no work otherwise.
_WORTH_BATCHING = 4


def cut(plan: Plan, replicas: int) -> list[Plan]:
    """Return pieces of the plan for `replicas`, each with jobs of one group, in the plan's order.

    Sets of jobs with the same source images, or else with the same text, stay whole unless a set is
    larger than two pieces.
    """
    models = dict.fromkeys(group.model for group in plan.groups)
    return [piece for model in models for piece in _cut_model(plan, model, replicas)]


def in_order(pieces: Iterable[tuple[int, Plan]], share: float, loaded: str | None) -> list[int]:
    """Return the numbers of pieces in the order in which a replica should try to take them.

    First those of the model that it has `loaded`. Without one, each replica begins with the model
    at its `share` of all jobs, from 0 to 1, to avoid needless loads.
    """
    jobs: dict[str, list[int]] = {}
    counts: dict[str, int] = {}
    for number, piece in pieces:
        jobs.setdefault(model_of(piece), []).append(number)
        counts[model_of(piece)] = counts.get(model_of(piece), 0) + len(piece.jobs)
    first, rest = loaded, share * sum(counts.values())
    if first not in jobs:
        for model, count in counts.items():
            first = model
            rest -= count
            if rest < 0:
                break
    models = sorted(jobs, key=lambda model: model != first)
    return [number for model in models for number in jobs[model]]


def model_of(piece: Plan) -> str:
    """Return the model of a piece."""
    return piece.groups[0].model


def with_jobs(piece: Plan, jobs: Sequence[Job]) -> Plan:
    """Return the piece with only these of its jobs."""
    group: Any = piece.groups[0]
    return Plan((replace(group, jobs=tuple(jobs)),))


def _cut_model(plan: Plan, model: str, replicas: int) -> Iterator[Plan]:
    left = len(plan.jobs_of_model(model))
    least = -(-left // (_MOST_EACH * replicas))
    for group in plan.groups:
        jobs = deque[Job](group.jobs if group.model == model else ())
        while jobs:
            due = max(least, -(-left // (_ROUNDS * replicas)))
            if isinstance(group, Group):
                even = -(-left // replicas)
                due = max(due, min(_WORTH_BATCHING, even))
            due = min(due, len(jobs))
            count = _fill(due, jobs, _sources) or _fill(due, jobs, _text) or due
            yield with_jobs(Plan((group,)), [jobs.popleft() for _ in range(count)])
            left -= count


def _fill(due: int, jobs: Iterable[Job], alike: Callable[[Job], Hashable]) -> int:
    """Return how many leading jobs make about `due` in whole sets; 0 if the first is too big."""
    end = 0
    for _, same in groupby(jobs, key=alike):
        count = sum(1 for _ in same)
        if end + count > 2 * due:
            break
        end += count
        if end >= due:
            break
    return end


def _sources(job: Job) -> Hashable:
    """Return a key of jobs with the same source images or, without any, the same text."""
    return job.images or _text(job)


def _text(job: Job) -> Hashable:
    return text_of(job) if isinstance(job, ImageJob) else job.custom_id
