"""The table of all traces, a row each: `benchmarks/results/fake-gpu.json`.

cd tests; python -m fake_gpu.table films Wan2.1-T2V-14B --offload group    traces it again
    ...table pictures HunyuanImage-3.0-Instruct --offload experts --card-gb 32    on a smaller card
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fake_gpu.trace import Trace

PATH = Path(__file__).parents[2] / "benchmarks" / "results" / "fake-gpu.json"
# Memory of the card of most rows.
H200_GB = 141
_LIBRARIES = ("torch", "diffusers", "transformers")
# The plan's moment of each stage that it counts; others never take most.
_MOMENTS = {"encode prompts": "text", "decode": "decode"}
# Bytes that a step may send besides weights: BAGEL's positions, in a queue.
_MOST_SENT = 1_000_000
# Their steps run a second forward, for the negative prompt; blocks come once for each.
_GUIDED = ("HunyuanVideo", "Qwen/Qwen-Image", "Wan", "meituan-longcat/LongCat-Image")
_GUIDED += ("black-forest-labs/flux-3-image-klein-base",)
# The first step of a job sends what is constant in it, and names and makes its prefixes.
_FIRST = "step 1"


def rows() -> list[dict[str, Any]]:
    """Return every row as it is in the file."""
    found: list[dict[str, Any]] = json.loads(PATH.read_text())["rows"]
    return found


def uncompiled() -> dict[str, str]:
    """Return by family why its blocks are not compiled."""
    found: dict[str, str] = json.loads(PATH.read_text())["uncompiled"]
    return found


def ungrouped() -> dict[str, str]:
    """Return by family why its blocks cannot wait in main memory one by one."""
    found: dict[str, str] = json.loads(PATH.read_text())["ungrouped"]
    return found


def put(family: str, name: str, offload: str, card_gb: int, found: "Trace") -> None:
    """Write a row in place of the one for the same run."""
    row = {
        "family": family,
        "name": name,
        "offload": offload,
        "card_gb": card_gb,
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {one: version(one) for one in _LIBRARIES},
        **asdict(found),
    }
    row["launches_a_layer"] = launches_a_layer(row)
    table, same = json.loads(PATH.read_text()), (family, name, offload)
    kept = [
        one for one in table["rows"] if (one["family"], one["name"], one["offload"]) != same
    ] + [row]
    kept.sort(key=lambda one: (one["family"], one["name"], one["offload"]))
    PATH.write_text(json.dumps(table | {"rows": kept}, indent=1) + "\n")


def last_steps(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the last denoise step of each kind of job; the only kind of most models is ""."""
    return {
        name.rpartition("step")[0].strip(): stage
        for name, stage in row["stages"].items()
        if "step" in name
    }


def launches_a_layer(row: Mapping[str, Any]) -> dict[str, int]:
    """Kernels that a step starts, by its layers; those before and after them are among them."""
    return {
        kind: round(stage["launches"] / row["blocks"]) for kind, stage in last_steps(row).items()
    }


def peaks(row: Mapping[str, Any]) -> dict[str, int]:
    """Bytes at the peak by the plan's moment, or by its kind of job; "" is what it leaves out."""
    found = dict.fromkeys((*row["planned"], ""), 0)
    for name, stage in row["stages"].items():
        kind = name.split()[0]
        moment = "denoise" if kind == "step" else _MOMENTS.get(name, "")
        moment = kind if kind in row["planned"] else moment
        found[moment] = max(found[moment], stage["peak"])
    return found


def problems(row: Mapping[str, Any], planned: Mapping[str, int]) -> list[str]:
    """What of a trace is not as it must be; `planned`: of this code."""
    found, offload = list[str](), row["offload"]
    for name, stage in row["stages"].items():
        if "step" in name and not name.endswith(_FIRST):
            none = ("reads", "waits", "masks", "fetched")
            found += [f"{name}: {what} {stage[what]}" for what in none if stage[what]]
            if offload != "experts":
                forwards = (1 + row["name"].startswith(_GUIDED)) * (offload == "group")
                brought = forwards * row["block_bytes"]
                if not brought <= stage["sent"] <= 1.001 * brought + _MOST_SENT:
                    found.append(f"{name} brings {stage['sent']} bytes, not {brought}")
            if any("math" in one for one in stage["attention"]):
                found.append(f"{name} attends by no fused kernel")
        if stage["strays"]:
            found.append(f"{name} uses another stream's memory")
    taken = peaks(row)
    for moment, plan in planned.items():
        if not 0.85 <= taken[moment] / plan <= 1:
            found.append(f"{moment}: {taken[moment] / plan:.4f} of the plan")
    if taken[""] > max(planned.values()):
        found.append("a stage that the plan leaves out takes most")
    if row["launches_a_layer"] != launches_a_layer(row):
        found.append(f"{row['launches_a_layer']} launches a layer")
    return found


def lines() -> Iterator[str]:
    """Yield the table's lines of Markdown."""
    yield "| model | offload | launches a layer | peak / plan | GB moved a step |"
    yield "|---|---|--:|---|--:|"
    for row in rows():
        taken, launches = peaks(row), row["launches_a_layer"]
        parts = [f"{name} {taken[name] / plan:.3f}" for name, plan in row["planned"].items()]
        sent = {kind: f"{step['sent'] / 1e9:.1f}" for kind, step in last_steps(row).items()}
        moved = {*sent.values()} if len({*sent.values()}) == 1 else [*sent.values()]
        cells = (
            row["name"].rpartition("/")[2],
            row["offload"] + ("" if row["card_gb"] == H200_GB else f", {row['card_gb']} GB"),
            ", ".join(f"{kind} {count}".strip() for kind, count in launches.items()),
            ", ".join(parts),
            ", ".join(moved).replace("0.0", "0"),
        )
        yield f"| {' | '.join(cells)} |"


def arguments(description: str | None) -> argparse.Namespace:
    """The family, the name and the offload on the command line of a trace."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("family")
    parser.add_argument("name")
    parser.add_argument("--offload", default="none", choices=("none", "model", "group", "experts"))
    parser.add_argument("--card-gb", type=int, default=H200_GB)
    return parser.parse_args()


def main() -> None:
    from fake_gpu.trace import traced  # the rows can be read without the libraries

    given = arguments(__doc__)
    run = given.family, given.name, given.offload, given.card_gb
    put(*run, traced(*run))


if __name__ == "__main__":
    main()
