"""The recipes for queues and services, as far as they run here: shell parts, a queue's variables,
and what one file promises to another. `tests/real` runs them with the services themselves.
"""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from hyimg_cli.cli import commands
from hyimg_cli.cli.shard import shard_named

REPOSITORY = Path(__file__).parents[2]
RECIPES = REPOSITORY / "recipes/cluster"
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


def test_sbatch_takes_the_options_of_the_recipe_together() -> None:
    """sbatch refuses GPUs for each task where the number of tasks is left open."""
    lines = (RECIPES / "slurm.sh").read_text().splitlines()
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", "\n".join(lines), re.M))
    assert (options["gpus-per-task"], options["ntasks"]) == ("1", "1")
    # sbatch reads options up to the first command, and a requeued task would empty its log.
    assert max(n for n, line in enumerate(lines) if line.startswith("#SBATCH")) < lines.index(
        "set -euo pipefail"
    )
    assert {"requeue", "open-mode"} <= options.keys()
    assert options["open-mode"] == "append"


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
    assert (task["workdir"], ".[s3]" in task["setup"]) == (".", True)
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
    assert words[2].startswith("s3://")
    image = (REPOSITORY / "Containerfile").read_text()
    (extras,) = re.findall(r"^ARG EXTRAS=(\S+)$", image, re.M)
    assert "s3" in extras.split(",")
    assert container["envFrom"][0]["secretRef"]["optional"]


def test_the_systemd_unit() -> None:
    """systemd takes a comment only in a line of its own: after a value it is part of the value."""
    page = (REPOSITORY / "docs/serve-operation.md").read_text()
    (unit,) = re.findall(r"```ini\n(.*?)```", page, re.S)
    lines = [line for line in unit.splitlines() if line and line[0] not in "#["]
    assert not [line for line in lines if "#" in line]
    values = dict(line.split("=", 1) for line in lines)
    assert re.fullmatch(r"/\S+", values["EnvironmentFile"])
    words = shlex.split(values["ExecStart"])
    commands.LazyCommand("serve").load_command().make_context("serve", words[2:])
    # systemd makes these folders for the user, who could not.
    folder = words[words.index("-o") + 1]
    assert folder == f"/var/lib/{values['StateDirectory']}"
    caches = dict(word.split("=") for word in values["Environment"].split())
    assert {*caches} == {"XDG_CACHE_HOME", "HF_HOME"}
    assert all(
        name.startswith(f"/var/cache/{values['CacheDirectory']}") for name in caches.values()
    )
    assert "WantedBy" in values
    assert f"useradd --system {values['User']}" in page
