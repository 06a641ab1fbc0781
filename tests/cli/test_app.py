"""Exit codes, and the one place where errors become messages."""

import errno
import io
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from hyimg_cli import __version__

LIGHT_COMMANDS = (
    ["--help"],
    ["generate", "--help"],
    ["check", "quickstart"],
    ["plan", "quickstart"],
    ["cache", "list"],
    ["cache", "clear"],
    ["replay", "--help"],
    ["doctor", "--help"],
)


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["generate", "--help"]])
def test_help_exits_0(run_cli: Callable[..., Any], arguments: list[str]) -> None:
    ran = run_cli(*arguments)
    assert ran.code == 0
    assert "Usage" in ran.out


def test_the_version_is_the_packages(run_cli: Callable[..., Any]) -> None:
    ran = run_cli("--version")
    assert (ran.code, ran.out) == (0, f"hyimg {__version__}\n")


@pytest.mark.parametrize("name", ["doctor", "info", "replay", "serve"])
def test_a_command_of_this_version_is_in_the_help(run_cli: Callable[..., Any], name: str) -> None:
    assert f" {name} " in run_cli("--help").out
    assert run_cli(name, "--help").code == 0


def test_a_help_breaks_where_the_terminal_ends(
    run_cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    shown = run_cli("replay", "--help").out
    (line,) = [line for line in shown.splitlines() if "recorded in the file" in line]
    assert line.rstrip().endswith("this machine cannot run it.")


def test_a_mistake_of_ours_exits_101_with_a_traceback(
    run_cli: Callable[..., Any], write_manifest: Callable[..., Any], fake_session: Any
) -> None:
    ran = run_cli("generate", write_manifest({"prompt": "crash"}))
    assert ran.code == 101
    assert "Traceback" in ran.err
    assert "RuntimeError: a mistake of ours" in ran.err


@pytest.mark.usefixtures("fake_session")
def test_an_error_before_the_first_job_sums_nothing_up_below_bars(
    run_cli: Callable[..., Any], write_manifest: Callable[..., Any]
) -> None:
    manifest = write_manifest({"prompt": "a"}, {"prompt": "no checkpoint"})
    ran = run_cli("generate", manifest, "--json", "--progress", "rich")
    assert (ran.code, ran.out) == (3, "")
    assert "error[checkpoint]: there is none" in ran.err
    assert "0 done" not in ran.err
    assert "to resume" not in ran.err


@pytest.mark.parametrize("arguments", LIGHT_COMMANDS, ids=" ".join)
def test_light_commands_import_no_torch(arguments: list[str], tmp_path: Any) -> None:
    code = (
        "import sys\n"
        "from hyimg_cli.cli.app import run\n"
        f"code = run({arguments!r})\n"
        "heavy = {'torch', 'torchvision', 'transformers', 'diffusers'} & set(sys.modules)\n"
        "sys.exit(', '.join(heavy) or code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["generate", "--help"]])
def test_help_imports_no_command(arguments: list[str]) -> None:
    """Typer and the declarations are enough for it."""
    code = (
        "import sys\n"
        "from hyimg_cli.cli.app import run\n"
        f"assert run({arguments!r}) == 0\n"
        "heavy = {'numpy', 'PIL', 'rich', 'hyimg_cli.engine', 'hyimg_cli.models'}\n"
        "sys.exit(', '.join(heavy & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


class Full(io.StringIO):
    """A file on a disk that is full."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_standard_output_is_no_mistake_of_ours(
    run_cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", Full())
    ran = run_cli("plan", "quickstart")
    assert ran.code == 3
    assert ran.err == "error[storage]: standard output cannot be written: No space left on device\n"


def test_a_run_goes_on_without_its_log(
    run_cli: Callable[..., Any],
    write_manifest: Callable[..., Any],
    fake_session: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manifest = write_manifest({"prompt": "a"}, {"prompt": "fail"}, {"prompt": "c"})
    monkeypatch.setattr(sys, "stderr", Full())
    ran = run_cli("generate", manifest, "--json")
    assert ran.code == 1
    assert ran.json_lines[-1]["summary"]["done"] == 2


def test_a_process_without_standard_input_says_so(
    run_cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("io.StringIO", lambda _: None)  # what run_cli makes of stdin
    ran = run_cli("check", "-")
    assert ran.code == 2
    assert "error[manifest.missing]: standard input is closed" in ran.err


def test_an_interrupt_while_modules_load_leaves_no_traceback() -> None:
    code = (
        "import os, signal, sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'hyimg_cli.cli.app':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "from hyimg_cli.__main__ import main\n"
        "main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--version"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_a_library_that_aborts_at_exit_does_not_change_the_exit_code(tmp_path: Any) -> None:
    """As pyarrow's threads do now and then, after the whole answer was written."""
    code = (
        "import atexit, os, sys, types\n"
        "sys.modules['pyarrow'] = types.ModuleType('pyarrow')\n"
        "atexit.register(os.abort)\n"
        "sys.argv = ['hyimg', 'export', '--verify', 'gone']\n"
        "from hyimg_cli.cli.app import main\n"
        "main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error[")


def test_python_m_is_the_same_command(tmp_path: Any) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hyimg_cli", "bench"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
