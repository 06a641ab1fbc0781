"""The README's manifest is valid and its commands run as they stand there."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from hyimg_cli.spec.events import BranchTokens, Outcome, OutputFile, ReuseReport

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
HUB = "tencent/"
COMMANDS = [
    line
    for block in re.findall(r"```console\n(.*?)```", README, re.S)
    for line in block.splitlines()
]


def fenced(language: str) -> str:
    match = re.search(rf"```{language}\n(.*?)```", README, re.S)
    assert match is not None
    return match[1]


@pytest.fixture
def jobs(tmp_path: Path, write_picture: Callable[..., Path]) -> Path:
    """A folder with the README's manifest and the picture it names."""
    (tmp_path / "in").mkdir()
    write_picture("in/cat.png")
    (tmp_path / "jobs.jsonl").write_text(fenced("jsonl"))
    return tmp_path


@pytest.mark.usefixtures("fake_session", "jobs")
@pytest.mark.parametrize("command", [line for line in COMMANDS if HUB not in line])
def test_a_command_runs(run_cli: Callable[..., Any], command: str) -> None:
    ran = run_cli(*shlex.split(command)[1:])
    assert ran.code == 0, ran.err


@pytest.mark.parametrize("command", [line for line in COMMANDS if HUB in line])
def test_a_command_for_the_hub_lacks_only_the_checkpoint(jobs: Path, command: str) -> None:
    # In a process of its own: the hub client reads these variables once, when it is imported.
    environ = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(jobs / "hub")}
    words = [sys.executable, "-m", "hyimg_cli", *shlex.split(command)[1:]]
    done = subprocess.run(words, cwd=jobs, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    assert "error[checkpoint.missing]" in done.stderr


def test_the_result_line_has_the_fields_of_an_outcome() -> None:
    line = json.loads(fenced("json"))
    assert line.keys() <= {field.name for field in fields(Outcome)}
    assert line["outputs"][0].keys() == {field.name for field in fields(OutputFile)}
    assert line["kv_reuse"].keys() == {field.name for field in fields(ReuseReport)}
    assert line["kv_reuse"]["branches"][0].keys() == {field.name for field in fields(BranchTokens)}
