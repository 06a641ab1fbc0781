"""--replicas through the command, with the embedded models: the same pixels as one process, also
where one of two is killed; what is refused, and what the plan says.
"""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from hyimg_cli.engine.replicas.local import LocalProcesses
from hyimg_cli.engine.runner import Summary
from hyimg_cli.spec.events import JobEnded, JobStarted, ModelLoaded, Outcome, Prewarmed, ReplicaDied

Run = Callable[..., Any]
Write = Callable[..., Path]


@pytest.fixture
def manifest(write_manifest: Write, write_picture: Write) -> Path:
    """Pictures with text and without, edits of two sources, two videos."""
    base = {"prompt": "a red circle", "steps": 4}
    edit = base | {"task": "it2i", "bot_task": "recaption", "max_new_tokens": 9}
    film = {"task": "t2v", "prompt": "a dog", "steps": 3, "num_frames": 5, "size": "48x32"}
    first, second = (str(write_picture(name)) for name in ("one.png", "two.png"))
    return write_manifest(
        *(base | {"custom_id": f"plain{n}", "seed": n, "bot_task": "none"} for n in range(3)),
        *(base | {"custom_id": f"writes{n}", "seed": n, "max_new_tokens": 9} for n in range(2)),
        *(edit | {"custom_id": f"edit{n}", "seed": n, "images": [first]} for n in range(2)),
        edit | {"custom_id": "other", "seed": 9, "images": [second]},
        *(film | {"custom_id": f"film{n}", "seed": n} for n in range(2)),
    )


def kill_one_behind_the_first_line(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has the replica of the first line killed once it is on disk; then its number is there."""
    killed: list[int] = []
    events = LocalProcesses.events

    def heard(launcher: LocalProcesses, timeout_s: float) -> Any:
        said = events(launcher, timeout_s)
        ends = (one for _, message in said for one in getattr(message, "events", ()))
        for end in (one for one in ends if isinstance(one, JobEnded) and not killed):
            assert end.outcome.replica is not None
            killed.append(end.outcome.replica)
            launcher._processes[killed[0]].process.kill()
        return said

    monkeypatch.setattr(LocalProcesses, "events", heard)
    return killed


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Here and in every replica: sums of several threads round otherwise than those of one."""
    import torch

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.thorough
@pytest.mark.usefixtures("one_thread")
def test_two_replicas_one_of_them_killed_make_the_pixels_of_one_process(
    run_cli: Run, manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = run_cli("generate", manifest, "-o", "alone", "--no-prewarm", "--no-report", "--json")
    assert alone.code == 0, alone.err
    plain = {line["custom_id"]: line for line in alone.json_lines[:-1]}
    killed = kill_one_behind_the_first_line(monkeypatch)
    shared = run_cli(
        "generate",
        manifest,
        "-o",
        "shared",
        "--replicas",
        "2",
        "--no-disk-cache",
        "--no-prewarm",
        "--json",
    )
    assert shared.code == 0, shared.err
    found = {line["custom_id"]: line for line in shared.json_lines[:-1]}
    assert found.keys() == plain.keys()
    for name, line in plain.items():
        assert line["replica"] is None
        assert found[name]["replica"] in (0, 1)
        assert found[name]["key"] == line["key"]
        assert found[name]["outputs"][0]["pixel_sha256"] == line["outputs"][0]["pixel_sha256"]
    assert f"replica {killed[0]}: died (killed by signal 9)" in shared.err
    assert "replica 0: tiny-" in shared.err
    assert "replica 1: tiny-" in shared.err
    assert not any("replica" in one.name() for one in psutil.Process().children())
    assert not list((tmp_path / "shared" / "outputs").glob(".*"))
    flags = json.loads((tmp_path / "shared" / "run.json").read_text())["flags"]
    assert flags["replicas"] == {"value": 2, "origin": "flag"}
    # A folder that was begun with replicas goes on without them.
    again = run_cli("generate", manifest, "-o", "shared", "--json")
    assert again.json_lines[-1]["summary"]["skipped"] == len(plain)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--device", "balanced"], "--device balanced"),
        (["--device", "cuda:2"], "--device cuda:2"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "plan", "check"])
def test_what_does_not_go_with_replicas_is_refused_by_name(
    run_cli: Run, tmp_path: Path, command: str, flags: list[str], named: str
) -> None:
    ran = run_cli(command, "quickstart", "--replicas", "2", *flags)
    assert ran.code == 2
    assert f"error[usage.replicas]: --replicas 2 and {named}" in ran.err
    assert not (tmp_path / "runs").exists()


def test_more_replicas_than_gpus_are_refused_before_anything_is_loaded(
    run_cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    flags = ("--device", "cuda", "--dtype", "float32", "--replicas", "4", "--no-report")
    ran = run_cli("generate", "quickstart", "-o", "out", *flags)
    assert ran.code == 3
    assert "4 replicas need 4 GPUs; torch finds 3" in ran.err
    assert "hint: use fewer --replicas, or --device cpu" in ran.err


def test_one_replica_is_the_plain_session(run_cli: Run, fake_session: Any) -> None:
    ran = run_cli("generate", "quickstart", "-o", "out", "--replicas", "1", "--json")
    assert ran.code == 0, ran.err
    assert fake_session.ran
    assert {line["replica"] for line in ran.json_lines[:-1]} == {None}


def test_the_plan_says_what_each_replica_holds(run_cli: Run, write_manifest: Write) -> None:
    lines = [{"custom_id": f"j{n}", "prompt": "a dog"} for n in range(5)]
    path = write_manifest(*lines)
    assert run_cli("plan", path, "--replicas", "3", "--json").json_lines[0]["replicas"] == 3
    assert run_cli("plan", path, "--replicas", "8", "--json").json_lines[0]["replicas"] == 5
    text = run_cli("plan", path, "--replicas", "3", "--device", "cpu").out
    assert "3 replicas, in one memory: each needs this memory" in text
    gpus = run_cli("plan", path, "--replicas", "3", "--device", "cuda", "--dtype", "bfloat16").out
    assert "3 replicas, a GPU each: each needs this memory" in gpus
    assert "replicas" not in run_cli("plan", path).out


def test_times_of_replicas_that_load_together_are_not_added_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    counts = Summary()
    counts._clock = 0.0

    def at(seconds: float, event: Any) -> None:
        now[0] = seconds
        counts.add(event)

    at(5, ModelLoaded("m", 5, "cpu", "float32", 1, replica=0))
    at(6, Prewarmed(1, 1, replica=0))
    at(6, JobStarted("a"))
    at(8, ModelLoaded("m", 8, "cpu", "float32", 1, replica=1))  # while `a` is at work
    at(10, JobEnded(Outcome("a", "done", key="")))
    at(11, ReplicaDied("killed", 0, False, replica=1))
    at(13, Prewarmed(1, 2, replica=0))
    at(14, JobStarted("b"))
    at(16, JobEnded(Outcome("b", "done", key="")))
    assert (counts.load_s, counts.prewarm_s) == (8, 3)
    assert counts.pictures_s == pytest.approx(4 + 1 + 2)
    assert counts.seconds_per_picture == pytest.approx(3.5)
