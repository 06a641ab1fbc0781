"""Outcomes of jobs, as the lines that the journal will hold."""

import json
from dataclasses import dataclass
from typing import Any

from hyimg_cli.pipelines.request import Finished, Request
from hyimg_cli.spec.events import Outcome, OutputFile
from hyimg_cli.spec.job import Job


@dataclass(frozen=True)
class Facts:
    """Facts of every line, whatever the job's end: its keys, how often it was tried, and by kind
    what the session found in memory, found on disk, or had to make until now.
    """

    key: str
    finishing_key: str
    attempt: int
    cache: dict[str, dict[str, int]]
    peak_memory_mb: float


def done(
    work: Finished[Job], output: OutputFile | None, facts: Facts, *warnings: str, **said: Any
) -> Outcome:
    """The line of a finished job; whatever was degraded on the way is among its warnings.

    `warnings` stand behind its own; `said` are the fields that its kind of job alone knows.
    """
    outputs = (output,) if output else ()
    common = line_facts(work, facts, *work.warnings, *warnings)
    return Outcome(
        work.job.custom_id,
        "done",
        facts.key,
        facts.attempt,
        outputs=outputs,
        metadata=json.loads(work.job.metadata_json),
        extra=json.loads(work.job.extra_json),
        **common,
        **said,
    )


def line_facts(work: Request[Job], facts: Facts, *warnings: str) -> dict[str, Any]:
    """Fields of every line of a job that was at work, however it ended."""
    return {
        "timings_s": _rounded(work.clock.timings_s()),
        "share_s": _rounded(work.clock.share_s()),
        "overlapped_s": _rounded(work.clock.overlapped_s),
        "cache": facts.cache,
        "peak_memory_mb": round(facts.peak_memory_mb, 1),
        "edit": work.edit,
        "finishing_key": facts.finishing_key,
        "warnings": tuple(dict.fromkeys(warnings)),
        "notes": tuple(dict.fromkeys(work.notes)),
    }


def _rounded(seconds: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 6) for name, value in seconds.items()}
