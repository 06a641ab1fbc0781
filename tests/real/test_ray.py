"""A Ray cluster of two `ray start`, each in a folder of its own, by the recipe."""

import random
import secrets
import signal
from collections.abc import Iterator

import psutil
import pytest
from real.commands import (
    KILLS,
    QUICK,
    REPOSITORY,
    Hyimg,
    assert_each_done_once,
    ended_jobs,
    killed_and_resumed,
    lines_of,
    pixels_of,
    skipped,
    stopped,
    wait_for,
)
from store_server import free_ports

SCRIPT = REPOSITORY / "recipes/cluster/ray.sh"
RUN = ["bash", SCRIPT, "run", "--replicas", "2", "--device", "cpu", *QUICK]
JOBS = 4 * KILLS + 20


@pytest.fixture
def cluster(hyimg: Hyimg) -> Iterator[Hyimg]:
    (port,) = free_ports(1)
    hyimg.environment |= {"RAY_AUTH_TOKEN": secrets.token_hex(32), "PORT": str(port), "CPUS": "1"}
    for number, words in enumerate((["head"], ["join", f"127.0.0.1:{port}"])):
        folder = hyimg.folder / f"started-{number}"
        folder.mkdir()
        hyimg.start("bash", SCRIPT, *words, said=words[0], cwd=folder)
        wait_for(lambda name=words[0]: "Ray runtime started" in hyimg.said(name), words[0], 90)
    yield hyimg
    for process in hyimg.started[1::-1]:
        if process.poll() is None:
            stopped(process, signal.SIGTERM)


def test_a_command_that_is_killed_and_a_machine_that_goes(cluster: Hyimg) -> None:
    """The manifest's default name is relative, and Ray was started elsewhere."""
    cluster.write_jobs(JOBS)
    said, shown = killed_and_resumed(cluster, RUN)
    assert skipped(said) >= shown
    lines = lines_of(cluster.folder / "runs/night")
    assert_each_done_once(lines, JOBS)
    cluster.done("hyimg", "generate", "jobs.jsonl", "-o", "alone", *QUICK)
    assert pixels_of(lines) == pixels_of(lines_of(cluster.folder / "alone"))


def test_the_node_of_the_command_dies(cluster: Hyimg) -> None:
    """Within half a minute it says which one, and what was shown as done is kept."""
    cluster.write_jobs(JOBS)
    process = cluster.start(*RUN)
    wait_for(lambda: ended_jobs(cluster.said()) > random.Random(0).randrange(1, 4), "some jobs")
    head = psutil.Process(cluster.started[0].pid)
    (raylet,) = (
        one for one in head.children(recursive=True) if "raylet/raylet" in one.cmdline()[0]
    )
    raylet.kill()
    assert process.wait(40) == 3, cluster.said()
    assert "error[machine.ray]: " in cluster.said()
    assert len(lines_of(cluster.folder / "runs/night")) >= ended_jobs(cluster.said())
