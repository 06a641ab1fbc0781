"""The pages of `docs/`: links work, and commands run unchanged in the page's order."""

import importlib.util
import json
import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from hyimg_cli.cli import commands
from hyimg_cli.spec.events import BranchTokens, Outcome, OutputFile, ReuseReport

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
PAGES = [
    REPOSITORY / "README.md",
    REPOSITORY / "ARCHITECTURE.md",
    REPOSITORY / "benchmarks" / "README.md",
    REPOSITORY / "benchmarks" / "gpu.md",
    REPOSITORY / "benchmarks" / "kv-reuse.md",
    *sorted(DOCS.glob("*.md")),
]
# Loads a model, starts processes, or reads what a model made: only the flags are checked.
REAL = re.compile(
    r"hyimg (bench|doctor|eval|first-night|info|replay|serve|think|check texts|generate texts)"
    "|--replicas"
)
# Their commands need a server, scores or a checkpoint; other tests run them.
ELSEWHERE = {"candidates", "datasets", "editors", "measuring", "serve"}
HUB = re.compile(r"--model [\w-]+/[\w.-]+")


def commands_of(page: Path) -> list[str]:
    blocks = re.findall(r"```console\n(.*?)```", page.read_text(encoding="utf-8"), re.S)
    return [line for block in blocks for line in block.splitlines() if line.startswith("hyimg ")]


OURS = [page for page in sorted(DOCS.glob("*.md")) if page.stem not in ELSEWHERE]
TYPED = [page for page in OURS if commands_of(page)]


def fenced(page: str, language: str) -> str:
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    match = re.search(rf"```{language}\n(.*?)```", text, re.S)
    assert match is not None
    return match[1]


def parse(words: list[str]) -> None:
    """Have the command read its flags and do nothing."""
    command, *rest = words
    reader = commands.LazyCommand(command).load_command()
    if rest and rest[0] in getattr(reader, "commands", {}):
        reader, rest = reader.commands[rest[0]], rest[1:]
    reader.make_context(command, rest)


@pytest.fixture
def workplace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_picture: Callable[..., Path]
) -> Path:
    """A folder with what the pages name: manifests, pictures, recipes; and a hub out of reach."""
    for folder in ("in", "photos/a", "lists", "mine", "masks/a"):
        (tmp_path / folder).mkdir(parents=True)
    for picture in ("in/cat.png", "photos/b.jpg", "photos/a/c.png", "masks/b.png", "masks/a/c.png"):
        write_picture(picture)
    edit, prompt = fenced("manifests", "jsonl").splitlines()
    (tmp_path / "chain.jsonl").write_text(fenced("chains", "jsonl"))
    for name, lines in (("jobs", [edit, prompt]), ("edits", [edit]), ("prompts", [prompt])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    for name in ("quickstart", "photo"):
        shutil.copytree(REPOSITORY / "recipes" / name, tmp_path / "recipes" / name)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


@pytest.mark.usefixtures("fake_session", "workplace")
@pytest.mark.parametrize("page", TYPED, ids=[path.stem for path in TYPED])
def test_the_commands_of_a_page_run_in_its_order(run_cli: Callable[..., Any], page: Path) -> None:
    for command in commands_of(page):
        words = shlex.split(command)[1:]
        if ">" in words:
            words = words[: words.index(">")]
        if REAL.search(command):
            parse(words)
            continue
        ran = run_cli(*words)
        if HUB.search(command):
            assert ran.code == 3, command
            assert "error[checkpoint.missing]" in ran.err
        else:
            assert ran.code == 0, (command, ran.err)


def test_the_recipe_shown_is_the_file() -> None:
    shown = fenced("settings", "toml")
    assert shown == (REPOSITORY / "recipes" / "few-steps.toml").read_text(encoding="utf-8")


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
    page = path.with_name("kv-reuse.md")
    lines = page.read_text(encoding="utf-8").splitlines()
    rows = list(figures.tables())
    assert len(rows) > 40
    assert [row for row in rows if row not in lines] == []


def test_the_index_names_every_page() -> None:
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    for page in DOCS.glob("*.md"):
        assert page.name == "README.md" or f"]({page.name})" in index


@pytest.mark.parametrize("page", OURS, ids=[path.stem for path in OURS])
def test_a_page_is_at_most_120_lines(page: Path) -> None:
    assert len(page.read_text(encoding="utf-8").splitlines()) <= 120
