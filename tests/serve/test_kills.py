"""Servers killed at moments of every status lose nothing and do nothing twice."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

KILLS = Path(__file__).with_name("kills.py")


def killed(state: Path, lines: int, *points: int) -> Any:
    paths = os.pathsep.join((str(KILLS.parent.parent), *sys.path))
    told = subprocess.run(
        [sys.executable, "-W", "error", str(KILLS), str(state), *map(str, (lines, *points))],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stderr
    return json.loads(told.stdout)


def check(found: Any, lines: int) -> None:
    batches = found["batches"]
    assert {kind: one["status"] for kind, one in batches.items()} == {
        "done": "completed",
        "wrong": "failed",
        "cancelled": "cancelled",
        "late": batches["late"]["status"],
    }
    assert batches["late"]["status"] in ("completed", "expired")
    (fault,) = batches["wrong"]["errors"]["data"]
    assert (fault["line"], fault["param"]) == (6, "seed")
    assert batches["done"]["counts"] == {"total": lines, "completed": lines - 1, "failed": 1}
    for kind, batch in batches.items():
        if kind != "wrong":
            # Each request is answered once, and each job was done once.
            names = sorted(f"{kind}-{n}" for n in range(lines))
            assert [one["custom_id"] for one in batch["lines"]] == names
            assert batch["twice"] == 0
            assert {f"{job}.png" for job in batch["done"]} <= {*batch["pictures"]}


def test_kills_lose_nothing(tmp_path: Path) -> None:
    found = killed(tmp_path / "state", 6, 3, 9, 17, 30, 24, 12, 21)
    assert found["kills"] >= 6
    check(found, 6)
    # The same pictures as of a server that lived.
    whole = killed(tmp_path / "whole", 6)["batches"]["done"]["lines"]
    ours = found["batches"]["done"]["lines"]
    assert [data_of(one) for one in ours] == [data_of(one) for one in whole]


def data_of(line: Any) -> Any:
    return line["custom_id"], line["response"]["body"].get("data")


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_sixty_kills_lose_nothing(tmp_path: Path) -> None:
    found = killed(tmp_path / "state", 80, *[1 + 5 * number % 16 for number in range(75)])
    assert found["kills"] >= 60
    check(found, 80)
