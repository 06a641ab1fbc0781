"""What scored runs say: a mean of one, or the paired difference of two, as a record and in words.

Where any score is missing there is no single number: the record and the text have two, with the
missing samples left out, and with each at the worst value of the scorer's range.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from hyimg_cli.errors import UsageError
from hyimg_cli.measure.scores.intervals import Estimate, difference, estimate
from hyimg_cli.measure.scores.scored_runs import CODE, ScoredRun, kind_of_missing
from hyimg_cli.settings.values import shown
from hyimg_cli.spec.printed import printable
from hyimg_cli.spec.units import counted, names_text

_MOST_NAMED = 20
LEFT_OUT, AS_WORST = "left_out", "as_worst"
# Facts that endpoints change without another model: noted, but the scores still compare.
_NOTED = {"fingerprint"}
APART, NOT_APART, UNKNOWN = "told apart", "cannot be told apart", "not known"
Record = dict[str, Any]


def one_run(run: ScoredRun) -> Record:
    """Return the mean of one run with both intervals."""
    names = [*run.samples]
    table = run.table(names)
    found = {LEFT_OUT: estimate(table)}
    if run.incomplete:
        found[AS_WORST] = estimate(table.with_missing_as(run.worst))
    own = {"scorer": run.scorer, "a": _side(run), "mean": _estimates(found)}
    return own | _told(_changes(run))


def two_runs(a: ScoredRun, b: ScoredRun, *, allow_unpaired: bool = False) -> Record:
    """Return the paired difference of two runs of one list by one scorer.

    Raises UsageError for another scorer, prompt or source; for a sample of one run only, too,
    unless `allow_unpaired`.
    """
    names, unpaired = _pairs(a, b, allow_unpaired=allow_unpaired)
    _refuse_other_scorer(a, b)
    tables = [run.table(names) for run in (a, b)]
    found = {LEFT_OUT: difference(tables[0], tables[1])}
    missing = [name for name in names if name in a.incomplete or name in b.incomplete]
    if missing:
        better = a.declared.get("higher_is_better", True)
        worst = (min if better else max)(a.worst, b.worst)
        found[AS_WORST] = difference(*(table.with_missing_as(worst) for table in tables))
    told = _told([*_changes(a), *_changes(b), *_other_judges(a, b)])
    if unpaired:
        told["warnings"].append(f"left out, because only one run has them: {names_text(unpaired)}")
    estimates = _estimates(found)
    verdicts = {one["verdict"] for one in estimates.values()}
    signs = {one["mean"] > 0 for one in estimates.values() if one["mean"] is not None}
    is_apart = verdicts == {APART} and len(signs) == 1
    verdict = APART if is_apart else UNKNOWN if UNKNOWN in verdicts else NOT_APART
    sides = {"a": _side(a), "b": _side(b)}
    return (
        {"scorer": a.scorer}
        | sides
        | {
            "difference": estimates,
            "verdict": verdict,
            "better": _better(estimates, a) if is_apart else None,
            **told,
        }
    )


def largest_differences(a: ScoredRun, b: ScoredRun, most: int) -> list[Record]:
    """Return the pairs whose mean scores differ most, each with its files and values."""
    pairs = [(one, b.samples[name]) for name, one in a.samples.items() if name in b.samples]
    shown: list[Record] = [
        {
            "name": one.custom_id,
            "prompt": one.prompt,
            "scores": (one.mean, other.mean),
            "files": (one.path, other.path),
        }
        for one, other in pairs
        if one.mean is not None and other.mean is not None
    ]
    shown.sort(key=lambda pair: -abs(pair["scores"][0] - pair["scores"][1]))
    return shown[:most]


def is_clean(record: Record) -> bool:
    """Return True if nothing is missing, and the same judge gave every score."""
    sides = [record[name] for name in ("a", "b") if name in record]
    return not record["warnings"] and not any(side["missing"] for side in sides)


def _better(estimates: Mapping[str, Record], a: ScoredRun) -> str:
    is_higher = estimates[LEFT_OUT]["mean"] > 0
    return "a" if is_higher == a.declared.get("higher_is_better", True) else "b"


def _side(run: ScoredRun) -> Record:
    alone = estimate(run.table([*run.samples]))
    return {
        "run": str(run.place),
        "mean": None if alone is None else alone.mean,
        "samples": len(run.samples),
        "repeats": run.repeats,
        "list_sha256": run.list_sha256,
        "identity": run.identity,
        "declared": dict(run.declared),
        "facts": {
            name: {str(value): count for value, count in counts.most_common()}
            for name, counts in run.facts.items()
        },
        "missing": {name: list(why) for name, why in run.incomplete.items()},
        "missing_as": run.worst,
    }


def _estimates(found: Mapping[str, Estimate | None]) -> dict[str, Record]:
    return {name: _record(one) for name, one in found.items()}


def _record(one: Estimate | None) -> Record:
    if one is None:
        return {"mean": None, "samples": 0, "verdict": UNKNOWN}
    verdict = APART if one.is_told_apart else NOT_APART
    return {
        "mean": one.mean,
        "same_list": one.interval(one.same_list),
        "new_pictures": one.interval(one.new_pictures),
        "noise_share": one.noise_share,
        "samples": one.samples,
        "pictures": one.pictures,
        "repeats": one.repeats,
        "is_constant": one.is_constant,
        "verdict": UNKNOWN if one.new_pictures is None else verdict,
    }


def _pairs(a: ScoredRun, b: ScoredRun, *, allow_unpaired: bool) -> tuple[list[str], list[str]]:
    """Return the ids in both runs, and those in one. Raises UsageError for another list."""
    hint = "compare two runs of one manifest"
    names = [name for name in a.samples if name in b.samples]
    other = [name for name in names if a.samples[name].asked != b.samples[name].asked]
    if other:
        what = f"{names_text(other)}: the prompt or the sources are not those of {a.place}"
        raise UsageError(what, where=b.place, hint=hint, code=CODE)
    unpaired = [name for run in (a, b) for name in run.samples if name not in {*names}]
    if not names or (unpaired and not allow_unpaired):
        what = f"only one of the runs has {names_text(unpaired)}"
        hint += ", or leave them out with --allow-unpaired" if names else ""
        raise UsageError(what, where=b.place, hint=hint, code=CODE)
    return names, unpaired


def _refuse_other_scorer(a: ScoredRun, b: ScoredRun) -> None:
    if a.identity == b.identity:
        return
    keys = sorted({*a.declared} | {*b.declared})
    differ = [
        f"{key} {shown(a.declared.get(key))} and {shown(b.declared.get(key))}"
        for key in keys
        if a.declared.get(key) != b.declared.get(key)
    ]
    what = f"{a.scorer} is not the same scorer in both runs: {'; '.join(differ) or 'its code'}"
    hint = "score both with the same options, rubric and code: hyimg score RUN --score …"
    raise UsageError(what, where=b.place, hint=hint, code=CODE)


def _changes(run: ScoredRun) -> Iterator[tuple[str, str]]:
    """Yield the facts that are not the same for all scores of a run, each with what to say."""
    for fact, counts in run.facts.items():
        if len(counts) > 1:
            said = f"{fact} is not the same for all scores: {_counts_text(counts)}"
            yield fact, f"{run.place}: {said}"


def _other_judges(a: ScoredRun, b: ScoredRun) -> Iterator[tuple[str, str]]:
    """Yield the facts that are the same within each run, and not the same in both."""
    for fact in sorted({*a.facts} | {*b.facts}):
        own = [run.facts.get(fact, Counter()) for run in (a, b)]
        if {*own[0]} != {*own[1]} and max(map(len, own)) < 2:
            told = (" ".join(map(str, counts)) or "not recorded" for counts in own)
            end = "" if fact in _NOTED else ": another judge"
            yield fact, f"{fact} is {' in A and '.join(told)} in B{end}"


def _told(changes: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the warnings, and the notes, on facts that changed."""
    found: dict[str, list[str]] = {"warnings": [], "notes": []}
    for fact, said in changes:
        found["notes" if fact in _NOTED else "warnings"].append(said)
    return found


