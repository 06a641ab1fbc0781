"""`check` and `plan` refuse what `generate` refuses before its first job, in the same words."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from cli.faulty_runs import CASES, LOADED
from conftest import thorough_but

# One of each kind.
QUICK = [
    name
    for name in CASES
    if name.startswith(("folder-", "film-", "manifest-", "mask-nowhere", "source-cut"))
    or name in ("line-images-0", "line-prompt-0", "line-json-0", "line-model-2", "recipe-0")
    or any(flag in name for flag in ("score", "draft", "tp-size", "cpu-offload", "select"))
]
_ERROR = re.compile(r"error\[(?P<code>[^]]+)\]: (?P<what>.*)\n(?P<rest>(?:  .*\n)*)")
# How many faults a manifest has; each is printed by itself.
_SUM = "manifest"


def errors_in(text: str) -> set[tuple[str, str, str]]:
    """Code, words, and place with hint of every error that was printed."""
    text = re.sub(r"hyimg (check|plan|generate) --", "hyimg COMMAND --", text)
    found = {(one["code"], one["what"], one["rest"]) for one in _ERROR.finditer(text)}
    return {one for one in found if one[0] != _SUM}


def compare(run_cli: Any, arguments: list[str]) -> str:
    """Run the three commands on one input; return what `generate` did."""
    checked, planned = (run_cli(name, *arguments) for name in ("check", "plan"))
    assert "internal" not in checked.err + planned.err, checked.err + planned.err
    made = run_cli("generate", *arguments, "--progress", "none")
    refused = "; results in" not in made.err
    assert made.code != 101, made.err
    if not refused:
        assert (planned.code, checked.code) == (0, 1 if made.code else 0), (made, planned, checked)
        return "ran"
    assert (checked.code, planned.code) == (made.code, made.code), (made, checked, planned)
    assert errors_in(planned.err) == errors_in(made.err), planned.err
    assert errors_in(made.err) <= errors_in(checked.err), (made.err, checked.err)
    return "refused"


@pytest.mark.parametrize("name", thorough_but(QUICK, CASES))
def test_three_commands_agree(
    run_cli: Any, tmp_path: Path, fake_session: object, name: str
) -> None:
    compare(run_cli, CASES[name](tmp_path))


@pytest.mark.parametrize("name", thorough_but(["memory-0.04"], LOADED))
def test_what_loading_refuses_is_refused_before(run_cli: Any, tmp_path: Path, name: str) -> None:
    assert compare(run_cli, LOADED[name](tmp_path)) == "refused"


def test_the_cases_are_many_and_of_both_kinds(run_cli: Any, tmp_path: Path) -> None:
    assert len(CASES) + len(LOADED) > 200
    line = json.dumps({"prompt": "x"})
    (tmp_path / "one.jsonl").write_text(f"{line}\n")
    assert errors_in(run_cli("check", "one.jsonl").err) == set()
