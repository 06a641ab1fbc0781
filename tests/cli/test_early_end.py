"""A text in which the model begins a picture: the message, and replaying the result."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

Run = Callable[..., Any]
FLAGS = ("--device", "cpu", "--batching-max-size", "1", "--no-prewarm", "--no-report", "--json")
# Hot enough for one token in twenty to open a picture.
HOT = {"prompt": "a red circle", "num_inference_steps": 2, "seed": 7, "max_new_tokens": 80}
HOT |= {"temperature": 9, "top_k": 0, "top_p": 1}
JOBS = [
    HOT | {"custom_id": f"{bot_task}-{number}", "bot_task": bot_task, "size": size, "ar_seed": seed}
    for bot_task in ("recaption", "think_recaption")
    for number, (size, seed) in enumerate([("auto", 1), ("64x64", 1), ("auto", 2)])
]
EARLY = re.compile(r"the text ended early at <(answer|boi|img_size_\d+|img_ratio_\d+)>, before .*")


def _pixels(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.array(image).astype(int)


def test_a_text_ends_where_a_picture_begins(run_cli: Run, write_manifest: Any) -> None:
    """The line and standard error say so; the text, given, and a replay make the same picture."""
    ran = run_cli("generate", write_manifest(*JOBS), "-o", "out", *FLAGS)
    assert ran.code == 0, ran.err
    lines = {line["custom_id"]: line for line in ran.json_lines[:-1]}
    early = {name: line for name, line in lines.items() if EARLY.match(" ".join(line["warnings"]))}
    assert len(early) >= 4
    given = []
    for name, line in early.items():
        assert re.search(rf"{name}: .*; {EARLY.pattern}", ran.err)
        assert line["think_truncated"]
        assert line["cot_text"].endswith(("</think>", "</recaption>"))
        assert not re.search("<(answer|boi|img_)", line["cot_text"])
        assert line["kv_reuse"]["status"] == "hit"
        told = {"cot_token_ids": line["cot_token_ids"], "num_inference_steps": 2, "seed": 7}
        given.append({"custom_id": name, "prompt": "a red circle", "size": "64x64"} | told)
    again = run_cli("generate", write_manifest(*given, name="given.jsonl"), "-o", "again", *FLAGS)
    assert again.code == 0, again.err
    for line in again.json_lines[:-1]:
        name = line["custom_id"]
        assert line["cot_token_ids"] == early[name]["cot_token_ids"]
        paths = (Path(folder, "outputs", f"{name}.png") for folder in ("out", "again"))
        one, other = map(_pixels, paths)
        assert np.abs(one - other).max() <= 1
    name = next(iter(early))
    replayed = run_cli("replay", Path("out", "outputs", f"{name}.png"), "--expect-equal", "--json")
    assert replayed.code == 0, replayed.err
    assert json.dumps(replayed.json_lines[0]["warnings"]) == json.dumps(early[name]["warnings"])
