"""Which jobs a replica gets next: large pieces while much is left, single jobs at the end.

Pieces shrink with what is left (guided self-scheduling, Polychronopoulos & Kuck 1987), so a slow
replica takes fewer of them and holds nothing up at the end. No process is known here.
"""

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from hyimg_cli.manifest.planner import text_of
from hyimg_cli.spec.job import ImageJob, Job, VideoJob
from hyimg_cli.spec.plan import Group, Plan, VideoGroup

# A replica's share of a piece is this part of what would be even: the rest levels differences.
_ROUNDS = 2
# Pictures that write and draw together cost less than one by one: fewer are only given where more
# would leave another replica without work.
_WORTH_BATCHING = 4


@dataclass
class _OpenGroup:
    """What is left of a group."""

    group: Group | VideoGroup
    jobs: deque[Job] = field(default_factory=deque)


class JobQueue:
    """The jobs of a plan that nobody has yet, for `replicas` of them to take from."""

    def __init__(self, plan: Plan, replicas: int) -> None:
        self._replicas = replicas
        self._parts = [_OpenGroup(group, deque(group.jobs)) for group in plan.groups]
        self._part_of = {job.custom_id: part for part in self._parts for job in part.jobs}
        self._alone: deque[Job] = deque()

    def __len__(self) -> int:
        """Jobs that are left."""
        return sum(len(part.jobs) for part in self._parts) + len(self._alone)

    def take(self, loaded: str | None, at_work: Counter[str]) -> Plan | None:
        """The next piece, of one group; None where nothing is left.

        `loaded`: the model that the replica has already, which it keeps while there are jobs for
        it. Else it gets the model with most jobs for each replica that is `at_work` on it (how many
        by model), so that no model is loaded more often than it must be. Jobs that are to run alone
        come last.
        """
        left: Counter[str] = Counter()
        for part in self._parts:
            left[part.group.model] += len(part.jobs)
        waiting = [model for model, count in left.items() if count]
        if not waiting:
            if not self._alone:
                return None
            job = self._alone.popleft()
            return _piece(self._part_of[job.custom_id].group, [job])
        model = max(waiting, key=lambda model: left[model] / (at_work[model] + 1))
        if loaded is not None and left[loaded]:
            model = loaded
        part = next(part for part in self._parts if part.jobs and part.group.model == model)
        # As many jobs as are due, or about as many: whole sets of jobs with the same source images,
        # or else with the same text, unless a set is larger than two pieces.
        due = -(-left[model] // (_ROUNDS * self._replicas))
        if isinstance(part.group, Group):
            even = -(-left[model] // self._replicas)
            due = max(due, min(_WORTH_BATCHING, even))
        due = min(due, len(part.jobs))
        count = _fill(due, part.jobs, _sources) or _fill(due, part.jobs, _text) or due
        return _piece(part.group, [part.jobs.popleft() for _ in range(count)])

    def requeue(self, jobs: Sequence[Job]) -> None:
        """Jobs that were taken and not begun are the next ones of their group again."""
        for job in reversed(jobs):
            self._part_of[job.custom_id].jobs.appendleft(job)

    def isolate(self, job: Job) -> None:
        """A job that may have been what ended its replica: it runs alone, behind all others."""
        self._alone.append(job)

    def clear(self) -> None:
        """Dispatch nothing more."""
        self._alone.clear()
        for part in self._parts:
            part.jobs.clear()


def _piece(group: Group | VideoGroup, jobs: Sequence[Job]) -> Plan:
    """The group with these of its jobs alone."""
    if isinstance(group, Group):
        pictures = tuple(job for job in jobs if isinstance(job, ImageJob))
        return Plan((replace(group, jobs=pictures),))
    return Plan((replace(group, jobs=tuple(job for job in jobs if isinstance(job, VideoJob))),))


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
