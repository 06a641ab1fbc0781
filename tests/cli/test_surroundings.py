"""Commands in poor surroundings: closed streams, a lost working folder, no folder for files."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from hyimg_cli.cli.commands import COMMANDS
from hyimg_cli.doctor import folders
from hyimg_cli.errors import StorageError
from hyimg_cli.surroundings import WITH_TEMPORARY_FILES

STREAMS = ("stdin", "stdout", "stderr")


@pytest.fixture
def no_temporary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes each folder for temporary files one that does not exist."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/nonexistent"])


@pytest.mark.usefixtures("fake_session")
@pytest.mark.parametrize(
    "closed", [names for n in (1, 2, 3) for names in combinations(STREAMS, n)], ids="+".join
)
def test_a_run_needs_no_streams(
    closed: tuple[str, ...],
    write_manifest: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from hyimg_cli.cli import app

    manifest = write_manifest({"custom_id": "a", "prompt": "a red circle"})
    monkeypatch.chdir(tmp_path)
    for name in closed:
        monkeypatch.setattr(sys, name, None)  # as Python leaves it
    assert app.run(["generate", str(manifest), "-o", "out"]) == 0
    (line,) = (tmp_path / "out/results.jsonl").read_text().splitlines()
    assert json.loads(line)["custom_id"] == "a"


def test_nothing_is_written_into_a_file_that_took_a_closed_streams_number(tmp_path: Path) -> None:
    code = (
        "import os; from hyimg_cli.surroundings import open_closed_streams as o; o();"
        "f = open('file', 'w'); os.write(2, b'message'); os.write(1, b'more');"
        "raise SystemExit(f.fileno() < 3)"
    )
    argv = ["sh", "-c", '"$0" -c "$1" <&- >&- 2>&-', sys.executable, code]
    assert subprocess.run(argv, cwd=tmp_path, check=False).returncode == 0
    assert (tmp_path / "file").read_bytes() == b""


@pytest.mark.parametrize("command", COMMANDS)
def test_a_working_folder_that_was_removed_is_named(
    command: str, run_cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    ran = run_cli(command)
    assert ran.code == 3
    assert ran.err.startswith("error[storage.working-folder]: the working folder was removed")
    assert "hint: change to a folder that exists, for example: cd ~" in ran.err


@pytest.mark.usefixtures("no_temporary")
@pytest.mark.parametrize("command", sorted(WITH_TEMPORARY_FILES))
def test_no_folder_for_temporary_files_is_named(command: str, run_cli: Callable[..., Any]) -> None:
    ran = run_cli(command, "quickstart")
    assert ran.code == 3
    assert ran.err.startswith("error[storage.no-temporary]: no folder for temporary files can be")
    assert "hint: set TMPDIR to a writable folder" in ran.err


@pytest.mark.usefixtures("no_temporary")
def test_the_doctor_checks_the_folder_for_temporary_files() -> None:
    with pytest.raises(StorageError, match="no folder for temporary files"):
        folders.temporary_files(None)  # type: ignore[arg-type]  # not read


@pytest.mark.parametrize("encoding", ["ascii", "iso8859-1"])
def test_another_encoding_than_utf_8_is_named(
    encoding: str, run_cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: encoding)
    ran = run_cli("check", "quickstart")
    assert ran.code == 3
    assert ran.err.startswith(f"error[machine.encoding]: Python reads names of files as {encoding}")
    assert "hint: set PYTHONUTF8=1" in ran.err
