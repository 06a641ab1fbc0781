"""A run with manifest, sources and results in a bucket; its driver is killed midway."""

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from store_server import Endpoint, addresses_at, s3_endpoint

from hyimg_cli import remote
from hyimg_cli.engine import run
from hyimg_cli.errors import OutputFolderError
from hyimg_cli.journal import bucket

Run = Callable[..., Any]
ReadLines = Callable[[Path], list[dict[str, Any]]]
JOBS = 4
ARGUMENTS = ["--steps", "1", "--batching-max-size", "1", "--no-prewarm"]


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Endpoint]:
    """A store whose bucket has a manifest and its sources."""
    with s3_endpoint() as served, addresses_at(served, monkeypatch):
        filled(tmp_path)
        yield served


def filled(folder: Path) -> None:
    """The bucket with a manifest and the sources that it names."""
    system, _ = remote.locate("s3://bucket")
    lines = []
    for n in range(JOBS):
        Image.new("RGB", (64, 64), (60 * n, 90, 30)).save(folder / "in.png")
        system.put_file(str(folder / "in.png"), f"bucket/in/photo {n}.png")
        image = f"in/photo {n}.png" if n % 2 else f"s3://bucket/in/photo {n}.png"
        lines.append({"custom_id": f"job-{n}", "prompt": "brighter", "images": [image]})
    text = "".join(json.dumps(line | {"bot_task": "none"}) + "\n" for line in lines)
    system.pipe_file("bucket/jobs.jsonl", text.encode())


