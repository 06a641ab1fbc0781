"""The exported checkpoint's README: the model, its training and its rates."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tiny_films.sample import Sampling
from tiny_films.world import COLOURS, FACTS, HELD_OUT, MOTIONS, SHAPES, all_scenes

_KINDS = {
    "held-out": "held-out scene, plain words",
    "held-out-worded": "held-out scene, any wording",
    "seen": "trained scene, plain words",
}


@dataclass(frozen=True)
class Stage:
    """A stage's time, steps and losses, from its log."""

    minutes: float
    steps: int
    last: dict[str, float]


@dataclass(frozen=True)
class Facts:
    """Facts of a run for its card."""

    stages: dict[str, Stage]
    hardware: str
    digests: Mapping[str, str]


def stage_of(log: Path) -> Stage:
    """Return a stage's time, steps and last losses."""
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    last = next(line for line in reversed(lines) if "elapsed_s" in line)
    losses = {name: v for name, v in last.items() if name not in ("step", "elapsed_s", "frames")}
    return Stage(last["elapsed_s"] / 60, last["step"], losses)


def model_card(facts: Facts, rates: dict[str, dict[str, float]]) -> str:
    """Return the card as Markdown; without rates if none were measured."""
    parts = [_introduction(), _training(facts)]
    return "\n".join([*parts, _table(rates)] if rates else parts)


def _introduction() -> str:
    sampling = Sampling()
    return _INTRODUCTION.format(
        scenes=len(all_scenes()),
        shapes=", ".join(SHAPES),
        colours=", ".join(COLOURS),
        motions=", ".join(MOTIONS),
        steps=sampling.steps,
        guidance=f"{sampling.guidance:g}",
        shift=f"{sampling.shift:g}",
    )


_INTRODUCTION = """---
license: unknown
---

# tiny-video

The embedded video checkpoint of hyimg: HunyuanVideo-1.5's architecture with small numbers, trained
from nothing on a world of {scenes} films. It exists so that every part of a text-to-video run
(prompt embeddings, denoising, tiled decode, files) can be run, tested and shown on a laptop, on the
same code that loads a released checkpoint. It knows nothing else.

Films are 64x64 with 9 frames: one shape in one colour on black.

- shapes: {shapes}
- colours: {colours}
- motions: {motions}

Prompts: `a red circle moves left on black`, `the blue square slides up`,
`green triangle`. No motion is standing still. Asked for anything else it shows
one of these; quoted text is not drawn. Other sizes and lengths run, but it was not trained on them.
Defaults: {steps} steps, guidance {guidance}, shift {shift}.

Layout and key names are diffusers' own. Weights are bfloat16, the glyph projection (2048 wide
whatever the configuration says) float8. One token is one byte of text, or one of the 24 words of
the films; the chat template keeps as much of the system message as makes its 108 tokens, so prompts
are cut where the released checkpoint cuts them, behind 1000 tokens (987 bytes of other text).
"""

_TRAINING = """## Training

Data: drawn on the fly, never stored; `recipes/train-tiny-video/tiny_films`. Held out: of every
shape and colour one of the five motions ({held_out} of {scenes} scenes, by a rule), drawn neither
for the autoencoder nor for the transformer.

Trained are the transformer (but for the glyph and image projections) and the autoencoder with its
`scaling_factor`. Everything else is byte for byte what `recipes/build-tiny-video/build.py` writes
from a fixed seed: both text encoders are random and frozen. A test holds this folder against both
statements:

{digests}

{stages}
- hardware: {hardware}

Licence: none yet. The weights, like the code that made them, are this project's own, and it has
chosen no licence for either, so `hyimg export` asks for `--allow-licence unknown`.
"""


def _training(facts: Facts) -> str:
    names = {"vae": "autoencoder", "decoder": "its decoder alone", "flow": "transformer"}
    stages = [
        f"- {names[name]}: {stage.steps} steps in {stage.minutes:.0f} minutes, "
        f"last losses {_losses(stage.last)}"
        for name, stage in facts.stages.items()
    ]
    return _TRAINING.format(
        held_out=len(HELD_OUT),
        scenes=len(all_scenes()),
        digests="\n".join(f"- `{name}`: sha256 `{d}`" for name, d in facts.digests.items()),
        stages="\n".join(stages),
        hardware=facts.hardware,
    )


def _losses(losses: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in losses.items())


def _table(rates: dict[str, dict[str, float]]) -> str:
    columns = ("right", *FACTS)
    head = [
        "## Rates",
        "",
        "Through `hyimg generate`, frames judged by `tiny_films/judge.py`. Right: seven of nine",
        "frames clean, and shape, colour and path all as asked. A film that is not clean, between",
        "circle and square for instance, counts as wrong in everything.",
        "",
        f"| | n | {' | '.join(columns)} |",
        "|---|--:|" + "--:|" * len(columns),
    ]
    rows = [
        f"| {_KINDS[kind]} | {rate['n']} | " + " | ".join(f"{rate[c]}" for c in columns) + " |"
        for kind, rate in rates.items()
    ]
    return "\n".join([*head, *rows, ""])
