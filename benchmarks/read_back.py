"""Measure what the embedded model says of its own held-out edits when it is asked about them.

    python benchmarks/read_back.py edits

Draws 200 loosely worded edits that `recipes/train-tiny-image` holds out, and asks about each. The
truth is the tiny world's judge on the whole scene that was wanted. Two questions are asked:

    read back   `i2t` with `bot_task` `think`, in the only sentences that the model was taught: is
                the scene in its thought the wanted one? That one comes from the user
    yes or no   `--score ask`'s question as `choices`: its value needs a `mass` of at least 0.05
"""

import argparse
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes" / "train-tiny-image"))

from tiny_world.captions import recaption, scene_of
from tiny_world.evaluate import Answer, answers, questions

from hyimg_cli.pipelines.image.choices import LEAST_MASS

MODEL, NEUTRAL = "tiny-image", "make the background white"
_SHOWN = re.compile(r"The picture shows (.*? background\.)")
_RESAMPLES, _TAILS = 4000, (2.5, 97.5)


def ask(drawn: list[Answer], folder: Path) -> dict[str, dict[str, Any]]:
    """Ask both questions about every result; the result lines by custom_id."""
    lines = []
    for one in drawn:
        name = one.question.custom_id
        about = {"task": "i2t", "model": MODEL}
        about["images"] = [str((folder / f"part-0/out/outputs/{name}.png").resolve())]
        told = recaption(one.question.wanted)
        shows = f'Does this picture show "{told}"? Please answer yes or no.'
        lines += [
            {"custom_id": f"{name}-thought", "prompt": NEUTRAL, "bot_task": "think"}
            | {"max_new_tokens": 64}
            | about,
            {"custom_id": f"{name}-yes", "prompt": shows, "choices": ["yes", "no"]} | about,
        ]
    manifest = folder / "questions.jsonl"
    manifest.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    command = [sys.executable, "-m", "hyimg_cli", "generate", str(manifest), "--progress", "none"]
    subprocess.run([*command, "-q", "-o", str(folder / "asked")], check=True)
    results = (folder / "asked/results.jsonl").read_text().splitlines()
    return {line["custom_id"]: line for line in map(json.loads, results)}


def auc(scores: np.ndarray, right: np.ndarray) -> float:
    """Return how often a right one of [N] has the higher score than a wrong one; a tie is half."""
    good, bad = scores[right][:, None], scores[~right][None]
    return float(((good > bad) + (good == bad) / 2).mean())


def interval(scores: np.ndarray, right: np.ndarray) -> tuple[float, ...]:
    """Return the AUC with the interval of a bootstrap over lines."""
    draws = np.random.default_rng(0).integers(len(right), size=(_RESAMPLES, len(right)))
    found = [auc(scores[one], right[one]) for one in draws if 0 < right[one].sum() < len(right)]
    return (round(auc(scores, right), 3), *np.percentile(found, _TAILS).round(3).tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=200)
    given = parser.parse_args()
    asked = [one for one in questions(given.count) if one.kind == "loose-edit"]
    drawn = answers(Path(MODEL), asked, given.folder)
    told = ask(drawn, given.folder)
    right = np.array([not one.wrong for one in drawn])
    thoughts = [told[f"{one.question.custom_id}-thought"]["thought"] or "" for one in drawn]
    seen = [
        scene_of(f[1][0].upper() + f[1][1:]) if (f := _SHOWN.search(t)) else None for t in thoughts
    ]
    equal = np.array([s == one.question.wanted for s, one in zip(seen, drawn, strict=True)])
    own = np.array([s == one.told for s, one in zip(seen, drawn, strict=True)])
    masses = [told[f"{one.question.custom_id}-yes"]["mass"] for one in drawn]
    print(f"{len(right)} edits, {right.sum()} right")
    print("scenes that were read", sum(one is not None for one in seen))
    print("read back = wanted: AUC", interval(equal.astype(float), right))
    print("  by (right, equal)", Counter(zip(right.tolist(), equal.tolist(), strict=True)))
    print("read back = the model's own recaption: AUC", interval(own.astype(float), right))
    print(f"yes or no: mass below {LEAST_MASS}", sum(one < LEAST_MASS for one in masses))
    print("  the highest mass", max(masses))


if __name__ == "__main__":
    main()
