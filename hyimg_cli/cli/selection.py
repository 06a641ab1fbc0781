"""Which jobs of a manifest a command line means, and what earlier results of them mean."""

from collections.abc import Mapping
from typing import Any

from hyimg_cli.cli.shard import shard_named
from hyimg_cli.engine.runner import ResumePolicy, Selection


def selection_of(given: Mapping[str, Any]) -> Selection:
    """Which jobs of the manifest are meant."""
    return Selection(given["select"], given["limit"], shard_named(given["shard"]))


def resume_policy_of(given: Mapping[str, Any]) -> ResumePolicy:
    """Policy towards results of an earlier run in the same folder."""
    return ResumePolicy(given["resume"], given["retry_failed"], given["force"])
