"""Measure whether accepted edits are right more often than all, with the tiny world's judge.

    python benchmarks/accepted_edits.py write edits
    hyimg generate edits/jobs.jsonl --n 4 --score text --min text=0.5 --pick 1 -o edits/out
    python benchmarks/accepted_edits.py judge edits

`write` makes loosely worded edits that lead to held-out scenes and are not in `heldout.json`;
`judge` prints the share of right pictures among all, among those that were picked, and among the
candidates of the same lines, with 95 % intervals of a bootstrap over lines.
"""

import argparse
import json
import random
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes" / "train-tiny-image"))

from tiny_world.captions import Edit, random_edit
from tiny_world.draw import no_jitter, render
from tiny_world.free_words import free_edit
from tiny_world.heldout import held_out
from tiny_world.judge import judge
from tiny_world.scenes import random_scene

from hyimg_cli.measure.bench.drafts import resampled_sums

_TAILS = (2.5, 97.5)


def edits(seed: int, count: int) -> list[Edit]:
    """Return edits of other pairs of scenes than the held-out ones."""
    rng, kept, found = random.Random(seed), held_out(), list[Edit]()
    seen = {(one.source, one.target) for one in kept.edits}
    while len(found) < count:
        one = random_edit(rng, random_scene(rng), kinds=1)
        if one.target in kept.scenes and (one.source, one.target) not in seen:
            seen.add((one.source, one.target))
            found.append(free_edit(rng, one))
    return found


def write(folder: Path, asked: list[Edit], seed: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number, one in enumerate(asked):
        name = f"e{number:03}"
        pixels = render([one.source], no_jitter(1))[0].permute(1, 2, 0).numpy()
        Image.fromarray(pixels).save(folder / f"{name}.png")
        line = {"custom_id": name, "task": "it2i", "prompt": one.text, "images": [f"{name}.png"]}
        lines.append(
            line | {"bot_task": "think_recaption", "seed": 500_000 + seed * 1000 + number * 7}
        )
    (folder / "jobs.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def measure(out: Path, asked: list[Edit]) -> dict[str, tuple[float, float, float]]:
    """Return, by name, a share or a difference of shares, and its interval."""
    right: dict[str, dict[str, bool]] = {}
    for line in map(json.loads, (out / "results.jsonl").read_text().splitlines()):
        wanted, facts = asked[int(line["candidate_of"][1:])].demand
        picture = np.array(Image.open(out / line["outputs"][0]["path"]).convert("RGB"))
        wrong = judge(torch.from_numpy(picture).permute(2, 0, 1)).wrong(wanted, facts)
        right.setdefault(line["candidate_of"], {})[line["custom_id"]] = not wrong
    rows = []
    for line in map(json.loads, (out / "picks.jsonl").read_text().splitlines()):
        own, picked = right[line["candidate_of"]], line["picked"]
        mean = sum(own.values()) / len(own)
        rows.append([len(picked), sum(own[one] for one in picked), len(picked) * mean, 1, mean])
    accepted, hits, same, lines, every = resampled_sums(rows)
    shares = {
        "all": every / lines,
        f"accepted ({accepted[0]:.0f})": hits / accepted,
        "accepted less all": hits / accepted - every / lines,
        "accepted less the candidates of the same lines": (hits - same) / accepted,
    }
    found = {name: (one[0], *np.percentile(one[1:], _TAILS)) for name, one in shares.items()}
    return {name: tuple(round(float(x), 4) for x in some) for name, some in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("write", "judge"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=2611)
    parser.add_argument("--count", type=int, default=200)
    given = parser.parse_args()
    asked = edits(given.seed, given.count)
    if given.what == "write":
        write(given.folder, asked, given.seed)
    else:
        for name, found in measure(given.folder / "out", asked).items():
            print(name, *found)


if __name__ == "__main__":
    main()
