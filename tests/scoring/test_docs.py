"""The pages on candidates and scorers: their commands, typed from top to bottom."""

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
PAGES = [REPOSITORY / "docs" / name for name in ("candidates.md", "scorers.md")]
JOB = {"num_inference_steps": 11, "max_new_tokens": 24}


@pytest.mark.thorough
def test_the_pages_on_candidates_run_as_they_stand(
    run_cli: Any, endpoint: Any, tmp_path: Path
) -> None:
    page = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    (code,) = re.findall(r"```python\n(.*?)```", page, re.S)
    (tmp_path / "scorers.py").write_text(code)
    shutil.copy(REPOSITORY / "recipes/quickstart/red-circle.png", tmp_path / "circle.png")
    edit = {"custom_id": "cat", "prompt": "make the circle blue", "images": ["circle.png"], **JOB}
    lines = [edit, {"custom_id": "dog", "prompt": "a red square", **JOB}]
    (tmp_path / "jobs.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (tmp_path / "choices.jsonl").write_text('{"candidate_of": "dog", "picked": ["dog-1"]}\n')
    # Recipes need packages that are not installed here: test_recipes.py runs them.
    typed = [one for one in re.findall(r"^    hyimg (.*)$", page, re.M) if "recipes/" not in one]
    assert len(typed) == 13
    codes = {}
    for command in typed:
        ran = run_cli(*shlex.split(command.replace("http://localhost:8000/v1", endpoint.url)))
        codes[command] = ran.code
        assert ran.code in (0, 1), ran.err
    # A person found nothing good; and a picture whose edit is all of it has nothing outside.
    assert {"pick"} >= {command.split()[0] for command, code in codes.items() if code}, codes
    assert (tmp_path / "runs/bench-drafts/drafts.json").is_file()
