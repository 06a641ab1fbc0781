"""A small checkpoint of every family in its published layout: in a folder, or written into one."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import tiny_bagel
import tiny_editors
from tiny_video import START_KINDS, TINY_VIDEO, write_start, write_wan

from hyimg_cli.models.registry import EMBEDDED, resolve_model

TESTS = Path(__file__).parent
WRITERS: dict[str, Callable[[Path], object]] = {
    "bagel": tiny_bagel.write,
    "wan": write_wan,
    "wan22": partial(write_wan, boundary_ratio=0.9),
    **{kind: partial(write_start, kind=kind) for kind in START_KINDS},
    **{kind: partial(tiny_editors.write, kind=kind) for kind in tiny_editors.PIPELINES},
}
FOLDERS = {
    "tiny-image": resolve_model(EMBEDDED),
    "official": TESTS / "parity" / "tiny" / "checkpoint",
    "tiny-video": TINY_VIDEO,
    "lingbot": TESTS / "models" / "lingbot_world" / "golden" / "checkpoint",
}
