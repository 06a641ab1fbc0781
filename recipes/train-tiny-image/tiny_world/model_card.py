"""The exported checkpoint's README: the model, its training and its rates."""

import json
from dataclasses import dataclass
from pathlib import Path

from tiny_world.captions import PLACE_PHRASES
from tiny_world.scenes import COLOURS, PICTURE_PX, SHAPES, SIZES
from tiny_world.stages import WholeRun

_KINDS = {
    "new": "new picture, think + recaption",
    "new-recaption": "new picture, recaption",
    "new-direct": "new picture, no text",
    "edit": "edit, think + recaption",
    "edit-recaption": "edit, recaption",
    "edit-direct": "edit, no text",
    "loose": "new picture, loose wording, think + recaption",
    "loose-edit": "edit, loose wording, think + recaption",
    "plain": "`a red circle on a blue background`, think + recaption; scenes not all held out",
}
_COLUMNS = ("n", "right", "text", "shape", "colour", "background", "place", "size")


@dataclass(frozen=True)
class Facts:
    """Facts of a run for its card: settings, seconds and steps by stage, machine, a remark."""

    run: WholeRun
    stages: dict[str, tuple[float, int]]
    hardware: str
    note: str = ""


def model_card(facts: Facts, rates: dict[str, dict[str, float]]) -> str:
    """Return the card as Markdown; without rates if none were measured."""
    parts = [_INTRODUCTION.format(**_world()), _training(facts)]
    return "\n".join([*parts, _table(rates)] if rates else parts)


def seconds_of(folder: Path) -> dict[str, tuple[float, int]]:
    """Return training seconds and steps by stage, from the logs."""
    return {stage: _last(folder / f"{stage}_log.jsonl") for stage in ("vae", "joint")}


def write_rates(rates: dict[str, dict[str, float]], file: Path) -> None:
    file.write_text(json.dumps(rates, indent=1) + "\n", encoding="utf-8")


_INTRODUCTION = """---
license: unknown
---

# tiny-image

The embedded checkpoint of hyimg: HunyuanImage-3.0-Instruct's architecture with small numbers,
trained from nothing on a world of coloured shapes. It exists so that every part of hyimg can be
run, tested and shown on a laptop. It knows nothing else.

Pictures are {side}x{side}: one shape in one colour on a plain background of another.

- shapes: {shapes}
- colours, of shape and background: {colours}
- sizes: {sizes}; places: {places}

Asked for anything else it draws one of these.

Prompts: `a red circle on a blue background`, `small yellow star at the top`, `draw a heart`.
What is left unsaid: large, in the centre, on white; a colour of its own choice.
Edits of one such picture: colour, background, shape, place, size, or two of them:
`make it green`, `turn the circle into a star and move it to the left`.

Layout and key names are the released checkpoint's. The autoencoder works on single frames: the
outer temporal taps of its kernels are zero. All weights are bfloat16, the router float32.
"""

_TRAINING = """## Training

Data: drawn on the fly, never stored; `recipes/train-tiny-image/tiny_world`. Held out, by
`heldout.json`, written before training: 400 scenes, and 256 prompts and 256 edits that lead to
them. The exporter refuses a run that has drawn one of these scenes.

Recipe: `python recipes/train-tiny-image/train.py`; seeds {vae_seed} and {seed}.

{stages}
- hardware: {hardware}

Licence: none yet. The weights, like the code that made them, are this project's own, and it has
chosen no licence for either, so `hyimg export` asks for `--allow-licence unknown`.
"""


def _world() -> dict[str, object]:
    return {
        "side": PICTURE_PX,
        "shapes": ", ".join(SHAPES),
        "sizes": ", ".join(SIZES),
        "places": ", ".join(PLACE_PHRASES.values()),
        "colours": ", ".join(COLOURS),
    }


def _training(facts: Facts) -> str:
    names = {"vae": "autoencoder", "joint": "everything else, text and pictures together"}
    lines = [
        f"- {names[stage]}: {steps} steps in {elapsed_s / 60:.0f} minutes"
        for stage, (elapsed_s, steps) in facts.stages.items()
    ]
    return _TRAINING.format(
        vae_seed=facts.run.vae.seed,
        seed=facts.run.joint.seed,
        stages="\n".join(lines + ([f"- {facts.note}"] if facts.note else [])),
        hardware=facts.hardware or f"{facts.run.workers} CPU workers",
    )


def _table(rates: dict[str, dict[str, float]]) -> str:
    head = [
        "## Rates on held-out jobs",
        "",
        "Through `hyimg generate`, judged from the pixels by `tiny_world/judge.py`.",
        "`right`: all that was asked is in the picture, for an edit the whole scene; `text`: the",
        "recaption states it exactly.",
        "",
    ]
    rows = [f"| | {' | '.join(_COLUMNS)} |", "|---|" + "--:|" * len(_COLUMNS)]
    for kind, name in _KINDS.items():
        if kind in rates:
            rows.append(f"| {name} | {' | '.join(_cell(rates[kind], c) for c in _COLUMNS)} |")
    changes = [f"{kind.partition(':')[2]} {_cell(r, 'right')} (n {r['n']})"
               for kind, r in rates.items() if kind.startswith("edit:")]  # fmt: skip
    return "\n".join([*head, *rows, "", f"Edits by what they change: {', '.join(changes)}.", ""])


def _cell(rates: dict[str, float], column: str) -> str:
    if column not in rates:
        return "–"
    return f"{rates[column]:.0f}" if column == "n" else f"{100 * rates[column]:.1f} %"


def _last(log: Path) -> tuple[float, int]:
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    timed = [line for line in lines if "elapsed_s" in line]
    return (timed[-1]["elapsed_s"], timed[-1]["step"]) if timed else (0.0, 0)
