"""The pages of `docs/`: links lead somewhere, manifests are valid, commands run as they stand."""

import importlib.util
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

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
PAGES = [REPOSITORY / "README.md", REPOSITORY / "ARCHITECTURE.md", *sorted(DOCS.glob("*.md"))]
HUB = "tencent/"
# Their commands take the manifest of the page on what can be given.
ON_JOBS = ("commands", "models", "videos")


def commands_of(page: str) -> list[str]:
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    found = re.findall(r"```console\n(.*?)```", text, re.S)
    return [line for block in found for line in block.splitlines()]


COMMANDS = [line for page in ON_JOBS for line in commands_of(page)]
COMMANDS += [line for line in commands_of("output") if line.startswith("hyimg generate")]


def fenced(page: str, language: str) -> str:
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    match = re.search(rf"```{language}\n(.*?)```", text, re.S)
    assert match is not None
    return match[1]


@pytest.fixture
def jobs(tmp_path: Path, write_picture: Callable[..., Path]) -> Path:
    """A folder with the manifest of the docs and the picture it names."""
    (tmp_path / "in").mkdir()
    write_picture("in/cat.png")
    (tmp_path / "jobs.jsonl").write_text(fenced("input", "jsonl"))
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
    line = json.loads(fenced("results", "json"))
    assert line.keys() <= {field.name for field in fields(Outcome)}
    assert line["outputs"][0].keys() == {field.name for field in fields(OutputFile)}
    assert line["kv_reuse"].keys() == {field.name for field in fields(ReuseReport)}
    assert line["kv_reuse"]["branches"][0].keys() == {field.name for field in fields(BranchTokens)}


def heading_anchors(text: str) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    heads = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=[path.name for path in PAGES])
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text(encoding="utf-8")):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        if anchor:
            assert anchor in heading_anchors(target.read_text(encoding="utf-8")), link


def test_the_tables_of_kv_reuse_are_those_of_the_kept_results() -> None:
    """`make figures` prints them; a result that is measured anew is written anew."""
    path = REPOSITORY / "benchmarks" / "figures.py"
    if not path.exists():
        pytest.skip("a source distribution has no benchmarks")
    spec = importlib.util.spec_from_file_location("figures", path)
    assert spec is not None
    assert spec.loader is not None
    figures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(figures)
    lines = (DOCS / "kv-reuse.md").read_text(encoding="utf-8").splitlines()
    rows = list(figures.tables())
    assert len(rows) > 40
    assert [row for row in rows if row not in lines] == []


def test_the_index_names_every_page() -> None:
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    for page in DOCS.glob("*.md"):
        assert page.name == "README.md" or f"]({page.name})" in index
