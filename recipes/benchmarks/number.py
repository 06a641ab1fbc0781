"""Write a benchmark's number with all that it depends on, and compare it with a claim.

    python recipes/benchmarks/number.py write runs/gedit --list GEdit-Bench -o benchmark.json
    python recipes/benchmarks/number.py check benchmark.json --claim 6.67
    python recipes/benchmarks/number.py compare runs/gedit runs/gedit-fast
    python recipes/benchmarks/number.py layout runs/gedit -o official/my-model

The run is one of a manifest by lists.py, scored by viescore.py. `macro` is the mean over the
groups' means, as GEdit-Bench and ImgEdit publish it; `micro` is the mean over edits. The root is
taken for each edit and score, before any mean. Nothing missing is guessed: any edit without all its
scores is named, every value is then given twice, and the exit code is 1.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hyimg_cli import __version__
from hyimg_cli.errors import HyimgError
from hyimg_cli.files import replace_file
from hyimg_cli.journal.past_run import PastJob, past_jobs, read_run_info
from hyimg_cli.measure.scores.comparison import AS_WORST, LEFT_OUT, two_runs
from hyimg_cli.measure.scores.intervals import (
    Estimate,
    Samples,
    difference,
    estimate,
    limit_of_two_runs,
)
from hyimg_cli.measure.scores.scored_runs import ScoredRun, read_scored_run, scorers_in
from hyimg_cli.spec import digest

# How often a claim's pictures may have been scored, so that `check` knows its limit.
CLAIMED = (1, 2, 3, 4, 5, 10)
Record = dict[str, Any]


def main(words: list[str]) -> int:
    """Run one of the four commands; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    write = commands.add_parser("write", help="write benchmark.json of a scored run")
    write.add_argument("run", type=Path)
    write.add_argument("--list", required=True, help="the benchmark's name")
    write.add_argument("-o", "--output", type=Path, required=True)
    check = commands.add_parser("check", help="compare a claim with a benchmark.json")
    check.add_argument("file", type=Path)
    check.add_argument("--claim", type=float, required=True)
    check.add_argument("--repeats", type=int, choices=CLAIMED, default=1, help="of the claim")
    compare = commands.add_parser("compare", help="the paired difference of two scored runs")
    compare.add_argument("a", type=Path)
    compare.add_argument("b", type=Path)
    layout = commands.add_parser("layout", help="link pictures where the official scripts look")
    layout.add_argument("run", type=Path)
    layout.add_argument("-o", "--output", type=Path, required=True)
    for one in (write, compare):
        one.add_argument("--by", default="", help="scorer; default: the only one")
    for one in (write, check, compare):
        one.add_argument("--language", default="", help="such as en; default: all")
    for one in (check, compare):
        one.add_argument("--mean", choices=["macro", "micro"], default="macro")
    given = parser.parse_args(words)
    try:
        return COMMANDS[given.command](given)
    except HyimgError as error:
        sys.exit(f"error[{error.code}]: {error.what} ({error.where})\n  hint: {error.hint}")


