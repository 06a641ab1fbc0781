"""A whole night in small: jobs that come, a status beside them, an end in time, and resumption.

Real processes of the embedded model; in the end, each picture is that of an undisturbed run.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

JOBS = 300
# The model is loaded within the shorter ones, so some end before their first job.
LIMITS_S = (8, 25, 40)
FLAGS = ("--device", "cpu", "--no-report", "--no-prewarm", "--no-disk-cache")


def night_jobs(folder: Path) -> list[dict[str, Any]]:
    """A picture, an edit of one of seven sources, a text first: in turn."""
    for number in range(7):
        Image.new("RGB", (64, 64), (30 * number, 90, 200)).save(folder / f"{number}.png")
    kinds: tuple[dict[str, Any], ...] = (
        {"task": "t2i"},
        {"task": "it2i"},
        {"task": "t2i", "bot_task": "think", "max_new_tokens": 12},
    )
    jobs = []
    for number in range(JOBS):
        kind = kinds[number % len(kinds)]
        sources = {"images": [f"{number % 7}.png"]} if kind["task"] == "it2i" else {}
        prompt = {"prompt": f"a red circle on blue, number {number % 11}", "seed": number}
        jobs.append(
            {"custom_id": f"job-{number:03}", "num_inference_steps": 2} | prompt | kind | sources
        )
    return jobs


def hyimg(*words: object, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "hyimg_cli", *map(str, words)]
    pipe = subprocess.PIPE
    # Each would read the libraries' source again, for 10 s.
    slow = ("PYTHONDONTWRITEBYTECODE",)
    environment = {name: value for name, value in os.environ.items() if name not in slow}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True
    )


def ended(run: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = run.communicate(timeout=500)
    return run.returncode, out, err


class Watch(threading.Thread):
    """Asks for the status of a run again and again; `said` holds the answers."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.folder, self.is_over = folder, threading.Event()
        self.said, self.wrong = list[dict[str, Any]](), list[str]()

    def run(self) -> None:
        while not self.is_over.wait(1):
            if not (self.folder / "night" / "results.jsonl").exists():
                continue
            code, out, err = ended(hyimg("status", "night", "--json", folder=self.folder))
            if code not in (0, 1) or err:
                self.wrong.append(f"{code}: {err}")
            else:
                self.said.append(json.loads(out))


@pytest.mark.thorough
def test_a_night_that_is_cut_short_and_killed_ends_as_one_that_is_not(tmp_path: Path) -> None:
    jobs = night_jobs(tmp_path)
    (tmp_path / "all.jsonl").write_text("".join(json.dumps(job) + "\n" for job in jobs))
    code, _, err = ended(hyimg("generate", "all.jsonl", "-o", "whole", *FLAGS, folder=tmp_path))
    assert code == 0, err

    coming = tmp_path / "coming.jsonl"
    coming.write_text("")

    def come() -> None:
        """Half a line, then the rest of it, as a program that writes to a file does."""
        with coming.open("a") as file:
            for job in jobs:
                line = json.dumps(job) + "\n"
                file.write(line[:40])
                file.flush()
                time.sleep(0.05)
                file.write(line[40:])
                file.flush()
                time.sleep(0.05)

    writer, watch = threading.Thread(target=come), Watch(tmp_path)
    writer.start()
    watch.start()
    followed, codes = ("generate", "coming.jsonl", "-o", "night", *FLAGS, "--follow"), list[int]()
    for limit in LIMITS_S:
        run = hyimg(*followed, "--time-limit", f"{limit}s", folder=tmp_path)
        code, _, err = ended(run)
        codes.append(code)
        # Between jobs there is nothing to stop; else it is stopped as by Ctrl-C.
        assert code in (0, 143), err
        assert code == 0 or "the time limit of" in err
    # One is killed as it works.
    killed = hyimg(*followed, folder=tmp_path)
    time.sleep(20)
    killed.send_signal(signal.SIGKILL)
    ended(killed)
    writer.join()
    before = done(tmp_path)
    # What the status says goes on; a manifest that is whole has no need of --follow.
    code, _, err = ended(hyimg("generate", "coming.jsonl", "-o", "night", *FLAGS, folder=tmp_path))
    assert code == 0, err
    watch.is_over.set()
    watch.join()
    after = done(tmp_path)
    assert {name: after[name] for name in before} == before, "what was done stays"
    assert watch.wrong == []
    counts = [one["done"] for one in watch.said]
    assert counts == sorted(counts)
    assert len({*counts}) > 3, "it was seen at work"
    assert all(one["done"] + one["left"] <= JOBS and not one["failed"] for one in watch.said)
    code, out, err = ended(hyimg("status", "night", folder=tmp_path))
    assert (code, out[:33]) == (0, f"night: {JOBS} done, 0 failed, 0 left"), err
    code, out, err = ended(hyimg("diff", "whole", "night", folder=tmp_path))
    figures = f"codes {codes}, {len(watch.said)} statuses, {len(before)} done before the last run"
    print(figures, out, sep="\n")  # noqa: T201
    assert f"jobs: {JOBS} of {JOBS} equal (status and pixels)" in out
    assert code == 0, out


def done(folder: Path) -> dict[str, str]:
    """The digest of each job's file, once per job: a job that is done is not drawn again."""
    lines = (folder / "night" / "results.jsonl").read_text().splitlines(keepends=True)
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    names = [line["custom_id"] for line in found if line["status"] == "done"]
    assert len(names) == len({*names}), "drawn again"
    return {line["custom_id"]: line["outputs"][0]["sha256"] for line in found}
