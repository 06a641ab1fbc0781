"""The quickstart is valid, shows what it should, and its pictures are what the script draws."""

import runpy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

RECIPES = Path(__file__).parent.parent / "recipes"
DRAWING = runpy.run_path(str(RECIPES / "draw_quickstart.py"))


def test_the_pictures_are_what_the_script_draws() -> None:
    scenes = DRAWING["SCENES"]
    assert sorted(scenes) == sorted(path.name for path in (RECIPES / "quickstart").iterdir())
    for name, scene in scenes.items():
        kept = np.asarray(Image.open(RECIPES / "quickstart" / name).convert("RGB"), dtype=int)
        drawn = np.asarray(DRAWING["draw"](scene), dtype=int)
        # Another Pillow may round an edge differently.
        assert kept.shape == drawn.shape
        assert np.abs(kept - drawn).max() <= 8


def test_it_shows_both_tasks_and_several_edits_of_one_picture(
    read_lines: Callable[[Path], list[dict[str, Any]]],
) -> None:
    lines = read_lines(RECIPES / "quickstart.jsonl")
    assert Counter(line["task"] for line in lines) == {"t2i": 4, "it2i": 5}
    sources = Counter(image for line in lines for image in line.get("images", ()))
    assert sorted(sources.values()) == [1, 4]
    assert not any("num_inference_steps" in line for line in lines)


def test_it_has_no_fault(run_cli: Callable[..., Any]) -> None:
    ran = run_cli("check", RECIPES / "quickstart.jsonl")
    assert ran.code == 0, ran.err
