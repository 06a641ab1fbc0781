"""A comparison as `bench.json` and as a Markdown table: figures with what they were measured on."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path, PurePath
from statistics import median
from typing import Any

from hyimg_cli.files import replace_file
from hyimg_cli.journal.provenance import hardware, portable, versions
from hyimg_cli.measure.bench.divergence import Divergence
from hyimg_cli.measure.bench.harness import Comparison
from hyimg_cli.measure.bench.runs import RUN_PHASES, RunResult
from hyimg_cli.measure.bench.scenario import Scenario, Variant
from hyimg_cli.measure.bench.stats import Spread, median_interval
from hyimg_cli.measure.bench.verdict import Timed
from hyimg_cli.media.images import read_image
from hyimg_cli.models import registry
from hyimg_cli.quality.metrics import Pixels
from hyimg_cli.spec.job import Job, VideoJob

FORMAT = 1
JSON_NAME, MARKDOWN_NAME = "bench.json", "bench.md"


@dataclass(frozen=True)
class Told:
    """What only the command knows: how it was called, how LPIPS was measured, and the settings of
    both variants that came from flags or the environment.
    """

    command: str
    lpips: str
    flags: Mapping[str, Any]


def write(found: Comparison, told: Told, folder: Path) -> dict[str, Any]:
    """Writes `bench.json` and `bench.md` into `folder`; returns what `bench.json` holds."""
    entry = as_json(found, told)
    text = json.dumps(entry, indent=1, ensure_ascii=False, allow_nan=False)
    replace_file(folder / JSON_NAME, (text + "\n").encode())
    replace_file(folder / MARKDOWN_NAME, markdown(entry).encode())
    return entry


def kept_pictures(folder: Path) -> dict[str, tuple[Pixels, Pixels]]:
    """By job, the pictures of both variants that lie in `folder`."""
    pairs = [(path, folder / "B" / path.name) for path in sorted((folder / "A").glob("*.png"))]
    return {
        ours.stem: (read_image(ours).pixels, read_image(theirs).pixels)
        for ours, theirs in pairs
        if theirs.is_file()
    }


def as_json(found: Comparison, told: Told) -> dict[str, Any]:
    """The comparison in plain values; an infinite PSNR is the text "inf"."""
    scenario, verdict = found.scenario, found.verdict
    return {
        "format": FORMAT,
        "name": scenario.name,
        "question": scenario.question,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "verdict": {
            "name": verdict.name,
            "reasons": list(verdict.reasons),
            "exit_code": verdict.exit_code,
        },
        "variants": {"a": _variant(scenario.a), "b": _variant(scenario.b)},
        "common": {**scenario.common, **{k: portable(v) for k, v in told.flags.items()}},
        "phases_that_may_differ": list(scenario.phases),
        "main_steps": scenario.main_steps,
        "timings": [timing(timed, scenario) for timed in found.timed],
        "precision": [row.to_json() for row in found.rows],
        "divergences": [_divergence(one) for one in found.compared.divergences],
        "failures": list(found.compared.failures),
        "jobs": [_job(job) for job in found.jobs],
        "notes": [*found.notes],
        "lpips": told.lpips,
        "environment": {
            "hardware": hardware(),
            "versions": versions(),
            "model": portable(found.jobs[0].model),
            "model_fingerprint": registry.fingerprint(found.jobs[0].model),
        },
        "command": told.command,
    }


def timing(timed: Timed, scenario: Scenario) -> dict[str, Any]:
    """One step count: seconds of both variants, the speed-up with its interval, the gain's parts.

    `explained_s` is what the phases gain in which the variants may differ.
    """
    ratios = [b.wall_s / a.wall_s for a, b in zip(timed.a, timed.b, strict=True)]
    gains = {phase: timed.gain_in_s(phase) for phase in RUN_PHASES}
    return {
        "steps": timed.steps,
        "a": _seconds(timed.a),
        "b": _seconds(timed.b),
        "speedup": asdict(median_interval(ratios)),
        "gain_s": timed.gain_s,
        "explained_s": sum(s for phase, s in gains.items() if scenario.may_gain_in(phase)),
        "gain_by_phase_s": gains,
    }


def _seconds(runs: Sequence[RunResult]) -> dict[str, Any]:
    jobs = len(runs[0].outcomes)
    return {
        "wall_s": asdict(Spread.of([run.wall_s for run in runs])),
        "s_per_job": median(run.wall_s for run in runs) / jobs,
        "idle_s": asdict(Spread.of([run.idle_s for run in runs])),
        "phases_s": {
            phase: asdict(Spread.of([run.phases_s[phase] for run in runs])) for phase in RUN_PHASES
        },
        "peak_memory_mb": max(
            (one.peak_memory_mb or 0.0 for run in runs for one in run.outcomes), default=0.0
        ),
    }


def _variant(variant: Variant) -> dict[str, Any]:
    settings = dict(variant.settings)
    return {"label": variant.label, "lifetime": variant.lifetime, "settings": settings}


def _divergence(one: Divergence) -> dict[str, Any]:
    largest = one.max_abs if isfinite(one.max_abs) else None
    return {**asdict(one), "max_abs": largest, "is_structural": one.is_structural}


def _job(job: Job) -> dict[str, Any]:
    common = {
        "custom_id": job.custom_id,
        "task": job.task,
        "prompt": job.prompt,
        "seed": job.seed,
        "guidance_scale": job.guidance_scale,
    }
    if isinstance(job, VideoJob):
        return {**common, "size": str(job.size), "num_frames": job.num_frames}
    images = [PurePath(path).name for path in job.images]
    return {**common, "images": images, "bot_task": job.bot_task}


def markdown(entry: Mapping[str, Any]) -> str:
    """`bench.json` as text with tables."""
    return "\n".join(_lines(entry)) + "\n"


def _lines(entry: Mapping[str, Any]) -> Iterator[str]:
    a, b = entry["variants"]["a"]["label"], entry["variants"]["b"]["label"]
    yield f"# {entry['name']}: {entry['verdict']['name']}"
    yield from ("", entry["question"], "")
    yield from (f"- {reason}" for reason in entry["verdict"]["reasons"])
    yield from ("", f"| steps | {a}, s a job | {b}, s a job | speed-up | range | gain, s a run |")
    yield "|--:|--:|--:|--:|--:|--:|"
    for one in entry["timings"]:
        up = one["speedup"]
        yield (
            f"| {one['steps']} | {one['a']['s_per_job']:.3f} | {one['b']['s_per_job']:.3f} "
            f"| {up['median']:.3f} | {up['low']:.3f} to {up['high']:.3f} "
            f"| {one['gain_s']:.3f}, of it {one['explained_s']:.3f} where it may be |"
        )
    first = entry["timings"][0]
    runs, covered = first["a"]["wall_s"]["n"], first["speedup"]["coverage"]
    yield f"\nMedians of {runs} interleaved runs; the range holds the median with {covered:.0%}."
    yield from ("", *_budget(entry["precision"]), "")
    yield entry["lpips"]
    yield from entry["notes"]
    yield from ("", *_environment(entry))


def _budget(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    names = ("pictures", "PSNR, dB", "SSIM", "LPIPS", "max abs")
    yield f"| pair | {' | '.join(names)} | equal | <= 5 | <= 10 | <= 20 | <= 50 |"
    yield "|---" + "|--:" * 10 + "|"
    for row in rows:
        if not row["pictures"]:
            yield (
                f"| {row['name']} | 0, nothing to compare: {', '.join(row['missing'])} |" + " |" * 9
            )
            continue
        psnr = row["psnr_min"]
        shares = " | ".join(
            f"{row[name]:.2%}"
            for name in ("equal_share", "within_5", "within_10", "within_20", "within_50")
        )
        yield (
            f"| {row['name']} | {row['pictures']} | {psnr if psnr == 'inf' else f'{psnr:.1f}'} "
            f"| {_figure(row['ssim_min'])} | {_figure(row['lpips_max'])} | {row['max_abs']} "
            f"| {shares} |"
        )
    yield "\nEach figure is that of the job that is furthest apart."


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _environment(entry: Mapping[str, Any]) -> Iterator[str]:
    about, machine = entry["environment"], entry["environment"]["hardware"]
    gpus = ", ".join(machine["gpus"]) or "no GPU"
    yield f"{entry['date']}, {machine['cpu']}, {machine['cores']} cores, {gpus}"
    yield ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    yield f"model {about['model']}, {about['model_fingerprint'][:12]}"
    yield f"\n    {entry['command']}"
