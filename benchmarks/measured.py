"""Shared by benchmarks: processor seconds of a command, and how a result is kept."""

import argparse
import json
import resource
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hyimg_cli.journal.provenance import hardware, versions


def processor_s(command: Sequence[str | Path], **how: Any) -> float:
    """Return processor seconds, user and system, of a command and all that it starts."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, **how)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(after[:2]) - sum(before[:2])


def keep(given: argparse.Namespace, found: Mapping[str, Any]) -> None:
    """Write the findings to `--out`, if given, with the options, time and machine.

    Paths are cut to their last name.
    """
    if given.out:
        facts = {name: value for name, value in vars(given).items() if name != "out"}
        facts |= {"date": f"{datetime.now(UTC):%Y-%m-%d}", "hardware": hardware()}
        text = json.dumps(facts | {"versions": versions()} | found, default=_name_of, indent=1)
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(text + "\n")


def _name_of(path: Path) -> str:
    return path.name
