"""Which jobs a replica gets next: large pieces while much is left, single jobs at the end.

Pieces shrink with what is left (guided self-scheduling, Polychronopoulos & Kuck 1987), so a slow
replica takes fewer of them and holds nothing up at the end. No process is known here.
"""

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from hyimg_cli.manifest.planner import text_of
from hyimg_cli.spec.job import ImageJob, Job
from hyimg_cli.spec.plan import Group, Plan

# A replica's share of a piece is this part of what would be even: the rest levels differences.
_ROUNDS = 2
# Pictures that write and draw together cost less than one by one: fewer are only given where more
# would leave another replica without work.
_WORTH_BATCHING = 4


class JobQueue:
    """The jobs of a plan that nobody has yet, for `replicas` of them to take from."""

    def __init__(self, plan: Plan, replicas: int) -> None:
        self._replicas = replicas
        # Each group with the jobs that are left of it, and by custom_id where a job belongs.
        self._groups = [(group, deque[Job](group.jobs)) for group in plan.groups]
        self._home = {job.custom_id: home for home in self._groups for job in home[1]}
        self._alone: deque[Job] = deque()

    def __len__(self) -> int:
        """Jobs that are left."""
        return sum(len(jobs) for _, jobs in self._groups) + len(self._alone)

    def take(self, loaded: str | None, at_work: Counter[str]) -> Plan | None:
        """The next piece, of one group; None where nothing is left.

        `loaded`: the model that the replica has already, which it keeps while there are jobs for
        it. Else it gets the model with most jobs for each replica that is `at_work` on it (how many
        by model), so that no model is loaded more often than it must be. Jobs that are to run alone
        come last.
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
        # As many jobs as are due, or about as many: whole sets of jobs with the same source images,
        # or else with the same text, unless a set is larger than two pieces.
        due = -(-left[model] // (_ROUNDS * self._replicas))
        if isinstance(group, Group):
            even = -(-left[model] // self._replicas)
            due = max(due, min(_WORTH_BATCHING, even))
        due = min(due, len(jobs))
        count = _fill(due, jobs, _sources) or _fill(due, jobs, _text) or due
        return _piece(group, [jobs.popleft() for _ in range(count)])

    def requeue(self, jobs: Sequence[Job]) -> None:
        """Jobs that were taken and not begun are the next ones of their group again."""
        for job in reversed(jobs):
            self._home[job.custom_id][1].appendleft(job)

    def isolate(self, job: Job) -> None:
        """A job that may have been what ended its replica: it runs alone, behind all others."""
        self._alone.append(job)

    def clear(self) -> None:
        """Dispatch nothing more."""
        self._alone.clear()
        for _, jobs in self._groups:
            jobs.clear()


def _piece(group: Any, jobs: Sequence[Job]) -> Plan:
    """The group, of pictures or of videos, with these of its jobs alone."""
    return Plan((replace(group, jobs=tuple(jobs)),))


def _fill(due: int, jobs: Iterable[Job], alike: Callable[[Job], Hashable]) -> int:
    """How many of the first jobs are about `due` in whole sets; 0 where the first is too large."""
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
    """Equal for jobs with the same source images; without any, for those with the same text."""
    return job.images or _text(job)


def _text(job: Job) -> Hashable:
    return text_of(job) if isinstance(job, ImageJob) else job.custom_id
