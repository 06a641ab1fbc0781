"""Jobs that come while others run: from a pipe, into a folder, at the end of a manifest."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from hyimg_cli.cli import follow
from hyimg_cli.engine import follow as engine_follow

Run = Callable[..., Any]
# So that a fault does not wait for ever.
END = ("--time-limit", "20s")
LINE = '{{"custom_id": "{0}", "prompt": "{1}"}}\n'


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "_POLL_S", 0.05)


def picture(path: Path, shade: int) -> None:
    path.parent.mkdir(exist_ok=True)
    Image.new("RGB", (32, 32), (shade, 80, 80)).save(path)


def test_lines_run_as_they_come_and_a_faulty_one_ends_nothing(
    run_cli: Run,
    fake_session: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    read_lines: Any,
) -> None:
    """Written by another thread, half a line at a time, when the job before it is drawn."""
    reads, writes = os.pipe()
    texts = [LINE.format("a", "x"), '{"custom_id": "bad", "sede": 1}\n', LINE.format("c", "x")]
    ran = fake_session.ran

    def write() -> None:
        with os.fdopen(writes, "w", buffering=1) as pipe:
            for count, text in enumerate(texts):
                pipe.write(text[:9])
                pipe.flush()
                time.sleep(0.1)
                pipe.write(text[9:])
                until = time.monotonic() + 20
                while len(ran) < (1, 1, 2)[count] and time.monotonic() < until:
                    time.sleep(0.01)

    class Stdin:
        def fileno(self) -> int:
            return reads

    made, session_for = list[Any](), engine_follow.session_for
    monkeypatch.setattr(
        engine_follow, "session_for", lambda config: made.append(1) or session_for(config)
    )
    monkeypatch.setattr("io.StringIO", lambda _: Stdin())
    writer = threading.Thread(target=write)
    writer.start()
    done = run_cli("generate", "-", "--follow", "-o", "out", "--no-report")
    writer.join()
    os.close(reads)
    assert (done.code, ran) == (1, ["a", "c"])
    assert done.err.count("bad: failed[manifest.unknown-field]") == 1
    assert len(made) == 1, "the model stays loaded"
    assert [line["custom_id"] for line in read_lines(tmp_path / "out/manifest.resolved.jsonl")] == [
        "a", "c",
    ]  # fmt: skip


def test_a_folder_that_fills_is_followed_until_the_time_is_up(
    run_cli: Run, fake_session: Any, tmp_path: Path
) -> None:
    picture(tmp_path / "in/a.png", 1)
    fake_session.meanwhile = {"a-png": lambda _: picture(tmp_path / "in/b.png", 2)}
    command = ("generate", "in", "--prompt", "x", "--no-report")
    ran = run_cli(*command, "--follow", "--time-limit", "2s")
    assert "results in runs/in-" in ran.err
    assert (ran.code, fake_session.ran) == (0, ["a-png", "b-png"])
    assert "waiting for more; Ctrl-C ends it" in ran.err
    assert "1 done, 0 failed, 1 skipped" in ran.err
    again = run_cli(*command)
    assert "0 done, 0 failed, 2 skipped" in again.err


def test_an_empty_folder_is_waited_for_and_ctrl_c_ends_it(
    run_cli: Run, fake_session: Any, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    ran = run_cli("generate", "in", "--prompt", "x", "-o", "out", "--follow")
    assert (ran.code, fake_session.ran) == (130, [])
    assert "waiting for more" in ran.err


def test_a_manifest_that_grows(run_cli: Run, fake_session: Any, tmp_path: Path) -> None:
    path = tmp_path / "jobs.jsonl"
    path.write_text(LINE.format("a", "x"))

    def grow(_: Path) -> None:
        with path.open("a") as file:
            file.write(LINE.format("b", "fail"))

    fake_session.meanwhile = {"a": grow}
    ran = run_cli(
        "generate",
        path,
        "-o",
        "out",
        "--no-report",
        "--follow",
        "--time-limit",
        "2s",
        "--halt",
        "5",
    )
    assert (ran.code, fake_session.ran) == (1, ["a", "b"])


def test_a_line_of_a_manifest_counts_when_its_end_is_written(
    run_cli: Run,
    fake_session: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    read_lines: Any,
) -> None:
    """While it is written to without a pause; the last one needs none once nothing more comes."""
    monkeypatch.setattr(follow, "_REST_S", 0.5)
    path = tmp_path / "jobs.jsonl"
    whole = "".join(LINE.format(name, "x") for name in "abcdefgh").rstrip()
    path.write_text(whole[:5])

    def write() -> None:
        for at in range(5, len(whole), 7):
            time.sleep(0.02)
            with path.open("a") as file:
                file.write(whole[at : at + 7])

    writer = threading.Thread(target=write)
    writer.start()
    ran = run_cli("generate", path, "-o", "out", "--no-report", "--follow", "--time-limit", "3s")
    writer.join()
    assert (ran.code, fake_session.ran) == (0, [*"abcdefgh"]), ran.err
    assert {one["status"] for one in read_lines(tmp_path / "out/results.jsonl")} == {"done"}


def test_so_many_failures_end_it_in_whichever_round(
    run_cli: Run, fake_session: Any, tmp_path: Path
) -> None:
    path = tmp_path / "jobs.jsonl"
    path.write_text(LINE.format("a", "fail"))

    def grow(_: Path) -> None:
        path.write_text(path.read_text() + LINE.format("b", "fail"))

    fake_session.meanwhile = {"a": grow}
    ran = run_cli("generate", path, "-o", "out", "--no-report", "--follow", "--halt", "2", *END)
    assert (ran.code, fake_session.ran) == (1, ["a", "b"])
    assert "error[run.halted]" in ran.err


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (("--halt", "10%"), "--halt takes a number with --follow"),
        (("--shard", "1/2"), "which part a job is in"),
        (("--no-resume",), "remove --no-resume"),
        (("--score", "text", "--n", "2"), "candidates are chosen when all of them are drawn"),
    ],
)
def test_what_needs_to_know_all_jobs_is_refused(
    run_cli: Run, fake_session: Any, tmp_path: Path, more: tuple[str, ...], why: str
) -> None:
    (tmp_path / "jobs.jsonl").write_text(LINE.format("a", "x"))
    ran = run_cli("generate", "jobs.jsonl", "-o", "out", "--follow", *more)
    assert (ran.code, fake_session.ran) == (2, [])
    assert "error[usage.follow]" in ran.err
    assert why in ran.err
