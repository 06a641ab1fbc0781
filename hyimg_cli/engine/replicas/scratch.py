"""A temporary folder of this process; what killed ones left on this machine goes."""

import os
import shutil
import tempfile
from pathlib import Path

from hyimg_cli.journal.disk import is_process

_NAME = "hyimg-replica-"


def own_folder() -> Path:
    """A new folder, to be removed by this process or by a later one's call."""
    for left in Path(tempfile.gettempdir()).glob(f"{_NAME}[0-9]*"):
        if not is_process(int(left.name.split("-")[2])):
            shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{_NAME}{os.getpid()}-"))
