"""Choose a replica's next jobs: large pieces while many are left, single jobs at the end.

Pieces shrink with the number of jobs left (guided self-scheduling, Polychronopoulos & Kuck 1987). A
slow replica therefore takes fewer jobs and does not delay the end. This module knows nothing about
processes.
"""

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from hyimg_cli.manifest.planner import text_of
from hyimg_cli.spec.job import ImageJob, Job
from hyimg_cli.spec.plan import Group, Plan

# A piece is an even share divided by this; the remaining jobs balance differences in speed.
_ROUNDS = 2
# Pictures that write and draw together cost less than single ones. Pieces are smaller than this
# only if another replica would have no work otherwise.
_WORTH_BATCHING = 4


class JobQueue:
    """The jobs of a plan that have not been taken by any of `replicas`."""

    def __init__(self, plan: Plan, replicas: int) -> None:
        self._replicas = replicas
        # Each group with its remaining jobs, and by custom_id the entry of each job.
        self._groups = [(group, deque[Job](group.jobs)) for group in plan.groups]
        self._home = {job.custom_id: home for home in self._groups for job in home[1]}
        self._alone: deque[Job] = deque()

    def __len__(self) -> int:
        """Return the number of jobs left."""
        return sum(len(jobs) for _, jobs in self._groups) + len(self._alone)

    def take(self, loaded: str | None, at_work: Counter[str]) -> Plan | None:
        """Return the next piece, with jobs of one group; None if nothing is left.

        `loaded`: the model that the replica has loaded and keeps while jobs for it remain.
        Otherwise it gets the model with the most jobs per replica, counted in `at_work` by model,
        to avoid needless loads. Jobs that must run alone come last.
        """
        left: Counter[str] = Counter()
        for group, jobs in self._groups:
            left[group.model] += len(jobs)
        waiting = [model for model, count in left.items() if count]
        if not waiting:
            if not self._alone:
                return None
            job = self._alone.popleft()
            return _piece(self._home[job.custom_id][0], [job])
        model = max(waiting, key=lambda model: left[model] / (at_work[model] + 1))
        if loaded is not None and left[loaded]:
            model = loaded
        group, jobs = next(one for one in self._groups if one[1] and one[0].model == model)
        # About as many jobs as are due, in whole sets of jobs with the same source images, or else
        # with the same text, unless a set is larger than two pieces.
        due = -(-left[model] // (_ROUNDS * self._replicas))
        if isinstance(group, Group):
            even = -(-left[model] // self._replicas)
            due = max(due, min(_WORTH_BATCHING, even))
        due = min(due, len(jobs))
        count = _fill(due, jobs, _sources) or _fill(due, jobs, _text) or due
        return _piece(group, [jobs.popleft() for _ in range(count)])

    def requeue(self, jobs: Sequence[Job]) -> None:
        """Put jobs that were taken but not begun back at the front of their group."""
        for job in reversed(jobs):
            self._home[job.custom_id][1].appendleft(job)

    def isolate(self, job: Job) -> None:
        """Let a job that may have killed its replica run alone, after all others."""
        self._alone.append(job)

    def clear(self) -> None:
        """Drop all remaining jobs."""
        self._alone.clear()
        for _, jobs in self._groups:
            jobs.clear()


def _piece(group: Any, jobs: Sequence[Job]) -> Plan:
    """Return a plan of the group, of pictures or videos, with only these jobs."""
    return Plan((replace(group, jobs=tuple(jobs)),))


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
