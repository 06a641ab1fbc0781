"""A scorer's process, and what becomes of a batch that it is asked: a score for each case, or why
there is none. Nothing that a scorer does ends the run.
"""

import json
import math
import os
import re
import select
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from hyimg_cli.errors import MachineError
from hyimg_cli.files import json_of
from hyimg_cli.scoring.scorers import Scorer
from hyimg_cli.spec.printed import printable

_RUNNER = Path(__file__).with_name("runner.py")
# Of an answer, a reason, and of what a scorer prints.
_MOST_BYTES, _MOST_REASON, _MOST_LINE = 16_000_000, 2000, 300
# What steers a terminal.
_ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|.?)")
# A scorer whose process ends at so many cases, one after the other, is not asked the next one.
_MOST_DEATHS = 5
# EditScore's word for a number that it made up.
_GUESSED = "guess_if_cannot_parse"


@dataclass(frozen=True)
class Score:
    """A value with its parts and a reason in words; or None, and `fault` says why."""

    value: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    fault: str | None = None
    seconds: float = 0.0


class _BatchFailed(Exception):
    """A batch that has no scores; `is_dead`: nor has its process a next one."""

    def __init__(self, why: str, *, is_dead: bool = False) -> None:
        super().__init__(why)
        self.is_dead = is_dead


