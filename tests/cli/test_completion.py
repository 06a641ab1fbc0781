"""What shells complete: by their protocol, and in each shell that this machine has."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hyimg_cli.measure.bench.scenario import names
from hyimg_cli.settings.table import SETTINGS

PACKAGED = ["quickstart", "quickstart-video"]
# What each shell's own script sets for a line that ends where it is completed.
PROTOCOLS = {
    "bash": lambda line: {
        "COMP_WORDS": "\n".join(line.split(" ")),
        "COMP_CWORD": str(len(line.split(" ")) - 1),
    },
    "zsh": lambda line: {"_TYPER_COMPLETE_ARGS": line},
    "fish": lambda line: {
        "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    },
}
# Each prints what its shell would offer for $LINE, by the script that the command prints for it.
IN_THE_SHELL = {
    "bash": """
        source <(_HYIMG_COMPLETE=source_bash hyimg)
        COMP_WORDS=(${LINE% *} "${LINE##* }"); COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
        _hyimg_completion hyimg
        printf '%s\\n' "${COMPREPLY[@]}"
    """,
    "zsh": """
        compdef() { : }
        _arguments() { print -r -- "$@" }
        _files() { : }
        eval "$(_HYIMG_COMPLETE=source_zsh hyimg)"
        words=("${(@s: :)LINE}"); CURRENT=$#words
        _hyimg_completion
    """,
    "fish": "_HYIMG_COMPLETE=source_fish hyimg | source; complete -C $LINE",
}


@pytest.fixture
def complete(
    run_cli: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., list[str]]:
    """The words that the command gives a shell for a line."""

    def complete(line: str, shell: str = "bash") -> list[str]:
        monkeypatch.setenv("_HYIMG_COMPLETE", f"complete_{shell}")
        for name, value in PROTOCOLS[shell](line).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as ended:
            run_cli()
        assert not ended.value.code
        told = capsys.readouterr().out
        if shell == "zsh":
            told = told.partition("((")[2].rpartition("))")[0].replace('"', "")
        return [word.partition("\t")[0].partition(":")[0] for word in told.splitlines() if word]

    return complete


@pytest.mark.parametrize("shell", PROTOCOLS)
def test_every_shell_is_told_flags_and_their_values(
    complete: Callable[..., list[str]], shell: str
) -> None:
    assert complete("hyimg generate --num", shell) == ["--num-inference-steps", "--num-frames"]
    assert complete("hyimg generate --bot-task th", shell) == ["think", "think_recaption"]
    for flag in ("--follow", "--time-limit", "--job-timeout", "--halt", "--no-auto-fit"):
        assert flag in complete(f"hyimg generate {flag[:5]}", shell)
    assert complete("hyimg generate x --select status=f", shell) == ["status=failed"]
    assert complete("hyimg explain job.ti", shell) == ["job.timeout"]


@pytest.mark.parametrize("command", ["generate", "check", "plan"])
def test_what_a_setting_may_be_is_completed(
    complete: Callable[..., list[str]], command: str
) -> None:
    rows = [row for row in SETTINGS.values() if row.panel and row.kind.choices]
    assert {"bot_task", "quantization", "device", "dtype", "frames"} <= {row.name for row in rows}
    assert {"halt", "time_limit", "job_timeout"} <= {row.name for row in rows}
    for row in rows:
        flag = row.spelled[-1]
        assert complete(f"hyimg {command} x {flag} ") == list(row.kind.choices), row.name
        assert all(row.kind.parse(choice) == choice for choice in row.kind.choices)


def test_other_values_are_completed_where_they_are_a_list(
    complete: Callable[..., list[str]],
) -> None:
    assert complete("hyimg bench --compare ") == [*names(), "drafts"]
    assert complete("hyimg schema ") == ["line", "recipe"]
    assert complete("hyimg eval ps") == ["psnr"]
    assert complete("hyimg eval all --net ") == ["alex", "squeeze", "vgg"]
    assert complete("hyimg cache clear --kind source-i") == ["source-images"]
    assert complete("hyimg replay x --progress p") == ["plain"]


def test_a_manifest_is_packaged_or_lies_here(
    complete: Callable[..., list[str]], tmp_path: Path
) -> None:
    for name in ("jobs.jsonl", "quick.txt", "photo.png", ".hidden.jsonl"):
        (tmp_path / name).touch()
    (tmp_path / "queue").mkdir()
    assert complete("hyimg generate ") == [*PACKAGED, "queue/", "jobs.jsonl", "quick.txt"]
    assert complete("hyimg plan qu") == [*PACKAGED, "queue/", "quick.txt"]
    assert complete("hyimg bench --manifest quicks") == PACKAGED
    # A shell completes names of files better than we do.
    assert complete("hyimg check jo") == []


def test_bash_makes_a_word_of_the_equals_sign(
    monkeypatch: pytest.MonkeyPatch, complete: Callable[..., list[str]]
) -> None:
    assert complete("hyimg generate --steps = 3 --bot-task = th") == ["think", "think_recaption"]
    assert len(complete("hyimg generate --bot-task =")) == 4


@pytest.fixture
def hyimg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program `hyimg` on the path."""
    program = tmp_path / "bin" / "hyimg"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m hyimg_cli "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


@pytest.mark.usefixtures("hyimg")
@pytest.mark.parametrize("shell", IN_THE_SHELL)
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("hyimg bench --compare pre", {"prefix-sharing", "prewarm"}),
        ("hyimg explain job.ti", {"job.timeout"}),
    ],
)
def test_in_the_shell_itself(shell: str, line: str, offered: set[str]) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    asked = subprocess.run(
        [shell, "-c", IN_THE_SHELL[shell]],
        env=os.environ | {"LINE": line},
        capture_output=True,
        text=True,
        check=False,
    )
    told = asked.stdout.partition("((")[2].rpartition("))")[0] if shell == "zsh" else asked.stdout
    assert set(told.replace('"', "").split()) == offered, asked.stderr
