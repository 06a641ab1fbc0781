"""The Slurm recipe on a cluster of one node, with munge, slurmctld and slurmd of this machine."""

import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from real.commands import (
    KILLS,
    QUICK,
    REPOSITORY,
    Hyimg,
    assert_each_done_once,
    ended_jobs,
    lines_of,
    pixels_of,
    wait_for,
)
from real.conftest import Needs
from store_server import free_ports

SCRIPT = REPOSITORY / "recipes/cluster/slurm.sh"
# The node says that it has what the recipe asks for, twice; no GPU is touched.
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
GresTypes=gpu
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
MpiDefault=none
NodeName={host} NodeAddr=127.0.0.1 CPUs=16 RealMemory=140000 Gres=gpu:2 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture
def slurm(needs: Needs, hyimg: Hyimg, tmp_path: Path) -> Iterator[Hyimg]:
    needs("munged", "slurmctld", "slurmd", "sbatch", root=True)
    folder = tmp_path / "slurm"
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    host = socket.gethostname().partition(".")[0]
    text = CONFIGURATION.format(host=host, folder=folder, ports=free_ports(2))
    (folder / "slurm.conf").write_text(text)
    # A GPU is a device file.
    (folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    conf = {"SLURM_CONF": str(folder / "slurm.conf")}
    hyimg.environment |= conf
    files = {name: folder / f"munge.{name}" for name in ("socket", "pid", "log", "seed")}
    hyimg.start(
        *("munged", "--foreground", "--force", f"--key-file={key}", "--num-threads=1"),
        *(f"--{flag}={files[flag.split('-')[0]]}" for flag in ("socket", "pid-file", "log-file")),
        f"--seed-file={files['seed']}",
        said="munged",
    )
    wait_for(files["socket"].exists, "munged listens", 20)
    hyimg.start("slurmctld", "-D", "-f", conf["SLURM_CONF"], said="slurmctld")
    hyimg.start("slurmd", "-D", "-f", conf["SLURM_CONF"], "-N", host, said="slurmd")
    wait_for(lambda: "idle" in hyimg.run("sinfo", "-h", "-o", "%t")[1], "the node is idle", 60)
    yield hyimg
    hyimg.run("scancel", "--user=root", "--signal=KILL", "--full")
    hyimg.run("scancel", "--user=root")
    wait_for(lambda: not hyimg.run("squeue", "-h")[1].strip(), "no job is left", 60)


def submit(slurm: Hyimg, *flags: object, words: tuple[str, ...] = QUICK, **more: str) -> str:
    """Submit the recipe as its header says, and return the job's id."""
    given = {"MANIFEST": "jobs.jsonl", "OUT": "runs/night"} | more
    said = slurm.done("sbatch", *flags, SCRIPT, *words, **given)
    return re.findall(r"Submitted batch job (\d+)", said)[0]


def wait_for_end(slurm: Hyimg, job: str) -> None:
    wait_for(lambda: not slurm.run("squeue", "-h", "-j", job)[1].strip(), f"job {job} ends")


def facts_of(slurm: Hyimg, job: str) -> str:
    return slurm.run("scontrol", "show", "job", job)[1]


def log_of(slurm: Hyimg, job: str, task: int = 0) -> str:
    path = slurm.folder / f"slurm-{job}_{task}.out"
    return path.read_text() if path.exists() else ""


def test_the_recipe_as_it_is_written(slurm: Hyimg) -> None:
    slurm.write_jobs(16)
    slurm.done("sbatch", "--test-only", SCRIPT, MANIFEST="jobs.jsonl", OUT="runs/night")
    job = submit(slurm)
    wait_for_end(slurm, job)
    said = [log_of(slurm, job, task) for task in range(8)]
    lines = lines_of(slurm.folder / "runs/night")
    assert_each_done_once(lines, 16), said
    slurm.done("hyimg", "generate", "jobs.jsonl", "-o", "alone", *QUICK)
    assert pixels_of(lines) == pixels_of(lines_of(slurm.folder / "alone"))
    slurm.done("hyimg", "report", "runs/night")


def test_stopped_requeued_and_out_of_time(slurm: Hyimg) -> None:
    """One shard of one: a clean stop by scancel, a requeue that continues the log, the time limit,
    and kills of the process itself. No job is done twice.
    """
    count = 1000 + 10 * KILLS  # more than a minute of work
    slurm.write_jobs(count)
    slow = ("--steps", "20", *QUICK[2:])

    def begin(*flags: object) -> str:
        job = submit(slurm, "--array=0", *flags, words=slow, SHARD="1/1")
        wait_for(lambda: ended_jobs(log_of(slurm, job)) > 1, "some jobs are shown")
        return job

    job = begin()
    slurm.done("scancel", "--batch", "--signal=TERM", job)
    wait_for_end(slurm, job)
    assert "to resume: " in log_of(slurm, job)
    job = begin()
    before = ended_jobs(log_of(slurm, job))
    slurm.done("scontrol", "requeue", f"{job}_0")
    slurm.run("scontrol", "release", f"{job}_0")
    wait_for(lambda: log_of(slurm, job).count("loaded in") > 1, "the requeued task runs")
    assert ended_jobs(log_of(slurm, job)) >= before
    for _ in range(KILLS):
        slurm.run("scancel", "--full", "--signal=KILL", job)
        wait_for_end(slurm, job)
        job = begin()
    slurm.done("scancel", "--full", "--signal=KILL", job)
    wait_for_end(slurm, job)
    job = begin("--time=1", "--signal=B:TERM@20")
    began = time.monotonic()
    wait_for_end(slurm, job)
    assert time.monotonic() - began < 150
    assert "ExitCode=143:0" in facts_of(slurm, job)
    assert "to resume: " in log_of(slurm, job)
    lines = lines_of(slurm.folder / "runs/night")
    assert len({line["custom_id"] for line in lines}) == len(lines) < count