def _counts_text(counts: Counter[Any]) -> str:
    return ", ".join(f"{printable(str(value))} ({n})" for value, n in counts.most_common())


def lines(record: Record) -> Iterator[str]:
    """Yield the record in words, the verdict last."""
    sides = {name: record[name] for name in ("a", "b") if name in record}
    for name, side in sides.items():
        title = f"{name.upper()} " if len(sides) > 1 else ""
        mean = "" if side["missing"] else f", mean {_number(side['mean'])}"
        of = counted(side["samples"], "sample")
        yield f"{record['scorer']}: {title}{side['run']}: {of}, {side['repeats']} x scored{mean}"
    if answered := ", ".join(
        f"{fact} {' or '.join(values)}" for fact, values in _facts_of([*sides.values()]).items()
    ):
        yield f"  scored by: {answered}"
    for name, side in sides.items():
        title = f" in {name.upper()}" if len(sides) > 1 else ""
        yield from _missing_lines(side["missing"], title)
    what = "difference A - B" if "b" in record else "mean"
    estimates = record["difference" if "b" in record else "mean"]
    worst = sides["a"]["missing_as"]
    titles = {LEFT_OUT: "missing left out: ", AS_WORST: f"missing as {worst:g}: "}
    for name, one in estimates.items():
        yield from _estimate_lines(one, (titles[name] if len(estimates) > 1 else "") + what)
    for warning in record["warnings"]:
        yield f"  warning: {warning}"
    for note in record["notes"]:
        yield f"  note: {note}"
    if "b" in record:
        yield f"  {_verdict_text(record)}"


