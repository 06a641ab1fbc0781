"""A comparison's `bench.json`, with Markdown and a page: write, read back, compare.

Compared with an earlier one, it must be no slower, with no worse verdict.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path, PurePath
from statistics import median
from typing import Any

from hyimg_cli.errors import UsageError
from hyimg_cli.files import TABLE_BYTES, json_of, replace_file, text_of
from hyimg_cli.journal.provenance import hardware, portable, versions
from hyimg_cli.measure.bench.runs import RUN_PHASES, RunResult
from hyimg_cli.measure.bench.scenario import SIDES, Scenario
from hyimg_cli.measure.bench.verdict import VERDICTS, Findings, Timed, clock_notes, spread_of
from hyimg_cli.measure.pairs import BENCH_JSON, VARIANTS, folder_pairs
from hyimg_cli.models import registry
from hyimg_cli.report.comparison import comparison_page, markdown
from hyimg_cli.spec.job import Job, VideoJob

FORMAT = 1


def write(found: Findings, *, command: str, lpips: str, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Write `bench.json`, `bench.md` and `report.html` next to the pictures; return the first.

    `command` is the command line, `lpips` says how LPIPS was measured; `flags` are settings of
    all variants that came from flags or the environment.
    """
    scenario, verdict = found.scenario, found.verdict
    shown = found.worst.scenario
    # An infinite PSNR is the text "inf".
    entry = {
        "format": FORMAT,
        "name": scenario.name,
        "question": scenario.question,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "verdict": asdict(verdict) | {"exit_code": verdict.exit_code},
        "variants": dict(zip(SIDES, map(asdict, scenario.variants), strict=False)),
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
    text = json.dumps(entry, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    page = comparison_page(entry, shown.labels, files)
    contents = {BENCH_JSON: text, "bench.md": markdown(entry), "report.html": page}
    for name, content in contents.items():
        replace_file(found.kept / name, content.encode())
    return dict(json_of(text))


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
        "speedup": timed.speedup,
        "speedup_of_medians": timed.speedup_of_medians,
        "is_resolved": timed.is_resolved,
        "notes": list(clock_notes(timed)),
        "gain_s": timed.gain_s,
        "explained_s": sum(s for phase, s in gains.items() if scenario.may_gain_in(phase)),
        "gain_by_phase_s": gains,
    }


def _seconds(runs: Sequence[RunResult]) -> dict[str, Any]:
    peaks_mb = [one.peak_memory_mb or 0.0 for run in runs for one in run.outcomes]
    return {
        "wall_s": spread_of([run.wall_s for run in runs]),
        "s_per_job": median(run.wall_s for run in runs) / len(runs[0].outcomes),
        "idle_s": spread_of([run.idle_s for run in runs]),
        "phases_s": {
            phase: spread_of([run.phases_s[phase] for run in runs]) for phase in RUN_PHASES
        },
        "peak_memory_mb": max(peaks_mb, default=0.0),
        "rows": dict(runs[0].rows),
        "kv_slots": max(run.kv_slots for run in runs),
    }


def job_facts(job: Job) -> dict[str, Any]:
    """Return what `bench.json` records of a job: jobs with equal facts take equal work."""
    fields = ("custom_id", "task", "prompt", "seed", "guidance_scale")
    common = {name: getattr(job, name) for name in fields}
    if isinstance(job, VideoJob):
        return {**common, "size": str(job.size), "num_frames": job.num_frames}
    images = [PurePath(path).name for path in job.images]
    return {**common, "images": images, "bot_task": job.bot_task}


def read_share(text: str) -> float:
    """Return `5%` or `0.05` as 0.05. Raises UsageError."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(%?)\s*", text)
    if match is None:
        what = f"--max-regress {text!r} is not a share"
        raise UsageError(what, hint="for example --max-regress 5%", code="bench.share")
    return float(match[1]) / (100 if match[2] else 1)


def read_baseline(path: Path) -> dict[str, Any]:
    """Read an earlier bench.json. Raises UsageError if it is not one."""
    try:
        entry = json_of(text_of(path, TABLE_BYTES, or_stream=True))
        if entry["format"] == FORMAT and entry["timings"] and entry["verdict"]["name"] in VERDICTS:
            return dict(entry)
        what = "its format is not supported"
    except OSError as error:
        what = f"it cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError):
        what = "not a bench.json"
    hint = "give the bench.json of an earlier run"
    raise UsageError(what, where=path, hint=hint, code="bench.baseline")


def regressions(now: Mapping[str, Any], before: Mapping[str, Any], most: float) -> Iterator[str]:
    """Yield a sentence for everything that has become worse by more than the share `most`.

    A baseline of other jobs, another model or other settings is a regression too. Seconds are
    compared on the same hardware only, the speed-up of A over B always, because both ran in turn.
    Differences within the spread of the new runs do not count.
    """
    if other := [what for what, of in _COMPARED.items() if of(now) != of(before)]:
        yield f"cannot compare: the baseline has another {' and another '.join(other)}"
        return
    verdict, earlier_verdict = now["verdict"]["name"], before["verdict"]["name"]
    if VERDICTS.index(verdict) > VERDICTS.index(earlier_verdict):
        yield f"the verdict was {earlier_verdict}, now it is {verdict}"
    earlier, newer = ({_timed(one): one for one in of["timings"]} for of in (before, now))
    for what in earlier.keys() ^ newer.keys():
        yield f"{what}: timed in only one of the two"
    for what in earlier.keys() & newer.keys():
        own, then = newer[what], earlier[what]
        up = own["speedup"], then["speedup"]
        if up[0]["median"] < up[1]["median"] * (1 - most) and up[0]["high"] < up[1]["median"]:
            yield _sentence(what, "speed-up", up[1], up[0], most)
        walls = own["a"]["wall_s"], then["a"]["wall_s"]
        is_longer = walls[0]["median"] > walls[1]["median"] * (1 + most)
        if is_same_machine(now, before) and is_longer and walls[0]["min"] > walls[1]["median"]:
            yield _sentence(what, "seconds a run", walls[1], walls[0], most)


def is_same_machine(now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Return whether the seconds of both can be compared."""
    return bool(now["environment"]["hardware"] == before["environment"]["hardware"])


_COMPARED: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "comparison": lambda entry: entry["name"],
    "model": lambda entry: entry["environment"]["model_fingerprint"],
    "set of jobs": lambda entry: entry["jobs"],
    "setting": lambda entry: entry["common"],
}


def _timed(one: Mapping[str, Any]) -> str:
    """Name a timing."""
    return f"{' vs '.join(one['pair'])}, {one['steps']} steps"


def _sentence(
    timed: str, what: str, then: Mapping[str, float], now: Mapping[str, float], most: float
) -> str:
    change = f"from {then['median']:.3f} to {now['median']:.3f}"
    return f"{timed}: {what} went {change}, more than {most:.0%}"
