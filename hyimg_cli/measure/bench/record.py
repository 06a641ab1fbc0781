"""Write a comparison as `bench.json`, Markdown and a page, with the machine it was measured on."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import PurePath
from statistics import median
from typing import Any

from hyimg_cli.files import replace_file
from hyimg_cli.journal.provenance import hardware, portable, versions
from hyimg_cli.measure.bench.runs import RUN_PHASES, RunResult
from hyimg_cli.measure.bench.scenario import SIDES, Scenario
from hyimg_cli.measure.bench.verdict import Findings, Timed, clock_notes, spread_of
from hyimg_cli.measure.pairs import BENCH_JSON, VARIANTS, folder_pairs
from hyimg_cli.models import registry
from hyimg_cli.report.comparison import comparison_page, markdown
from hyimg_cli.spec.job import Job, VideoJob

FORMAT = 1
MARKDOWN_NAME, REPORT_NAME = "bench.md", "report.html"


def write(found: Findings, *, command: str, lpips: str, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Write `bench.json`, `bench.md` and `report.html` next to the pictures; return the first.

    `command` is the command line, `lpips` says how LPIPS was measured; `flags` are settings of
    all variants that came from flags or the environment.
    """
    scenario, verdict = found.scenario, found.verdict
    variants = [{**asdict(one), "phases": list(one.phases)} for one in scenario.variants]
    shown = found.worst.scenario
    # An infinite PSNR is the text "inf".
    entry = {
        "format": FORMAT,
        "name": scenario.name,
        "question": scenario.question,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "verdict": {
            "name": verdict.name,
            "reasons": list(verdict.reasons),
            "exit_code": verdict.exit_code,
        },
        "variants": dict(zip(SIDES, variants, strict=False)),
        "common": {**scenario.common, **{k: portable(v) for k, v in flags.items()}},
        "phases_that_may_differ": list(scenario.phases),
        "main_steps": scenario.main_steps,
        "timings": [
            _timing(timed, one.scenario) for one in found.comparisons for timed in one.timed
        ],
        "precision": [row.to_json() for row in found.rows],
        "failures": list(found.comparisons[0].failures),
        "jobs": [job_facts(job) for job in found.jobs],
        "notes": [*found.notes],
        "environment": {
            "hardware": hardware(),
            "versions": versions(),
            "model": portable(found.jobs[0].model),
            "model_fingerprint": registry.fingerprint(found.jobs[0].model),
        },
        "lpips": lpips,
        "command": command,
    }
    sides = (VARIANTS[scenario.labels.index(label)] for label in shown.labels)
    pairs = folder_pairs(*(found.kept / side for side in sides)).pairs
    files = {pair.a.stem: (pair.a, pair.b) for pair in pairs}
    for name, content in (
        (BENCH_JSON, json.dumps(entry, indent=1, ensure_ascii=False, allow_nan=False) + "\n"),
        (MARKDOWN_NAME, markdown(entry)),
        (REPORT_NAME, comparison_page(entry, shown.labels, files)),
    ):
        replace_file(found.kept / name, content.encode())
    return entry


def _timing(timed: Timed, scenario: Scenario) -> dict[str, Any]:
    """Return a pair at one step count: seconds of both, the speed-up and the parts of the gain.

    `explained_s` is the gain in phases in which the variants may differ.
    """
    gains = {phase: timed.gain_in_s(phase) for phase in RUN_PHASES}
    return {
        "steps": timed.steps,
        "pair": list(scenario.labels),
        "a": _seconds(timed.a),
        "b": _seconds(timed.b),
        "speedup": asdict(timed.speedup),
        "speedup_of_medians": timed.speedup_of_medians,
        "is_resolved": timed.is_resolved,
        "notes": list(clock_notes(timed)),
        "gain_s": timed.gain_s,
        "explained_s": sum(s for phase, s in gains.items() if scenario.may_gain_in(phase)),
        "gain_by_phase_s": gains,
    }


def _seconds(runs: Sequence[RunResult]) -> dict[str, Any]:
    jobs = len(runs[0].outcomes)
    return {
        "wall_s": spread_of([run.wall_s for run in runs]),
        "s_per_job": median(run.wall_s for run in runs) / jobs,
        "idle_s": spread_of([run.idle_s for run in runs]),
        "phases_s": {
            phase: spread_of([run.phases_s[phase] for run in runs]) for phase in RUN_PHASES
        },
        "peak_memory_mb": max(
            (one.peak_memory_mb or 0.0 for run in runs for one in run.outcomes), default=0.0
        ),
        "rows": dict(runs[0].rows),
    }


def job_facts(job: Job) -> dict[str, Any]:
    """Return what `bench.json` records of a job: jobs with equal facts take equal work."""
    fields = ("custom_id", "task", "prompt", "seed", "guidance_scale")
    common = {name: getattr(job, name) for name in fields}
    if isinstance(job, VideoJob):
        return {**common, "size": str(job.size), "num_frames": job.num_frames}
    images = [PurePath(path).name for path in job.images]
    return {**common, "images": images, "bot_task": job.bot_task}
