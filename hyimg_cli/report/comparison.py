"""The page of a comparison: what `bench.json` says, with pictures of both variants."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hyimg_cli.quality.metrics import Pixels
from hyimg_cli.report.blocks import (
    Bar,
    Bars,
    Block,
    Commands,
    Compare,
    Fact,
    Facts,
    Page,
    Row,
    Section,
    Span,
    Table,
    Text,
    Verdict,
)
from hyimg_cli.report.pictures import embedded, heat_map

_SHARES = ("equal_share", "within_5", "within_10", "within_20", "within_50")
# More pairs than this make a page heavy; the folders A and B hold them all.
_MOST_PAIRS = 12
Entry = Mapping[str, Any]


def comparison_page(entry: Entry, pictures: Mapping[str, tuple[Pixels, Pixels]]) -> Page:
    """The page of a `bench.json`; `pictures` by job: those of variant A and of variant B."""
    verdict = entry["verdict"]
    return Page(
        title=f"hyimg bench: {entry['name']}",
        question=entry["question"],
        verdict=Verdict(
            verdict["name"],
            "bad" if verdict["exit_code"] else "good",
            tuple(verdict["reasons"]),
        ),
        sections=(
            Section("Time", tuple(_time(entry)), _how_timed(entry)),
            Section("Pictures", tuple(_pairs(entry, pictures)), _which(entry, pictures)),
            Section("Precision budget", (_budget(entry), *_notes(entry))),
            Section("Where the variants part", tuple(_divergences(entry))),
            Section("Environment", (Facts(tuple(_environment(entry))),)),
            Section("Again", (Commands((entry["command"],)),)),
        ),
        footer=f"bench.json and bench.md beside this page hold every figure. {entry['date']}",
    )


def _labels(entry: Entry) -> tuple[str, str]:
    return entry["variants"]["a"]["label"], entry["variants"]["b"]["label"]


def _how_timed(entry: Entry) -> str:
    first = entry["timings"][0]
    return (
        f"Medians of {first['a']['wall_s']['n']} runs in turn, A B A B, warm-up apart; the thin "
        f"lines reach from the fastest to the slowest. The variants may differ in: "
        f"{', '.join(entry['phases_that_may_differ']).replace('*', 'every phase')}."
    )


def _time(entry: Entry) -> Iterator[Block]:
    yield _speedups(entry)
    for timing in entry["timings"]:
        rows = tuple(_phase_bars(timing))
        caption = f"Seconds a run by phase, {timing['steps']} denoise steps"
        yield Bars(caption, _labels(entry), rows)


def _speedups(entry: Entry) -> Table:
    a, b = _labels(entry)
    head = ("steps", f"{a}, s a job", f"{b}, s a job", "speed-up", "range", "gain, s", "explained")
    rows = tuple(
        Row(
            (
                str(one["steps"]),
                f"{one['a']['s_per_job']:.3f}",
                f"{one['b']['s_per_job']:.3f}",
                f"{one['speedup']['median']:.3f}",
                f"{one['speedup']['low']:.3f} to {one['speedup']['high']:.3f}",
                f"{one['gain_s']:.3f}",
                f"{one['explained_s']:.3f}",
            )
        )
        for one in entry["timings"]
    )
    coverage = entry["timings"][0]["speedup"]["coverage"]
    caption = (
        f"Speed-up of {a} over {b}; the range holds the median of the runs' ratios with "
        f"{coverage:.0%}. Explained: what lies in the phases that may differ."
    )
    return Table(caption, head, rows)


def _phase_bars(timing: Entry) -> Iterator[Bar]:
    a, b = timing["a"]["phases_s"], timing["b"]["phases_s"]
    yield Bar("whole run", (_span(timing["a"]["wall_s"]), _span(timing["b"]["wall_s"])))
    for phase in a:
        if max(a[phase]["max"], b[phase]["max"]) > 0:
            yield Bar(phase, (_span(a[phase]), _span(b[phase])))


def _span(spread: Entry) -> Span:
    return Span(spread["median"], spread["min"], spread["max"])


def _which(entry: Entry, pictures: Mapping[str, object]) -> str:
    shown = min(len(pictures), _MOST_PAIRS)
    return (
        f"{shown} of {len(pictures)} pairs, {entry['main_steps']} denoise steps. "
        "Drag the slider, or move it with the arrow keys."
    )


def _pairs(entry: Entry, pictures: Mapping[str, tuple[Pixels, Pixels]]) -> Iterator[Block]:
    a, b = _labels(entry)
    facts = _facts_by_job(entry)
    for name, (ours, theirs) in list(pictures.items())[:_MOST_PAIRS]:
        if ours.shape != theirs.shape:
            yield Text(f"{name}: the variants drew different sizes")
            continue
        yield Compare(
            title=name,
            before=embedded(ours, f"{name}, {a}"),
            after=embedded(theirs, f"{name}, {b}"),
            heat=heat_map(ours, theirs),
            facts=facts.get(name, ()),
            before_label=a,
            after_label=b,
        )
    if not pictures:
        yield Text("No job was finished by both variants.")


def _facts_by_job(entry: Entry) -> dict[str, tuple[Fact, ...]]:
    """Prompt and distances of each job at the main step count."""
    a, b = _labels(entry)
    name = f"{a} vs {b}, {entry['main_steps']} steps"
    row: Entry = next((row for row in entry["precision"] if row["name"] == name), {"by_job": {}})
    prompts = {job["custom_id"]: job["prompt"] for job in entry["jobs"]}
    return {
        job: (
            ("prompt", prompts.get(job, "")),
            ("PSNR", f"{_number(one['psnr'], '.1f')} dB"),
            ("SSIM", _number(one["ssim"], ".4f")),
            ("LPIPS", _number(one["lpips"], ".4f")),
            ("largest difference", f"{one['max_abs']} levels"),
            ("equal values", f"{one['equal_share']:.2%}"),
        )
        for job, one in row["by_job"].items()
    }


def _budget(entry: Entry) -> Table:
    head = ("pair", "pictures", "PSNR, dB", "SSIM", "LPIPS", "max abs", "equal")
    within = ("≤ 5", "≤ 10", "≤ 20", "≤ 50")
    rows = tuple(Row(_budget_cells(row)) for row in entry["precision"])
    caption = (
        "Each figure is that of the job that is furthest apart. Twice: the floor of a variant. "
        "Other seed, other text, other source image: what a real change looks like. "
        f"{entry['lpips']}."
    )
    return Table(caption, (*head, *within), rows)


def _budget_cells(row: Entry) -> tuple[str, ...]:
    if not row["pictures"]:
        return (row["name"], "0", *("–",) * (4 + len(_SHARES)))
    return (
        row["name"],
        str(row["pictures"]),
        _number(row["psnr_min"], ".1f"),
        _number(row["ssim_min"], ".4f"),
        _number(row["lpips_max"], ".4f"),
        str(row["max_abs"]),
        *(f"{row[name]:.2%}" for name in _SHARES),
    )


def _notes(entry: Entry) -> Iterator[Block]:
    notes = [
        *entry["notes"],
        *(f"{r['name']}: {r['note']}" for r in entry["precision"] if r["note"]),
    ]
    yield from (Text(note) for note in notes)


def _divergences(entry: Entry) -> Iterator[Block]:
    found: Sequence[Entry] = entry["divergences"]
    if not found:
        yield Text("Nowhere: ids, prefix K/V, noise, schedule, velocities and latents are equal.")
        return
    rows = tuple(
        Row(
            (one["custom_id"], one["stage"], one["where"], one["what"]),
            "bad" if one["is_fault"] else None,
        )
        for one in found
    )
    caption = "The first difference of each stage, per job. Coloured: more than rounding can do."
    yield Table(caption, ("job", "stage", "where", "what"), rows, ("left",) * 4)


def _environment(entry: Entry) -> Iterator[Fact]:
    about, machine = entry["environment"], entry["environment"]["hardware"]
    yield "processor", f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}"
    yield "GPUs", ", ".join(machine["gpus"]) or "none"
    yield "model", f"{about['model']} ({about['model_fingerprint'][:12]})"
    yield from about["versions"].items()
    for side in ("a", "b"):
        variant = entry["variants"][side]
        settings = ", ".join(f"{name} = {value}" for name, value in variant["settings"].items())
        own = settings or "no setting of its own"
        yield (
            f"variant {side.upper()}",
            f"{variant['label']}: {own}; lives for a {variant['lifetime']}",
        )
    common = ", ".join(f"{name} = {value}" for name, value in entry["common"].items())
    yield "both variants", common or "nothing but defaults"


def _number(value: float | str | None, form: str) -> str:
    return "–" if value is None else value if isinstance(value, str) else format(value, form)
