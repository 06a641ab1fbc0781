"""Batch image editing and generation with models that think before they draw.

The Python face of the `hyimg` command: `Session`, `read_manifest`, `make_plan`. Names are imported
on first use, so that importing the package never imports torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hyimg_cli.batch.manifest import read_manifest
    from hyimg_cli.batch.planner import make_plan
    from hyimg_cli.engine.session import Session

__version__ = "0.1.0"
__all__ = ["Session", "make_plan", "read_manifest"]

_HOME = {
    "Session": "hyimg_cli.engine.session",
    "make_plan": "hyimg_cli.batch.planner",
    "read_manifest": "hyimg_cli.batch.manifest",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