def started(place: Path) -> "subprocess.Popen[str]":
    """The command in a folder of its own, as on another machine: it has the bucket alone."""
    place.mkdir()
    arguments = ["generate", "s3://bucket/jobs.jsonl", "-o", "s3://bucket/run", *ARGUMENTS]
    return subprocess.Popen(
        [sys.executable, "-m", "hyimg_cli", *arguments, "--cache-dir", "cache"],
        cwd=place,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.thorough
def test_killed_in_the_middle_and_resumed_elsewhere_with_the_bucket_alone(
    run_cli: Run, endpoint: Endpoint, tmp_path: Path
) -> None:
    """Two real processes: what is asked is what a kill leaves of one, and of its threads."""
    first = started(tmp_path / "one")

    def kill_at_the_third_line(method: str, path: str) -> str | None:
        if method == "PUT" and path.endswith("results/00000003.jsonl"):
            os.kill(first.pid, signal.SIGKILL)
            return "503"
        return None

    endpoint.fault = kill_at_the_third_line
    assert first.communicate()[1] is not None
    assert first.returncode == -signal.SIGKILL
    endpoint.fault = lambda method, path: None
    second = started(tmp_path / "two")
    told = second.communicate()[1]
    assert second.returncode == 0, told
    assert "2 done, 0 failed, 2 skipped" in told
    assert "results in s3://bucket/run" in told
    made = Counter(path for method, path in endpoint.requests if method == "PUT")
    counts = [made[f"/bucket/run/outputs/job-{n}.png"] for n in range(JOBS)]
    assert counts == [1, 1, 2, 1]  # the third one had no line yet
    ran = run_cli("merge", "s3://bucket/run", "-o", tmp_path / "all")
    assert (ran.code, f"{JOBS} done, 0 failed, 0 missing" in ran.err) == (0, True)
    assert len(list((tmp_path / "all/outputs").iterdir())) == JOBS
    assert not list((tmp_path / "two").glob("s3*"))


def test_a_second_command_is_refused_while_another_one_writes(
    run_cli: Run, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket, "RENEWED_S", 0.1)
    monkeypatch.setattr(run, "session_for", lambda config: pytest.fail("a model is loaded"))
    with bucket.run_folder(Path("s3://bucket/run")):
        before = names()
        ran = run_cli("generate", "s3://bucket/jobs.jsonl", "-o", "s3://bucket/run", *ARGUMENTS)
        assert (ran.code, names()) == (OutputFolderError.exit_code, before)
    assert f"another run is writing to this folder: process {os.getpid()} on" in ran.err


def test_a_finished_file_is_told_by_its_address(
    run_cli: Run, endpoint: Endpoint, tmp_path: Path
) -> None:
    line = {"custom_id": "a", "prompt": "a red circle", "bot_task": "none"}
    remote.locate("s3://bucket")[0].pipe_file("bucket/one.jsonl", json.dumps(line).encode())
    assert (
        run_cli("generate", "s3://bucket/one.jsonl", "-o", "s3://bucket/run", *ARGUMENTS).code == 0
    )
    file = "s3://bucket/run/outputs/a.png"
    assert run_cli("info", file).out.startswith(f"{file}: made by hyimg")
    assert json.loads(run_cli("info", file, "--json").out)["file"] == file
    again = run_cli("replay", file, "-o", tmp_path / "again", "--json")
    assert json.loads(again.out.splitlines()[-1])["replay"]["file"] == file
    assert f"are those of {file}" in again.err
    assert f"--> {file}\n" in run_cli("replay", file, "--model", "tiny-video").err


def test_the_status_of_a_run_in_a_store_and_the_command_that_goes_on_with_it(
    run_cli: Run, endpoint: Endpoint, fake_session: Any
) -> None:
    run_cli("generate", "s3://bucket/jobs.jsonl", "-o", "s3://bucket/run", "--limit", "1")
    ran = run_cli("status", "s3://bucket/run")
    again = "hyimg generate s3://bucket/run/manifest.resolved.jsonl -o s3://bucket/run"
    assert ran.out == f"s3://bucket/run: 1 done, 0 failed, 3 left\nto go on: {again}\n"
    assert run_cli(*again.split()[1:]).code == 0
    assert fake_session.ran == [f"job-{n}" for n in range(JOBS)]
    (found,) = run_cli("status", "s3://bucket/run", "--json").json_lines
    assert (found["done"], found["left"], found["next"]) == (JOBS, 0, None)


@pytest.mark.thorough
def test_of_two_commands_that_both_find_no_lease_one_stops(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    """The other one makes all: no line is lost, and no job has two."""
    both, asked = threading.Barrier(2), [0]

    def wait_for_the_other(method: str, path: str) -> None:
        if path.endswith("lease.json") and asked[0] < 2:
            asked[0] += 1
            both.wait(timeout=100)

    endpoint.fault = wait_for_the_other
    drivers = [started(tmp_path / name) for name in ("one", "two")]
    told = {driver.communicate()[1]: driver.returncode for driver in drivers}
    (stopped,) = [text for text, code in told.items() if code]
    assert sorted(told.values()) == [0, OutputFolderError.exit_code]
    assert "error[output.in-use]: another run is writing to this folder\n" in stopped
    assert "--> s3://bucket/run\n" in stopped
    system, _ = remote.locate("s3://bucket")
    parts = [system.cat_file(name) for name in sorted(system.ls("bucket/run/results"))]
    lines = [json.loads(line) for part in parts for line in part.splitlines()[1:]]
    assert Counter(line["custom_id"] for line in lines) == {f"job-{n}": 1 for n in range(JOBS)}
    assert all(line["status"] == "done" for line in lines)
    made = {f"bucket/run/{line['outputs'][0]['path']}" for line in lines}
    assert set(system.ls("bucket/run/outputs")) == made


def names() -> list[str]:
    """All that the bucket has of the run."""
    system, _ = remote.locate("s3://bucket")
    return sorted(system.find("bucket/run", refresh=True))


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(2))
def test_killed_at_random_while_the_store_fails_at_random(
    run_cli: Run, read_lines: ReadLines, endpoint: Endpoint, tmp_path: Path, seed: int
) -> None:
    """Busy answers, slow ones and lost ones, for a third of all that is put; a job that has a line
    is never made again.
    """
    chance, drivers = random.Random(seed), [started(tmp_path / "0")]
    kill_at = [1, chance.randrange(2, 4), chance.randrange(4, 6)]

    def misbehave(method: str, path: str) -> Any:
        part = re.search(r"results/(\d+)\.jsonl", path)
        if method == "PUT" and kill_at and part and int(part[1]) >= kill_at[0]:
            del kill_at[0]
            os.kill(drivers[-1].pid, signal.SIGKILL)
            return chance.choice(["503", None])
        if method not in ("PUT", "GET") or chance.random() > 0.3:
            return None
        return chance.choice(["503", "lost", 0.3] if method == "PUT" else ["503", 0.3])

    endpoint.fault = misbehave
    while drivers[-1].wait() == -signal.SIGKILL:
        drivers.append(started(tmp_path / str(len(drivers))))
    assert drivers[-1].returncode == 0, drivers[-1].communicate()[1]
    assert not kill_at
    assert len(drivers) == 4
    for driver in drivers:
        driver.communicate()
    endpoint.fault = lambda method, path: None
    system, _ = remote.locate("s3://bucket")
    parts = [system.cat_file(name) for name in sorted(system.ls("bucket/run/results"))]
    lines = [json.loads(line) for part in parts for line in part.splitlines()[1:]]
    assert Counter(line["custom_id"] for line in lines) == {f"job-{n}": 1 for n in range(JOBS)}
    assert run_cli("merge", "s3://bucket/run", "-o", tmp_path / "all").code == 0
    run_cli("generate", "s3://bucket/jobs.jsonl", "-o", tmp_path / "alone", *ARGUMENTS)
    alone, merged = (
        {line["custom_id"]: line for line in read_lines(tmp_path / name)}
        for name in ("alone/results.jsonl", "all/results.jsonl")
    )
    assert len(alone) == JOBS
    for name, line in alone.items():
        assert merged[name]["key"] == line["key"]
        assert merged[name]["outputs"][0]["pixel_sha256"] == line["outputs"][0]["pixel_sha256"]


def test_a_store_that_never_answers_is_told_of_and_left(
    run_cli: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It takes connections, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "testing")
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(remote, "_FIRST_ANSWER_S", 0.4)
        monkeypatch.setattr(remote, "_TOLD_S", 0.1)
        for known in (remote._system, remote._answers):
            known.cache_clear()
        try:
            ran = run_cli("plan", "s3://bucket/jobs.jsonl")
            assert ran.code == 2
            assert "the store did not answer within 0.4 s" in ran.err
            assert "s3://bucket has not answered yet" in ran.err + caplog.text
            ran = run_cli("generate", "quickstart", "-o", "s3://bucket/run", "--no-prewarm")
            assert (ran.code, "did not answer" in ran.err) == (3, True)
        finally:
            for known in (remote._system, remote._answers):
                known.cache_clear()


@pytest.mark.thorough
@pytest.mark.usefixtures("endpoint")
def test_a_chain_in_a_bucket_edits_results_of_the_bucket(run_cli: Run, tmp_path: Path) -> None:
    Image.new("RGB", (96, 64), (60, 90, 30)).save(tmp_path / "in.png")
    common = {"prompt": "brighter", "seed": 1, "bot_task": "none", "keep_outside": True}
    lines = [
        {"custom_id": f"link-{n}", "images": [f"@link-{n - 1}" if n else "in.png"]} | common
        for n in range(3)
    ]
    (tmp_path / "chain.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ("generate", tmp_path / "chain.jsonl", "--steps", "2", "--no-prewarm", "-o")
    for place in ("s3://bucket/chain", tmp_path / "here"):
        assert run_cli(*command, place).code == 0
    assert "3 skipped" in run_cli(*command, "s3://bucket/chain").err
    assert run_cli("merge", "s3://bucket/chain", "-o", tmp_path / "all").code == 0
    for n in range(3):
        made, own = (
            Image.open(tmp_path / folder / "outputs" / f"link-{n}.png")
            for folder in ("all", "here")
        )
        assert made.tobytes() == own.tobytes()
    assert "3 skipped" in run_cli(*command, tmp_path / "all").err


@pytest.mark.thorough
@pytest.mark.usefixtures("endpoint")
def test_a_folder_of_masks_in_a_bucket_is_answered_with_what_to_do(
    run_cli: Run, tmp_path: Path
) -> None:
    Image.new("RGB", (96, 64), (60, 90, 30)).save(tmp_path / "cat.png")
    flags = (tmp_path / "cat.png", "--prompt", "brighter", "-o", tmp_path / "out")
    for masks in ("s3://bucket/in/", "s3://bucket/in"):
        for command in ("check", "generate"):
            ran = run_cli(command, *flags, "--region", masks)
            assert ran.code != 0
            assert "a folder of masks must be on this machine" in ran.err