def write_command(given: argparse.Namespace) -> int:
    """Write benchmark.json."""
    jobs = jobs_of(given.run)
    name = given.by or only_scorer(given.run)
    run = read_scored_run(given.run, name)
    parts = [f"{name}.{part}" for part in parts_of(run)]
    every = {one: read_scored_run(given.run, one) for one in (name, *parts)}
    languages = Counter(language_of(job) for job in jobs.values())
    values = {}
    for language in [given.language] if given.language else ["all", *languages]:
        names = [n for n in run.samples if language in ("all", language_of(jobs[n]))]
        values[language] = {one: values_of(of, names, jobs) for one, of in every.items()}
    done = [job for job in jobs.values() if job.is_done]
    record = {
        "list": {
            "name": given.list,
            "sha256": run.list_sha256,
            "languages": dict(sorted(languages.items())),
            "groups": dict(sorted(Counter(map(group_of, jobs.values())).items())),
            "expected": len(jobs),
            "drawn": len(done),
            "judged": sum(one.mean is not None for one in run.samples.values()),
        },
        "pictures": pictures_of(done, read_run_info(given.run)),
        "judge": {
            "asked": run.declared.get("options") or run.declared.get("weights"),
            "answered": {n: {str(v): c for v, c in one.items()} for n, one in run.facts.items()},
            "identity": run.identity,
            "declared": dict(run.declared),
            "repeats": run.repeats,
        },
        "rules": {
            "missing": f"two values: {LEFT_OUT}, and {AS_WORST} ({run.worst:g})",
            "unreadable": "missing; never guessed, never asked for again by itself",
            "macro": "mean over x_group of the groups' means",
            "micro": "mean over edits",
            "root": "for each edit and score, before any mean",
            "intervals": "95 %: same_list, the judge's noise alone; new_pictures, by picture",
        },
        "values": values,
        "missing": {name: list(why) for name, why in run.incomplete.items()},
        "versions": {"hyimg": __version__, "python": sys.version.split()[0]},
        "command": ["number.py", "write", "--list", given.list, "--by", name],
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    replace_file(given.output, (json.dumps(record, indent=1, sort_keys=True) + "\n").encode())
    for language, of in values.items():
        show(f"{name}, {language}", of[name])
    return show_faults(record)


def jobs_of(place: Path) -> dict[str, PastJob]:
    return {job.custom_id: job for job in past_jobs(place) if job.line}


def only_scorer(place: Path) -> str:
    names = scorers_in(place)
    if len(names) > 1:
        sys.exit(f"error: {place} has several scorers: --by {' or --by '.join(names)}")
    return names[0]


def field_of(job: PastJob, name: str) -> str:
    return str({**job.result, **job.line}.get(name, ""))


def group_of(job: PastJob) -> str:
    return field_of(job, "x_group") or "all"


def language_of(job: PastJob) -> str:
    return field_of(job, "x_language") or "en"


def parts_of(run: ScoredRun) -> list[str]:
    """Return SC and PQ, which VIEScore's official scripts print too, if the scorer has them."""
    return ["SC", "PQ"] if run.declared.get("name") == "viescore" else []


def values_of(run: ScoredRun, names: Sequence[str], jobs: Mapping[str, PastJob]) -> Record:
    """Return the means of these edits, with intervals; twice if any score is missing."""
    groups = [group_of(jobs[name]) for name in names]
    table = run.table(names, groups)
    tables = {LEFT_OUT: table}
    if any(name in run.incomplete for name in names):
        tables[AS_WORST] = table.with_missing_as(run.worst)
    return {how: means_of(one, groups) for how, one in tables.items()}


def means_of(table: Samples, groups: Sequence[str]) -> Record:
    plain = Samples(table.values, table.pictures)
    by_group = {}
    for group in sorted(set(groups)):
        rows = [n for n, one in enumerate(groups) if one == group]
        own = Samples(table.values[rows], [table.pictures[n] for n in rows])
        by_group[group] = record_of(estimate(own))
    found = {"macro": record_of(estimate(table)), "micro": record_of(estimate(plain))}
    for name, one in (("macro", table), ("micro", plain)):
        limits = {str(n): limit_of_two_runs(one, n) for n in CLAIMED}
        found[name]["limits_of_two_runs"] = limits
    return found | {"groups": by_group}


def record_of(one: Estimate | None) -> Record:
    if one is None:
        return {"mean": None, "edits": 0}
    return {
        "mean": one.mean,
        "same_list": one.interval(one.same_list),
        "new_pictures": one.interval(one.new_pictures),
        "edits": one.samples,
        "pictures": one.pictures,
    }


def pictures_of(done: Sequence[PastJob], info: Mapping[str, Any]) -> Record:
    """Return what the pictures depend on: models, seeds, sizes, settings and a digest of all."""
    outputs = [(job.custom_id, job.outputs[0]) for job in done]
    flags = {name: one.get("value") for name, one in (info.get("flags") or {}).items()}
    return {
        "model_sha256": sorted({str(job.result.get("model_sha256")) for job in done}),
        "models": sorted({str(job.line.get("model")) for job in done}),
        "settings": flags,
        "seeds": [min(seeds), max(seeds)] if (seeds := seeds_of(outputs)) else [],
        "sizes": dict(Counter(f"{one.get('width')}x{one.get('height')}" for _, one in outputs)),
        "pixels_sha256": digest.of_json(sorted((n, one.get("pixel_sha256")) for n, one in outputs)),
    }


def seeds_of(outputs: Sequence[tuple[str, Mapping[str, Any]]]) -> list[int]:
    return [one["seed"] for _, one in outputs if one.get("seed") is not None]


def show(title: str, values: Record) -> None:
    for how, one in values.items():
        missing = f", missing {how.replace('_', ' ')}" if len(values) > 1 else ""
        for mean in ("macro", "micro"):
            own = one[mean]
            if own["mean"] is None:
                print(f"{title}: {mean} not known{missing}")
                continue
            ends = {
                name: "not known" if own[name] is None else "{:.3f} to {:.3f}".format(*own[name])
                for name in ("new_pictures", "same_list")
            }
            said = f"other pictures {ends['new_pictures']}, the judge's noise {ends['same_list']}"
            print(f"{title}: {mean} {own['mean']:.4f} ({said}){missing}")


def show_faults(record: Record) -> int:
    """Name what is missing and a judge that changed; return 1 if there is any."""
    for name, why in record["missing"].items():
        print(f"missing: {name}: {'; '.join(why)}", file=sys.stderr)
    changed = {n: counts for n, counts in record["judge"]["answered"].items() if len(counts) > 1}
    for name, counts in changed.items():
        print(f"warning: {name} is not the same for all scores: {counts}", file=sys.stderr)
    return 1 if record["missing"] or changed.keys() - {"fingerprint"} else 0


def check_command(given: argparse.Namespace) -> int:
    """Say whether a claim is within the limit of two runs of the same pictures and judge."""
    try:
        record = json.loads(given.file.read_text(encoding="utf-8"))
        judge, values = record["judge"], record["values"]
        of = values[given.language or ("all" if "all" in values else next(iter(values)))]
        main_values = next(iter(sorted(of.items(), key=lambda one: "." in one[0])))[1]
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"error: {given.file} is not such a benchmark.json: {error!r}")
    answered = ", ".join(judge["answered"].get("model", {})) or "a judge without a name"
    code = 0
    for how, one in main_values.items():
        own = one[given.mean]
        limit = own["limits_of_two_runs"][str(given.repeats)]
        missing = f", missing {how.replace('_', ' ')}" if len(main_values) > 1 else ""
        if own["mean"] is None or limit is None:
            print(f"cannot say{missing}: the judge's noise is not known; score with --repeat 2")
            code = 1
            continue
        off = abs(own["mean"] - given.claim)
        verdict = "agrees with" if off <= limit else "does not agree with"
        code = code if off <= limit else 1
        said = f"{off:.3f} apart, two honest runs are within {limit:.3f} in 95 %"
        print(f"{given.claim:g} {verdict} {own['mean']:.4f} ({given.mean}{missing}): {said}")
    print(f"for the same pictures, judged by {answered}; another version may differ more")
    return code if len(main_values) == 1 else 1


