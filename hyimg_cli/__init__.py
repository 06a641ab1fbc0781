"""Batch image editing and generation with models that think before they draw.

The Python face of the `hyimg` command: `read_manifest`, `make_plan`, `Session`, and what a session
is given. Names are imported on first use, so that importing the package never imports torch.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hyimg_cli.engine.runner import make_plan
    from hyimg_cli.engine.session import Session
    from hyimg_cli.journal.journal import RunFolder
    from hyimg_cli.manifest.manifest import read_manifest
    from hyimg_cli.settings.run import OutputConfig, RunConfig

# Before numpy is imported: the threads of its products wait at full speed for the next one, on
# cores that torch has threads of its own for.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

__version__ = "0.1.0"
__all__ = ["OutputConfig", "RunConfig", "RunFolder", "Session", "make_plan", "read_manifest"]

_HOME = {
    "OutputConfig": "hyimg_cli.settings.run",
    "RunConfig": "hyimg_cli.settings.run",
    "RunFolder": "hyimg_cli.journal.journal",
    "Session": "hyimg_cli.engine.session",
    "make_plan": "hyimg_cli.engine.runner",
    "read_manifest": "hyimg_cli.manifest.manifest",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
