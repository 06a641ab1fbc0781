"""README's walk works when it is typed from start to end, and shows what is really printed."""

import os
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

REPOSITORY = Path(__file__).parents[2]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
MARK = "=== block ended: "


class Block(NamedTuple):
    """Commands with the exit code that README says before them and the output it shows after."""

    commands: str
    code: int
    shown: str


def blocks() -> list[Block]:
    """README's console blocks in order."""
    # Prose, language, content, prose, language, content and so on.
    parts = re.split(r"^```(\w*)\n(.*?)^```\n", README, flags=re.S | re.M)
    fences = [*zip(parts[::3], parts[1::3], parts[2::3], strict=False), ("", "", "")]
    found = []
    for (prose, language, content), (_, language_after, after) in pairwise(fences):
        if language == "console":
            said = re.search(r"exit code (\d+)", prose.strip().rpartition("\n\n")[2])
            shown = after if language_after == "text" else ""
            found.append(Block(content, int(said[1]) if said else 0, shown))
    return found


BLOCKS = blocks()


def without_times(text: str) -> str:
    """Seconds as 0, and no line that says how far a slow run is."""
    text = "".join(line for line in text.splitlines(keepends=True) if " so far, " not in line)
    return re.sub(r"\b(\d+ (h|min) )?\d+(\.\d+)? (s|min|h)\b", "0 s", text)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, int]]:
    """What a shell printed for each block, and the first exit code in it that was not 0."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    checkout = tmp_path_factory.mktemp("checkout")
    for name in ("recipes", "Makefile", "pyproject.toml", "constraints.txt"):
        copy = shutil.copytree if name == "recipes" else shutil.copy
        copy(REPOSITORY / name, checkout / name)
    _install(checkout / ".venv")
    ended = f'printf "{MARK}%d\\n" "$code"; code=0\n'
    script = "code=0; trap 'last=$?; test $code != 0 || code=$last' ERR; set -o pipefail\n"
    script += "".join(block.commands + ended for block in BLOCKS)
    typed = subprocess.run(
        ["bash", "-c", script],
        cwd=checkout,
        env=_environment(checkout),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=580,
    )
    parts = re.split(rf"{MARK}(\d+)\n", typed.stdout)
    return [(text, int(code)) for text, code in zip(parts[::2], parts[1::2], strict=False)]


def _install(venv: Path) -> None:
    """What `make` would set up: the commands of this checkout, and a shell's way to them."""
    (venv / "bin").mkdir(parents=True)
    for name, command in (("python", sys.executable), ("hyimg", f"{sys.executable} -m hyimg_cli")):
        program = venv / "bin" / name
        program.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        program.chmod(0o755)
    (venv / "bin" / "activate").write_text(f"PATH={venv / 'bin'}:$PATH\n")
    (venv / ".installed").touch()


def _environment(home: Path) -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("HYIMG_")}
    offline = {"HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(home / "cache")}
    return ours | offline | {"PYTHONPATH": str(REPOSITORY), "COLUMNS": "80"}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_block_typed_in_its_turn_does_what_is_said(
    answers: list[tuple[str, int]], number: int
) -> None:
    block, (printed, code) = BLOCKS[number], answers[number]
    assert code == block.code, f"{block.commands}\n{printed}"
    rest = without_times(printed)
    for part in filter(None, without_times(block.shown).split("…\n")):
        assert part in rest, f"not printed, or not in this order:\n{part}\n{printed}"
        rest = rest.partition(part)[2]


def test_it_is_read_in_one_sitting() -> None:
    assert len(README.splitlines()) <= 180
