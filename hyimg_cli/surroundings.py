"""What a process needs around it before any command: streams, a working folder, text in UTF-8.

And for commands that run a model, a folder for temporary files.
"""

import os
import sys
import tempfile

from hyimg_cli.errors import MachineError, StorageError

# Models, their libraries and child processes write temporary files.
WITH_TEMPORARY_FILES = frozenset(
    ("generate", "check", "plan", "serve", "think", "score", "pick", "eval", "bench", "replay")
)


def open_closed_streams() -> None:
    """Open the null device as each standard stream that was closed.

    Otherwise the next file that is opened takes the number, and messages are written into it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
        # A manifest from a closed stdin is an error of its own.
        if name != "stdin" and getattr(sys, name) is None:
            # Lives as long as the process.
            setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))  # noqa: SIM115


def require_surroundings(command: str) -> None:
    """Raise MachineError or StorageError if `command` cannot work here."""
    encoding = sys.getfilesystemencoding()
    if encoding.lower().replace("-", "") != "utf8":
        what = f"Python reads names of files as {encoding}; hyimg needs UTF-8"
        hint = "set PYTHONUTF8=1, or a UTF-8 locale: export LC_ALL=C.UTF-8"
        raise MachineError(what, hint=hint, code="machine.encoding")
    try:
        os.getcwd()
    except OSError as error:
        what = f"the working folder was removed or cannot be entered ({error.strerror})"
        hint = "change to a folder that exists, for example: cd ~"
        raise StorageError(what, hint=hint, code="storage.working-folder") from None
    if command in WITH_TEMPORARY_FILES:
        temporary_folder()


def temporary_folder() -> str:
    """Return the folder for temporary files. Raises StorageError if none can be written."""
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        what = "no folder for temporary files can be written"
        hint = "set TMPDIR to a writable folder: export TMPDIR=/path/to/folder"
        raise StorageError(what, hint=hint, code="storage.no-temporary") from None
