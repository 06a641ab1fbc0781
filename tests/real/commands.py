"""The command of hyimg as its users start it, killed and started again."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from store_server import end_with_parent

REPOSITORY = Path(__file__).parents[2]
HERE = Path(sys.executable).parent
# How often a run of each service is killed: fewer for a quick look.
KILLS = int(os.environ.get("REAL_KILLS", "20"))
QUICK = ("--steps", "2", "--no-prewarm", "--progress", "plain", "--no-report")
WAIT_S = 300.0


@dataclass
class Hyimg:
    """Starts commands in a folder, with `environment` added to this process's."""

    folder: Path
    environment: dict[str, str]
    started: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    def start(self, *words: object, said: str = "said", **more: Any) -> "subprocess.Popen[bytes]":
        """Start a program whose output goes to the file `said`."""
        with (self.folder / said).open("wb") as file:
            process = subprocess.Popen(
                [str(word) for word in words],
                cwd=more.pop("cwd", self.folder),
                env=self.environment_of(**more),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                preexec_fn=end_with_parent,
            )
        self.started.append(process)
        return process

    def run(self, *words: object, **more: Any) -> tuple[int, str]:
        """Return a program's exit code and output."""
        name = f"ran-{len(self.started)}"
        code = self.start(*words, said=name, **more).wait(WAIT_S)
        return code, self.said(name)

    def done(self, *words: object, **more: Any) -> str:
        """Return the output of a program that must end with 0."""
        code, said = self.run(*words, **more)
        assert code == 0, said
        return said

    def said(self, name: str = "said") -> str:
        return (self.folder / name).read_text(encoding="utf-8", errors="replace")

    def environment_of(self, **more: str) -> dict[str, str]:
        kept = {name: text for name, text in os.environ.items() if not name.startswith("HYIMG_")}
        cache = {"HYIMG_CACHE_DIR": str(self.folder / "cache"), "OMP_NUM_THREADS": "1"}
        return kept | cache | self.environment | more

    def write_jobs(self, count: int, name: str = "jobs.jsonl") -> Path:
        """Write a manifest of pictures from text, each with a seed of its own."""
        line = {"prompt": "a red circle on a black background", "bot_task": "none"}
        lines = [line | {"custom_id": f"job-{n}", "seed": n} for n in range(count)]
        path = self.folder / name
        path.write_text("".join(json.dumps(one) + "\n" for one in lines))
        return path

    def end(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
                process.wait()


def wait_for(is_so: Callable[[], object], what: str, seconds: float = WAIT_S) -> None:
    until = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until, f"after {seconds:g} s not yet: {what}"
        time.sleep(0.05)


def ended_jobs(said: str) -> int:
    """Return how many jobs a command has shown as ended."""
    return len(re.findall(r"^\[\d+/\d+\] ", said, re.M))


def killed_and_resumed(
    hyimg: Hyimg, words: list[object], kills: int = KILLS, **more: Any
) -> tuple[str, int]:
    """Kill a command after a few jobs each time, then let it finish.

    Return what the last one said, and how many jobs the killed ones had shown as done.
    """
    chance, shown = random.Random(0), 0
    for n in range(kills):
        name = f"killed-{n}"
        process, after = hyimg.start(*words, said=name, **more), chance.choice((0, 1, 2, 3))

        def is_far_enough(name: str = name, after: int = after, process: Any = process) -> bool:
            said = hyimg.said(name)
            return (ended_jobs(said) >= after and "loaded in" in said) or process.poll() is not None

        wait_for(is_far_enough, f"{after} jobs of the command that is killed next")
        assert process.poll() is None, hyimg.said(name)
        process.send_signal(signal.SIGKILL)
        process.wait()
        shown += ended_jobs(hyimg.said(name))
    code, said = hyimg.run(*words, **more)
    assert code == 0, said
    return said, shown


def skipped(said: str) -> int:
    """Return how many jobs the summary of a run says were skipped."""
    (count,) = re.findall(r"failed, ([\d,]+) skipped", said)
    return int(count.replace(",", ""))


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """Return the result lines of all journals of a run's folder."""
    journals = (*folder.glob("results*.jsonl"), *folder.glob("pieces*/[0-9]*.jsonl"))
    return [
        json.loads(line)
        for journal in sorted(journals)
        for line in journal.read_text().splitlines()
    ]


def assert_each_done_once(lines: list[dict[str, Any]], count: int) -> None:
    assert Counter(line["custom_id"] for line in lines) == {f"job-{n}": 1 for n in range(count)}
    assert {line["status"] for line in lines} == {"done"}


def pixels_of(lines: list[dict[str, Any]]) -> Mapping[str, str]:
    return {line["custom_id"]: line["outputs"][0]["pixel_sha256"] for line in lines}


def stopped(process: "subprocess.Popen[bytes]", number: int, seconds: float = 60) -> int:
    """Send a signal to a process and return how it ended."""
    with suppress(ProcessLookupError):
        process.send_signal(number)
    return process.wait(seconds)