class ScorerProcess:
    """One scorer at work. It is started with the first batch, and again after it ended."""

    def __init__(self, scorer: Scorer, limit_s: float, tell: Callable[[str], object]) -> None:
        """`limit_s`: how long a batch may take; `tell` is given each line that it prints."""
        self.scorer, self._limit_s, self._tell = scorer, limit_s, tell
        self._process: subprocess.Popen[bytes] | None = None
        self._asks = self._answers = -1
        self._deaths = 0
        self._printed: deque[str] = deque(maxlen=5)
        self._listener: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def score(self, cases: Sequence[Mapping[str, Any]]) -> Iterator[Score]:
        """A score for each case, in order. A batch that fails is tried in halves; a case that fails
        alone has no value.

        Raises MachineError for a scorer that cannot start, or says that it cannot go on.
        """
        began = time.monotonic()
        try:
            answers = self._ask({"cases": [*cases]}).get("scores")
            if not isinstance(answers, list) or len(answers) != len(cases):
                count = len(answers) if isinstance(answers, list) else "no"
                raise _BatchFailed(f"{count} scores for {len(cases)} cases")
        except _BatchFailed as failed:
            if failed.is_dead:
                self._stop()
            if len(cases) == 1:
                self._deaths = self._deaths + 1 if failed.is_dead else 0
                yield Score(fault=printable(str(failed))[:_MOST_REASON])
                if self._deaths == _MOST_DEATHS:
                    what = f"the scorer ended at {_MOST_DEATHS} cases in a row: {failed}"
                    raise MachineError(
                        what, where=self.scorer.name, code="machine.scorer"
                    ) from None
                return
            half = len(cases) // 2
            yield from self.score(cases[:half])
            yield from self.score(cases[half:])
            return
        self._deaths = 0
        seconds = round((time.monotonic() - began) / len(cases), 3)
        for answer in answers:
            yield read_score(answer, self.scorer, seconds)

    def _ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        if self._process is None:
            self._start()
        answer = self._exchange(question)
        if why := answer.get("error"):
            if answer.get("stops"):
                raise MachineError(
                    printable(str(why)), where=self.scorer.name, code="machine.scorer"
                )
            raise _BatchFailed(str(why))
        return answer

    def _start(self) -> None:
        scorer = self.scorer
        (theirs_in, self._asks), (self._answers, theirs_out) = os.pipe(), os.pipe()
        words = [str(_RUNNER), str(theirs_in), str(theirs_out), scorer.module, scorer.function]
        try:
            self._process = subprocess.Popen(
                [scorer.python, *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs_in, theirs_out),
                # Of its own: a terminal's Ctrl-C is for us, and what it started ends with it.
                start_new_session=True,
            )
        except OSError as error:
            what = f"{scorer.python} cannot be started: {error.strerror}"
            raise MachineError(what, where=scorer.name, code="machine.scorer") from None
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        os.set_blocking(self._asks, False)
        self._listener = threading.Thread(target=self._listen, args=(self._process,), daemon=True)
        self._listener.start()
        try:
            ready = self._exchange(scorer.options)
        except _BatchFailed as failed:
            ready = {"error": str(failed)}
        if why := ready.get("error"):
            self._stop()
            said = "; ".join(self._printed)
            what = f"the scorer cannot start: {why}" + (f" ({said})" if said else "")
            hint = "does its interpreter have its packages? --score-python NAME=PATH names another"
            where = scorer.name
            raise MachineError(printable(what), where=where, hint=hint, code="machine.scorer")

    def _exchange(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Send a line, and wait for the one that answers it."""
        until = time.monotonic() + self._limit_s
        left, found = memoryview(json.dumps(question).encode() + b"\n"), bytearray()
        waits = select.poll()
        waits.register(self._answers, select.POLLIN)
        waits.register(self._asks, select.POLLOUT)
        while not found.endswith(b"\n"):
            ready = dict(waits.poll(max(0.0, until - time.monotonic()) * 1000))
            if not ready:
                raise _BatchFailed(f"no answer in {self._limit_s:g} s", is_dead=True)
            if self._asks in ready:
                try:
                    left = left[os.write(self._asks, left) :]
                except BrokenPipeError:  # it is gone, which its answers tell
                    left = left[:0]
                if not left:
                    waits.unregister(self._asks)
            if self._answers in ready:
                found += (piece := os.read(self._answers, 1 << 16))
                if not piece:
                    raise _BatchFailed(self._ending(), is_dead=True)
                if len(found) > _MOST_BYTES or b"\n" in found[:-1]:
                    raise _BatchFailed("its answer is not one line of JSON", is_dead=True)
        try:
            answer = json_of(bytes(found))
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise _BatchFailed("its answer is not one line of JSON", is_dead=True)
        return answer

    def _ending(self) -> str:
        """How the process ended, which closed its end."""
        assert self._process is not None, "it was asked"
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(5)
            return f"it exited with {code}" if code >= 0 else f"it was killed by signal {-code}"
        return "it closed its answers"

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        """Pass on what the process prints, as one may show it."""
        assert process.stdout is not None, "it is a pipe"
        with process.stdout as lines:
            # A line without an end is cut, not awaited.
            while line := lines.readline(10_000):
                said = _ESCAPES.sub("", line.decode(errors="replace")).strip()
                if text := printable(said)[:_MOST_LINE]:
                    self._printed.append(text)
                    self._tell(f"{self.scorer.name}: {text}")

    def _stop(self) -> None:
        """End the process and all that it started."""
        process, self._process = self._process, None
        if process is None:
            return
        os.close(self._asks)  # it ends by itself
        with suppress(subprocess.TimeoutExpired):
            process.wait(1)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(self._answers)
        if self._listener is not None:
            self._listener.join(1)


def _is_finite(number: Any) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # an integer that no float holds
        return False


def read_score(answer: Any, scorer: Scorer, seconds: float = 0.0) -> Score:
    """A score as the scorer gave it: a number, null, or an object. What is no number in its range
    is none, and never made one.
    """
    given = answer if isinstance(answer, dict) else {"value": answer}
    value, parts = given.get("value"), given.get("parts") or {}
    reason = printable(str(given.get("reason") or ""))[:_MOST_REASON]
    fault = given.get("fault") or _find_fault(value, parts, reason, scorer.declaration.range)
    if fault:
        return Score(None, {}, reason, printable(str(fault))[:_MOST_REASON], seconds)
    kept = {printable(str(name))[:40]: float(part) for name, part in parts.items()}
    assert value is not None, "a score without a fault has one"
    return Score(float(value), kept, reason, None, seconds)


def _find_fault(
    value: Any, parts: Any, reason: str, bounds: tuple[float, float] | None
) -> str | None:
    """Why this is no score; None where it is one."""
    if value is None:
        return "the scorer gave none"
    if _GUESSED in reason:
        return "reply not readable: the scorer guessed"
    numbers = [value, *parts.values()] if isinstance(parts, dict) else [None]
    if not all(isinstance(n, int | float) and not isinstance(n, bool) for n in numbers):
        return "what it gave is not a number"
    if not all(map(_is_finite, numbers)):
        return "what it gave is not finite"
    if bounds and not bounds[0] <= value <= bounds[1]:
        return f"{value:g} is not in its range {bounds[0]:g} to {bounds[1]:g}"
    return None
