"""Compare a checkpoint's headers with the library's empty networks, in a process of its own.

`check` imports no torch, and a comparison takes seconds of imports. So it runs once for
each checkpoint: that it was whole is kept in the disk cache, by a digest of its files and of the
libraries' versions. A process that has imported torch compares by itself.
"""

import json
import subprocess
import sys
from pathlib import Path

from hyimg_cli.cache.disk import CHECKED_CHECKPOINTS, DiskStore
from hyimg_cli.errors import CheckpointError, MachineError, installed_version
from hyimg_cli.models.family import Family
from hyimg_cli.spec import digest

_LIBRARIES = ("hyimg-cli", "torch", "transformers", "diffusers")


def refuse_wrong(family: Family, folder: Path, fingerprint: str, store: DiskStore) -> None:
    """Raise CheckpointError unless the files have exactly the tensors of their configuration.

    `fingerprint`: a digest of its files. Raises MachineError if the other process ends without an
    answer.
    """
    if "torch" in sys.modules:
        family.refuse_wrong(folder)
        return
    versions = [f"{name} {installed_version(name)}" for name in _LIBRARIES]
    key = digest.of_json([fingerprint, versions])
    if store.read(CHECKED_CHECKPOINTS, key) is not None:
        return
    command = [sys.executable, "-P", "-m", __name__, str(folder.absolute())]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    answer = ran.stdout.splitlines()[-1:]
    if ran.returncode or not answer:
        said = (ran.stderr.splitlines() or ["no output"])[-1]
        what = f"the comparison of {folder} with the libraries ended with {ran.returncode}: {said}"
        raise MachineError(what, hint="run hyimg doctor, which compares it without another process")
    if fault := json.loads(answer[0]):
        raise CheckpointError(**fault)
    store.write(CHECKED_CHECKPOINTS, key, b"whole")


def _main() -> None:
    """Print the fault of the folder in the first argument as JSON, or null."""
    from hyimg_cli.models import registry

    fault = None
    try:
        registry.check_weights(sys.argv[1])
    except CheckpointError as error:
        fault = {"what": error.what, "where": error.where, "hint": error.hint, "code": error.code}
    sys.stdout.write(f"{json.dumps(fault)}\n")


if __name__ == "__main__":
    _main()
