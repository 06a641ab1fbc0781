"""The recipes for queues, as far as they run here: shell parts and a queue's variables."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from hyimg_cli.cli.shard import shard_named

RECIPES = Path(__file__).parents[2] / "recipes/cluster"
SLURM = {"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_COUNT": "8", "SLURM_ARRAY_TASK_MIN": "0"}


@pytest.fixture
def stub(tmp_path: Path) -> dict[str, str]:
    """An environment in which `hyimg` says what it was asked for."""
    (tmp_path / "hyimg").write_text('#!/bin/bash\nprintf "%q " "$@"\n')
    (tmp_path / "hyimg").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    return {"PATH": path, "MANIFEST": "my jobs.jsonl", "OUT": "runs/a night"}


def asked(command: list[str], environment: dict[str, str]) -> list[str]:
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return shlex.split(ran.stdout)


def test_slurm(stub: dict[str, str]) -> None:
    script = RECIPES / "slurm.sh"
    words = asked(["bash", str(script), "--steps", "8"], stub | SLURM)
    assert words[:4] == ["generate", "my jobs.jsonl", "--shard", "auto"]
    assert words[4:6] == ["-o", "runs/a night"]
    assert words[-2:] == ["--steps", "8"]
    assert shard_named(words[3], SLURM) == (6, 8)
    alone = asked(["bash", str(script)], stub | SLURM | {"SHARD": "4/8"})
    assert alone[3] == "4/8"


def test_ray(stub: dict[str, str]) -> None:
    script = ["bash", str(RECIPES / "ray.sh")]
    refused = subprocess.run(
        [*script, "run"], env=stub, capture_output=True, text=True, check=False
    )
    assert refused.returncode
    assert "RAY_AUTH_TOKEN" in refused.stderr
    closed = stub | {"RAY_AUTH_TOKEN": "0" * 64, "PORT": "7000"}
    words = asked([*script, "run", "--replicas", "16"], closed)
    assert words == [
        *("generate", "my jobs.jsonl", "-o", "runs/a night", "--ray-address", "127.0.0.1:7000"),
        *("--progress", "plain", "--replicas", "16"),
    ]


def test_skypilot(stub: dict[str, str]) -> None:
    task = yaml.safe_load((RECIPES / "skypilot.yaml").read_text())
    words = asked(["bash", "-euc", task["run"]], stub | task["envs"])
    assert words[1:] == [
        *("s3://bucket/jobs.jsonl", "--shard", "auto", "-o", "s3://bucket/run"),
        *("--progress", "plain"),
    ]


def test_kubernetes() -> None:
    spec = yaml.safe_load((RECIPES / "kubernetes.yaml").read_text())["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    words = [*container["command"], *container["args"]]
    of = words[words.index("--shard") + 1]
    assert shard_named(of, {"JOB_COMPLETION_INDEX": "7"}) == (8, spec["completions"])
    assert spec["parallelism"] == spec["completions"]
