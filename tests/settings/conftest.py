"""One picture's and one video's job under any settings."""

import io
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from hyimg_cli.manifest.fields import OF_MODELS
from hyimg_cli.manifest.manifest import read_manifest
from hyimg_cli.manifest.resolve import resolve_jobs
from hyimg_cli.models import registry
from hyimg_cli.settings.config import Setting, settle
from hyimg_cli.spec.job import Job

EDIT = {"custom_id": "edit", "prompt": "make the circle blue", "images": ["circle.png"]}
VIDEO = {"custom_id": "video", "task": "t2v", "prompt": "a red square moves left"}


@pytest.fixture
def under() -> Callable[..., tuple[dict[str, Setting], list[Job]]]:
    """Settings by variables, on the CPU unless they say otherwise, and both jobs under them."""

    def settled(
        environ: Mapping[str, Any], *, follows_all: bool = False
    ) -> tuple[dict[str, Setting], list[Job]]:
        said = {n: ",".join(v) if isinstance(v, tuple) else str(v) for n, v in environ.items()}
        variables = {f"HYIMG_{name.upper()}": value for name, value in said.items()}
        settings = settle({}, {"HYIMG_DEVICE": "cpu"} | variables, {})
        lines = "".join(f"{json.dumps(line)}\n" for line in (EDIT, VIDEO))
        manifest = read_manifest("-", io.StringIO(lines))
        jobs, faults = resolve_jobs(manifest, settings, *_cards(follows_all))
        assert not faults
        return settings, jobs

    return settled


def _cards(follows_all: bool) -> tuple[Callable[[str], Any], Callable[[str], Any]]:
    every = {"follows": frozenset(field.name for field in OF_MODELS)} if follows_all else {}
    return (
        lambda model: replace(registry.model_card("tiny-image", None), **every),
        lambda model: replace(registry.video_card("tiny-video", None), **every),
    )