def _facts_of(sides: Sequence[Record]) -> dict[str, list[str]]:
    names = dict.fromkeys(name for side in sides for name in side["facts"])
    found = {
        name: [*dict.fromkeys(v for side in sides for v in side["facts"].get(name, ()))]
        for name in names
    }
    # A digest in full is in the record.
    return {n: [v[:12] if n.endswith("sha256") else v for v in vs] for n, vs in found.items()}


def _missing_lines(missing: Mapping[str, Sequence[str]], title: str) -> Iterator[str]:
    if not missing:
        return
    kinds = Counter(kind_of_missing(why[0]) for why in missing.values())
    said = ", ".join(f"{n} {kind}" for kind, n in kinds.most_common())
    yield f"  without all scores{title}: {len(missing)} ({said})"
    for name in [*missing][:_MOST_NAMED]:
        yield f"    {name}: {printable('; '.join(missing[name]))}"
    if (more := len(missing) - _MOST_NAMED) > 0:
        yield f"    {more} more; --json names all"


def _estimate_lines(one: Record, what: str) -> Iterator[str]:
    if one["mean"] is None:
        yield f"  {what}: no sample has a score"
        return
    yield f"  {what}: {_number(one['mean'], sign=what.endswith('B'))}"
    of = f"{counted(one['samples'], 'sample')} of {counted(one['pictures'], 'picture')}"
    if (ends := one["new_pictures"]) is not None:
        yield f"    other pictures of this kind: {_ends(ends)} (95 %, {of})"
    else:
        yield f"    other pictures of this kind: not known from {of}"
    if (ends := one["same_list"]) is None:
        yield "    these pictures, scored again: not known without --repeat"
        return
    yield f"    these pictures, scored again: {_ends(ends)} (95 %, the judge's noise alone)"
    if one["is_constant"]:
        yield "    the judge gave the same value each time: that says nothing about another version"
    elif one["noise_share"] is not None:
        share = one["noise_share"]
        more = "; a higher --repeat makes it narrower" if share > 0.25 else "; more pictures would"
        yield f"    of the wider interval's variance, {share:.0%} is the judge's noise{more}"


def _verdict_text(record: Record) -> str:
    estimates = record["difference"]
    if record["verdict"] == APART:
        sides = {side: str(record[side]["run"]) for side in ("a", "b")}
        return f"{record['better'].upper()} ({sides[record['better']]}) has the better scores"
    if record["verdict"] == UNKNOWN:
        return "too few pictures to compare"
    halves = [
        (one["new_pictures"][1] - one["new_pictures"][0]) / 2
        for one in estimates.values()
        if one.get("new_pictures")
    ]
    return f"A and B cannot be told apart: a difference below {max(halves):.2f} would not be seen"


def _ends(ends: Sequence[float]) -> str:
    return " to ".join(map(_number, ends))


def _number(value: float | None, *, sign: bool = False) -> str:
    return "none" if value is None else f"{value:+.3f}" if sign else f"{value:.3f}"
