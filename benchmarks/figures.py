"""Draw the documentation's plots from the results, and print its tables: `make figures`.

Plots have no background, and colours that can be read on white and on black.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

RESULTS, DOCS = Path(__file__).parent / "results", Path(__file__).parents[1] / "docs"
CASES = json.loads(Path(__file__).with_name("kv_reuse_cases.json").read_text())
SUFFIX = "-2core-cpu.json"
GREY, BLUE, ORANGE, GREEN = "#6e7781", "#2f81f7", "#d97706", "#1a9c6b"
# Lines of the plot: the case, its label, the variant that reuse is compared with, colour and
# dashes.
LINES = (
    ("3 sources", "3 sources, against every step", "over_every", ORANGE, "--"),
    (next(iter(CASES["counted"])), "1 source, against every step", "over_every", ORANGE, "-"),
    ("3 sources", "3 sources, against once", "over_once", BLUE, "--"),
    (next(iter(CASES["counted"])), "1 source, against once", "over_once", BLUE, "-"),
    ("no source", "no source, against once", "over_once", GREEN, ":"),
)


def draw_reuse(by_steps: dict[str, Any]) -> Figure:
    """Draw how many times less the diffusion stage computes with reuse, by denoise steps."""
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axes = figure.subplots()
    axes.axhspan(2.05, 2.16, color=GREY, alpha=0.35, linewidth=0)
    axes.text(98, 1.83, "reported for 50 steps in vllm-omni#2949", color=GREY, ha="right")
    for case, label, against, color, dashes in LINES:
        times = [of[case][against] for of in by_steps.values()]
        axes.plot([*map(int, by_steps)], times, dashes, color=color, label=label, linewidth=2)
    ticks = [1, 2, 4, 8, 20, 50, 100]
    axes.patch.set_alpha(0)
    axes.set_xscale("log")
    axes.set_xticks(ticks, labels=[*map(str, ticks)])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("denoise steps", color=GREY)
    axes.set_ylabel("times less work with reuse", color=GREY)
    axes.set_ylim(0.8, 5)
    axes.grid(color=GREY, alpha=0.25)
    axes.tick_params(colors=GREY)
    axes.spines[:].set_color(GREY)
    axes.legend(frameon=False, labelcolor=GREY, loc="center right", bbox_to_anchor=(1, 0.64))
    return figure


def tables() -> Iterator[str]:
    """Yield rows of the page's tables: counted, timed, planted, and all comparisons."""
    kept = json.loads((RESULTS / f"kv-reuse{SUFFIX}").read_text())
    for kind in ("counted", "timed"):
        for name in filter(kept[kind].get, CASES[kind]):
            one = kept[kind][name]
            words = " ".join(f"--{word} {value}" for word, value in CASES[kind][name].items())
            command = f"`{'count' if kind == 'counted' else 'clock'} {words}`".replace(" `", "`")
            if kind == "counted":
                cells = [f"{of:.2f}" for of in (*one["pflop"], one["over_once"], one["over_every"])]
                cells = [f"{one['prefix_tokens']:,}", *cells, f"{one['saved_of_once']:.1%}"]
            else:
                cells = [f"{of['median']:.2f}" for of in one["processor_s"].values()]
                cells += [_ratio(one[f"over_{what}"]) for what in ("once", "every")]
            yield f"| {' | '.join((name, *cells, command))} |"
    for name, one in kept["planted"].items():
        shown = (float(one["psnr_min"]), one["cosine_min"], one.get("verdict", ""))
        yield "| {} | {:.1f} | {:.6f} | {} |".format(name, *shown)
    for path in sorted(RESULTS.glob(f"bench-*{SUFFIX}")):
        entry = json.loads(path.read_text())
        end = entry["verdict"]["name"]
        for one in entry["timings"]:
            if one["steps"] == entry["main_steps"]:
                ratio = _ratio(one["speedup"]) if one["is_resolved"] else "not resolved"
                what, n = " over ".join(one["pair"]), one["a"]["wall_s"]["n"]
                yield f"| `{entry['name']}` | {what} | {ratio} | {n} | {end} | |"


def _ratio(up: dict[str, float]) -> str:
    return f"{up['median']:.2f} ({up['low']:.2f} to {up['high']:.2f})"


def main() -> None:
    """Write the plots; print the tables."""
    by_steps = json.loads((RESULTS / f"kv-reuse{SUFFIX}").read_text())["by_steps"]
    # The same figures give the same bytes.
    with mpl.rc_context({"svg.hashsalt": "hyimg"}):
        kind = {"transparent": True, "metadata": {"Date": None}}
        draw_reuse(by_steps).savefig(DOCS / "kv-reuse.svg", **kind)
    print("\n".join(tables()))


if __name__ == "__main__":
    main()
