"""Select a part of a manifest, by name or by the variables that a queue sets for its tasks."""

import os
import re
from collections.abc import Mapping

from hyimg_cli.errors import UsageError

# A job scheduler's variables for a task: its number, the number of tasks, the minimum and maximum
# task number, and the step between them. Ranks of one job (RANK, WORLD_SIZE) are not shards.
_QUEUES = (
    tuple(f"SLURM_ARRAY_TASK_{name}" for name in ("ID", "COUNT", "MIN", "MAX", "STEP")),
    ("SKYPILOT_JOB_RANK", "SKYPILOT_NUM_JOBS", "", "", ""),
    ("JOB_COMPLETION_INDEX", "", "", "", ""),
)


def shard_named(
    text: str | None, environment: Mapping[str, str] = os.environ
) -> tuple[int, int] | None:
    """Parse `2/4` as (2, 4), counted from 1; `auto` and `auto/4` by the scheduler's variables.

    Raises UsageError if the text or a variable cannot be used.
    """
    if text is None:
        return None
    if by_queue := re.fullmatch(r"auto(?:/([0-9]{1,6}))?", text):
        return _of_queue(text, int(by_queue[1]) if by_queue[1] else None, environment)
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise _refusal(
            f"--shard {text!r} is not I/N with I from 1 to N",
            "for example --shard 2/4, or --shard auto in a task of a job scheduler",
        )
    return int(match[1]), int(match[2])


def remark_unsplit(text: str | None, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return a remark for a scheduler's task that runs without --shard, or nothing.

    Its part is never taken automatically: each task may have its own manifest.
    """
    what = "is set, but this run takes all jobs; --shard auto takes only this task's part"
    tasks = [names[0] for names in _QUEUES if environment.get(names[0])]
    return [f"{name} {what}" for name in tasks[:1] if text is None]


def _of_queue(text: str, given: int | None, environment: Mapping[str, str]) -> tuple[int, int]:
    """Return the shard of this task; `given`: the number of shards that the user gave."""
    queue = next((names for names in _QUEUES if environment.get(names[0])), None)
    if queue is None:
        known = ", ".join(names[0] for names in _QUEUES)
        raise _refusal(
            f"--shard {text} works only in a task of a job scheduler: none of {known} is set",
            "name the shard: --shard 2/4",
        )
    task, told, least, greatest, step = (_number(name, environment) for name in queue)
    count = told or given
    if count is None:
        raise _refusal(
            f"{queue[0]} is set, but not the number of tasks", "give the number: --shard auto/4"
        )
    if given not in (None, count):
        raise _refusal(
            f"--shard {text} does not match {queue[1]}, which is {count}",
            "to run one task again, name its shard: --shard 2/4",
        )
    task, first, every = task or 0, least or 0, step or 1
    tasks = range(first, first + count * every, every)
    if task not in tasks or greatest not in (None, tasks[-1]):
        raise _refusal(
            f"{queue[0]} is {task}, which is not one of {count} consecutive tasks",
            "name the shard: --shard 2/4",
        )
    return tasks.index(task) + 1, count


def _number(name: str, environment: Mapping[str, str]) -> int | None:
    """Return the value of a scheduler's variable; None if it is unset or has no name."""
    text = environment.get(name, "") if name else ""
    if text and not re.fullmatch(r"[0-9]{1,18}", text):
        raise _refusal(f"{name} is {text!r}, not a number", "name the shard: --shard 2/4")
    return int(text) if text else None


def _refusal(what: str, hint: str) -> UsageError:
    return UsageError(what, hint=hint, code="usage.shard")
