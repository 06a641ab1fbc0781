"""Compare a checkpoint's headers with the empty networks of a run, in a process of its own.

`check` and `plan` import no torch, and a comparison takes seconds of imports. So it runs once for
each checkpoint: that it was whole is kept in the disk cache, by a digest of its files and of the
libraries' versions. A process that has imported torch compares by itself.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hyimg_cli import errors
from hyimg_cli.cache.disk import CHECKED_CHECKPOINTS, DiskStore
from hyimg_cli.errors import HyimgError, MachineError, installed_version
from hyimg_cli.models.family import Family
from hyimg_cli.spec import digest

_LIBRARIES = ("hyimg-cli", "torch", "transformers", "diffusers")


def refuse_wrong(family: Family, folders: Sequence[Path], store: DiskStore) -> None:
    """Raise the error with which loading would fail, by the family's `refuse_wrong`.

    `folders`: the checkpoint's, and the one with its other parts if there is one. Raises
    MachineError if the other process ends without an answer.
    """
    versions = [f"{name} {installed_version(name)}" for name in _LIBRARIES]
    key = digest.of_json([family.name, family.fingerprint(*folders), versions])
    if store.read(CHECKED_CHECKPOINTS, key) is not None:
        return
    if "torch" in sys.modules:
        family.refuse_wrong(*folders)
    else:
        _ask_process(folders)
    store.write(CHECKED_CHECKPOINTS, key, b"whole")


def _ask_process(folders: Sequence[Path]) -> None:
    command = [sys.executable, "-P", "-m", __name__, *(str(one.absolute()) for one in folders)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    answer = ran.stdout.splitlines()[-1:]
    if ran.returncode or not answer:
        said = (ran.stderr.splitlines() or ["no output"])[-1]
        what = f"the comparison of {folders[0]} with the libraries ended with {ran.returncode}"
        hint = "run hyimg doctor, which compares it without another process"
        raise MachineError(f"{what}: {said}", hint=hint)
    if fault := json.loads(answer[0]):
        raise getattr(errors, fault.pop("kind"))(**fault)


def _main() -> None:
    """Print the fault of the folders in the arguments as JSON, or null."""
    from hyimg_cli.models import registry

    fault = None
    try:
        registry.refuse_wrong(*map(Path, sys.argv[1:]))
    except HyimgError as error:
        fault = {name: getattr(error, name) for name in ("what", "where", "hint", "code")}
        fault["kind"] = type(error).__name__
    sys.stdout.write(f"{json.dumps(fault)}\n")


if __name__ == "__main__":
    _main()
