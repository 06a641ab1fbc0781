"""Which jobs of a manifest a command line means, and what earlier results of them mean."""

import re
from collections.abc import Mapping
from typing import Any

from hyimg_cli.engine.runner import ResumePolicy, Selection
from hyimg_cli.errors import UsageError


def selection_of(given: Mapping[str, Any]) -> Selection:
    """Which jobs of the manifest are meant."""
    return Selection(given["select"], given["limit"], _shard(given["shard"]))


def resume_policy_of(given: Mapping[str, Any]) -> ResumePolicy:
    """What an earlier run in the same folder means."""
    return ResumePolicy(given["resume"], given["retry_failed"], given["force"])


def _shard(text: str | None) -> tuple[int, int] | None:
    """`2/4` as (2, 4), counted from 1."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UsageError(
            f"--shard {text!r} is not I/N with I from 1 to N", hint="for example --shard 2/4"
        )
    return int(match[1]), int(match[2])
