"""Scorers that misbehave: each case has a value or a reason for none; others are not affected."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from asked_scorers import in_order

from hyimg_cli.errors import MachineError
from hyimg_cli.scoring.process import Score, ScorerProcess
from hyimg_cli.scoring.scorers import Scorer, scorers_of
from hyimg_cli.settings.run import CandidatesConfig


def scorer(file: Path, name: str = "odd", **more: Any) -> Scorer:
    (found,) = scorers_of(CandidatesConfig(score=(f"{file}:{name}",), **more))
    return found


def scored(
    file: Path, *prompts: str, limit_s: float = 20.0, printed: list[str] | None = None
) -> list[Score]:
    told = [] if printed is None else printed
    with ScorerProcess(scorer(file), limit_s, told.append) as process:
        return in_order(process, [{"prompt": prompt, "result": "x"} for prompt in prompts])


def test_what_is_no_value_is_null_with_a_fault(scorers_file: Path) -> None:
    faults = {
        "fine": None,
        "raises": "RuntimeError: no such thing",
        "nan": "its value is not finite",
        "huge": "its value is not finite",
        "part": "its value is not finite",
        "eleven": "11 is not in its range 0 to 10",
        "text": "its value is not a number",
        "true": "its value is not a number",
        "none": "the scorer returned no value",
        "guessed": "reply not readable: the scorer guessed",
        "refused": r"refused: \u001b[2J no",
        "too few": "0 scores for 1 cases",
        "bad array": "TypeError: a value of type Scalar is not a number",
        "truth array": "its value is not a number",
        "chatters": "its answer is not one line of JSON",
        "exits": "it exited with 3",
        "also fine": None,
    }
    found = scored(scorers_file, *faults)
    assert [one.fault for one in found] == [*faults.values()]
    assert [one.value for one in found] == [5.0, *[None] * 15, 5.0]
    parts, array = scored(scorers_file, "parts", "array")
    assert array.value == 5.0
    assert (parts.value, parts.parts, parts.reason) == (5.0, {"a": 7.0}, "fine")


def test_a_scorer_that_hangs_is_stopped_and_started_again(scorers_file: Path) -> None:
    began = time.monotonic()
    hung, fine = scored(scorers_file, "hangs", "fine", limit_s=3.0)
    assert (hung.fault, fine.value) == ("no answer in 3 s", 5.0)
    assert time.monotonic() - began < 20


def test_what_it_prints_is_shown_without_what_steers_a_terminal(scorers_file: Path) -> None:
    printed: list[str] = []
    scored(scorers_file, "fine", printed=printed)
    assert printed == ["odd: red and loud"]


def test_one_that_ends_at_every_case_is_left_alone(scorers_file: Path) -> None:
    with pytest.raises(MachineError, match="ended on 5 cases in a row: it exited with 3"):
        scored(scorers_file, *["exits"] * 9)
    # Counted in a row: one that works in between is asked to the end.
    found = scored(scorers_file, *["exits", "exits", "fine"] * 3)
    assert [one.value for one in found] == [None, None, 5.0] * 3


def test_one_that_cannot_start_says_why(tmp_path: Path) -> None:
    file = tmp_path / "lacks.py"
    file.write_text("SCORERS = {'lacks': {}}\nimport no_such_package\n")
    with pytest.raises(MachineError, match="No module named 'no_such_package'"):
        in_order(ScorerProcess(scorer(file, "lacks"), 20.0, print), [{}])
    plain = scorer(file, "lacks", score_python=("lacks=/no/such/python",))
    with pytest.raises(MachineError, match="cannot be started"):
        in_order(ScorerProcess(plain, 20.0, print), [{}])
    file.write_text("SCORERS = {'lacks': {}}\nimport time\ntime.sleep(60)\n")
    with pytest.raises(MachineError, match=r"no answer in 0\.5 s") as slow:
        in_order(ScorerProcess(scorer(file, "lacks"), 0.5, print), [{}])
    assert "--score-timeout" in slow.value.hint


def test_the_interpreter_needs_no_package_and_no_hyimg(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    home = tmp_path / "bare"
    made = [sys.executable, "-m", "venv", "--without-pip", "--symlinks", str(home)]
    subprocess.run(made, check=True)
    file = tmp_path / "bare.py"
    file.write_text(
        "import importlib.util\nSCORERS = {'packages': {'needs': ['prompt']}}\n"
        "def packages(cases, options):\n"
        "    names = ('hyimg_cli', 'torch', 'numpy')\n"
        "    return [sum(map(bool, map(importlib.util.find_spec, names)))] * len(cases)\n"
    )
    bare = scorer(file, "packages", score_python=(f"packages={home}/bin/python",))
    with ScorerProcess(bare, 20.0, print) as process:
        assert [one.value for one in in_order(process, [{"prompt": "a"}])] == [0.0]


def test_no_process_outlives_who_asks(scorers_file: Path) -> None:
    """One that is killed leaves no scorer behind, even one that hangs."""
    code = (
        "import sys, threading, time\n"
        "from hyimg_cli.scoring.process import ScorerProcess\n"
        "from hyimg_cli.scoring.scorers import scorers_of\n"
        "from hyimg_cli.settings.run import CandidatesConfig\n"
        "(one,) = scorers_of(CandidatesConfig(score=(sys.argv[1],)))\n"
        "process = ScorerProcess(one, 60.0, lambda _: None)\n"
        "list(process.score({'a': {'prompt': 'fine'}}))\n"
        "print(process._process.pid, flush=True)\n"
        "list(process.score({'a': {'prompt': 'hangs'}}))\n"
    )
    words = [sys.executable, "-c", code, f"{scorers_file}:odd"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as asking:
        assert asking.stdout is not None
        child = int(asking.stdout.readline())
        time.sleep(0.3)
        asking.send_signal(signal.SIGKILL)
    for _ in range(100):
        if not Path(f"/proc/{child}").exists():
            return
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    raise AssertionError("the scorer is still there")