def compare_command(given: argparse.Namespace) -> int:
    """Say how far two runs of one list are apart."""
    names = [given.by or only_scorer(place) for place in (given.a, given.b)]
    runs = [
        read_scored_run(place, name) for place, name in zip((given.a, given.b), names, strict=True)
    ]
    record, jobs = two_runs(*runs), jobs_of(given.a)
    ids = [n for n in runs[0].samples if given.language in ("", language_of(jobs[n]))]
    groups = [group_of(jobs[name]) for name in ids] if given.mean == "macro" else None
    tables = [run.table(ids, groups) for run in runs]
    pairs = {LEFT_OUT: tables}
    if any(name in run.incomplete for name in ids for run in runs):
        pairs[AS_WORST] = [table.with_missing_as(runs[0].worst) for table in tables]
    for how, (a, b) in pairs.items():
        missing = f", missing {how.replace('_', ' ')}" if len(pairs) > 1 else ""
        if (found := difference(a, b)) is None:
            print(f"no edit has a score in both runs{missing}")
            continue
        ends = found.interval(found.new_pictures)
        told = "told apart" if found.is_told_apart else "cannot be told apart"
        said = "not known" if ends is None else "{:+.3f} to {:+.3f}".format(*ends)
        print(f"{given.mean} {found.mean:+.4f} ({said} for other pictures): {told}{missing}")
    for warning in record["warnings"]:
        print(f"warning: {warning}", file=sys.stderr)
    for side in ("a", "b"):
        for name, why in record[side]["missing"].items():
            print(f"missing in {side.upper()}: {name}: {'; '.join(why)}", file=sys.stderr)
    return 1 if record["warnings"] or len(pairs) > 1 else 0


def layout_command(given: argparse.Namespace) -> int:
    """Link results, and write sources as PNG, where the official scripts look for them."""
    from PIL import Image

    count = 0
    for name, job in jobs_of(given.run).items():
        if not job.is_done:
            continue
        result = (given.run / job.outputs[0]["path"]).absolute()
        target = given.output / f"{name}.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        source = target.with_name(f"{target.stem}_SRCIMG.png")
        target.unlink(missing_ok=True)
        if result.suffix == ".png":
            target.symlink_to(result)
        else:
            Image.open(result).save(target)
        if name.startswith("fullset/") and not source.exists():
            Image.open(given.run / job.line["images"][0]).save(source)
        count += 1
    print(f"{given.output}: {count} results")
    return 0


COMMANDS = {
    "write": write_command,
    "check": check_command,
    "compare": compare_command,
    "layout": layout_command,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
