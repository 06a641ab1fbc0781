"""Scorers are known by their source before they run; nothing else may name one."""

import sys
from pathlib import Path
from typing import Any

import pytest

from hyimg_cli.errors import UsageError
from hyimg_cli.manifest.fields import BY_NAME
from hyimg_cli.scoring.scorers import Scorer, scorers_of
from hyimg_cli.serve.wire import ALLOWED
from hyimg_cli.settings.run import CandidatesConfig
from hyimg_cli.settings.table import TABLES


def one(spec: str, **more: Any) -> Scorer:
    return scorers_of(CandidatesConfig(score=(spec,), **more))[0]


def test_a_module_is_found_without_running_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('it ran')")
    source = "raise SystemExit('it ran')\nSCORERS = {'clip': {'version': '1', 'range': [0, 1]}}"
    (package / "scorers.py").write_text(source)
    found = one("package.scorers:clip")
    assert (found.name, found.module, found.function) == ("clip", "package.scorers", "clip")
    assert found.declared["range"] == [0, 1]
    assert found.python == sys.executable
    same = one(f"mine={package}/scorers.py:clip")
    assert same.name == "mine"
    # What decides its scores is in its identity: its source, too.
    (package / "scorers.py").write_text(source + "\n# other weights")
    assert one("package.scorers:clip").identity != found.identity


def test_an_entry_point_names_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = tmp_path / "venv" / "lib" / "python3.11" / "site-packages"
    about = packages / "clip-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Name: clip\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[hyimg.scorers]\nclip = clip_scorer:score\n")
    (packages / "clip_scorer.py").write_text("SCORERS = {'score': {'needs': ['prompt']}}")
    python = tmp_path / "venv" / "bin" / "python"
    found = one("clip", score_python=(f"clip={python}",))
    assert (found.name, found.module, found.function) == ("clip", "clip_scorer", "score")
    assert found.python == str(python)
    with pytest.raises(UsageError, match="is not a scorer"):
        one("clip")


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("", "declares no scorer"),
        ("SCORERS = {'x': {}}", "declares no scorer"),
        ("SCORERS = make()", "cannot be read"),
        ("SCORERS = {'clip': {'range': [1, 0]}}", "range is"),
        ("SCORERS = {'clip': {'needs': ['password']}}", "needs is"),
        ("SCORERS = {'clip': {'rang': [0, 1]}}", "rang is not known"),
        ("SCORERS = ", "cannot be read"),
        ("SCORERS = {'clip': {'options': {'a b': 1}}}", "cannot name an option"),
        ("SCORERS = {'clip': {'options': {'a': [1]}}}", "option a is"),
    ],
)
def test_a_faulty_declaration_is_told(tmp_path: Path, source: str, what: str) -> None:
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(UsageError, match=what):
        one(f"{tmp_path}/mine.py:clip")


@pytest.mark.parametrize(
    "config",
    [
        {"score": ("outsde",)},
        {"score": ("no.such:thing",)},
        {"score": ("outside", "outside")},
        {"score": ("a b=outside",)},
        {"score": ("outside",), "score_python": ("clip=python",)},
        {"score": ("judge",)},
    ],
)
def test_what_names_no_scorer(config: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        scorers_of(CandidatesConfig(**config))


def test_no_line_and_no_request_names_code_an_interpreter_or_an_address() -> None:
    settings = set(TABLES["candidates"])
    assert settings >= {"score", "score_python", "score_option", "judge_url", "rubric"}
    assert not settings & BY_NAME.keys()
    assert not settings & ALLOWED
    # Nor does one say that it is somebody's candidate.
    assert not {"candidate_of", "candidate", "draft_of"} & ALLOWED


def test_only_scorers_whose_scores_can_differ_are_repeated(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("SCORERS = {'clip': {}}")
    is_computed = {spec: one(spec).is_computed for spec in ("confidence", "outside", "text")}
    assert all(is_computed.values()), is_computed
    assert not one(f"{tmp_path}/mine.py:clip").is_computed
    assert not one("judge:m", judge_url="http://a/v1").is_computed


def test_options_are_typed_and_part_of_the_identity(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    declared = "{'model': 'a', 'size': 224, 'is_fast': False, 'path': None}"
    file.write_text(f"SCORERS = {{'clip': {{'options': {declared}}}, 'plain': {{}}}}")

    def clip(*options: str) -> Scorer:
        return one(f"{file}:clip", score_option=options)

    default = {"model": "a", "size": 224, "is_fast": False, "path": None}
    assert clip().options == default
    given = clip("clip.model=12", "clip.size=336", "clip.is_fast=true", "clip.path=a,b")
    assert given.options == {"model": "12", "size": 336, "is_fast": True, "path": "a,b"}
    assert given.declared["options"] == given.options
    # Another option is other scores; the default said aloud is the default.
    assert given.identity != clip().identity == clip("clip.size=224").identity
    assert "options" not in one(f"{file}:plain").declared
    for option, said in {
        "clip.sise=1": "did you mean size",
        "clip.colour=red": "options of clip: model, size, is_fast, path",
        "plain.size=1": "declare it",
    }.items():
        with pytest.raises(UsageError) as refused:
            one(f"{file}:{option.partition('.')[0]}", score_option=(option,))
        assert said in refused.value.hint
    for option in ("clip.size=big", "clip.size=true", "clip.is_fast=1"):
        with pytest.raises(UsageError, match=r"not a number|not true or false"):
            clip(option)
    # A file counts by its text.
    (tmp_path / "template.txt").write_text("Look.")
    of_file = clip(f"clip.model=@{tmp_path}/template.txt")
    assert of_file.options["model"] == "Look."
    assert of_file.declared["options"]["model"].startswith("sha256:")
    (tmp_path / "template.txt").write_text("Look again.")
    assert clip(f"clip.model=@{tmp_path}/template.txt").identity != of_file.identity
    with pytest.raises(UsageError, match=r"the file of clip\.model cannot be read"):
        clip("clip.model=@/no/such/file")
    with pytest.raises(UsageError, match="given twice"):
        clip("clip.size=1", "clip.size=2")
