"""The whole recipe, for a few steps: every stage leaves its file, the product loads the result."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RECIPE = Path(__file__).parents[2] / "recipes" / "train-tiny-image" / "train.py"


@pytest.mark.thorough
def test_the_recipe_makes_a_checkpoint_that_the_product_runs(
    run_cli: Callable[..., Any], tmp_path: Path
) -> None:
    options = {"minutes": 1, "max-steps": 2, "pairs": 32, "workers": 1, "eval-count": 0}
    given = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, str(RECIPE), "--out", str(tmp_path), *given]
    first = subprocess.run(command, capture_output=True, text=True, check=False)
    assert first.returncode == 0, first.stderr
    checkpoint = tmp_path / "checkpoint"
    assert json.loads((checkpoint / "card.json").read_text())["trained"] is True

    manifest = tmp_path / "jobs.jsonl"
    job = {"custom_id": "one", "task": "t2i", "prompt": "a red circle", "bot_task": "none"}
    manifest.write_text(json.dumps(job | {"num_inference_steps": 2}) + "\n", encoding="utf-8")
    made = run_cli("generate", manifest, "-o", "out", "--model", checkpoint)
    assert made.code == 0, made.err
    assert list((tmp_path / "out" / "outputs").glob("*.png"))
