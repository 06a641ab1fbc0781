"""A scorer's process, and its result for each case of a batch: a score, or why there is none.

Nothing that a scorer does can end the run.
"""

import fcntl
import json
import math
import os
import re
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Self

from hyimg_cli.errors import MachineError
from hyimg_cli.files import json_of
from hyimg_cli.scoring.scorers import Scorer
from hyimg_cli.settings.values import shown
from hyimg_cli.spec.printed import printable

_RUNNER = Path(__file__).with_name("runner.py")
# Maximum lengths of an answer, a reason, and a line that a scorer prints.
_MOST_BYTES, _MOST_REASON, _MOST_LINE = 16_000_000, 2000, 300
# Maximum number of facts about a scorer, and length of one.
_MOST_FACTS, _MOST_FACT = 16, 200
# Sequences that control a terminal.
_ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|.?)")
# A scorer whose process ended in this many cases in a row is not asked again.
_MOST_DEATHS = 5
# EditScore's reason for a number that it invented.
_GUESSED = "guess_if_cannot_parse"
# Processes that finish a question after an error, and their answers: Python would warn of dropped
# ones.
_LEFT: list[tuple[subprocess.Popen[bytes], BinaryIO]] = []


@dataclass(frozen=True)
class Score:
    """A value with its parts and a reason in words; or None, and `fault` says why.

    `facts`: about the scorer, not the picture, such as the model that answered.
    """

    value: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    fault: str | None = None
    seconds: float = 0.0
    facts: Mapping[str, str | float] = field(default_factory=dict)


class _BatchFailed(Exception):
    """A batch that returned no scores. `is_late`: because the time was over."""

    def __init__(self, why: str, *, is_late: bool = False) -> None:
        super().__init__(why)
        self.is_late = is_late


class ScorerProcess:
    """One scorer at work. It starts with the first batch, and again after its process has ended."""

    def __init__(
        self,
        scorer: Scorer,
        limit_s: float,
        on_line: Callable[[str], object],
        replies: Path | None = None,
    ) -> None:
        """Prepare the process.

        `limit_s`: maximum seconds for a batch; `on_line` gets each line it prints. `replies`: where
        a scorer that keeps its replies writes them, in case this process is killed.
        """
        self.scorer, self._limit_s, self._on_line = scorer, limit_s, on_line
        self._replies, self._keeps_replies = replies, False
        self._process: subprocess.Popen[bytes] | None = None
        self._asks: BinaryIO | None = None
        self._answers: BinaryIO | None = None
        self._deaths = 0
        self._printed: deque[str] = deque(maxlen=5)
        self._listener = threading.Thread()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # A scorer that keeps its replies finishes its question, after Ctrl-C, too.
        self._stop(is_killed=kind is None or not self._keeps_replies)

    def score(
        self,
        cases: Mapping[str, Mapping[str, Any]],
        heads: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> Iterator[dict[str, Score]]:
        """Yield the scores of cases by their keys, as they arrive.

        `heads`: what a kept reply is found by, by the keys of the cases. A batch that fails is
        retried in halves, without the cases that have a score; a case that fails alone has no
        value. Raises MachineError for a scorer that cannot start, or reports that it cannot
        continue.
        """
        left = dict(cases)
        try:
            for found in self._asked(cases, heads or {}):
                left = {key: case for key, case in left.items() if key not in found}
                yield found
        except _BatchFailed as failed:
            if len(left) > 1:
                keys = [*left]
                half = len(keys) // 2
                yield from self.score({key: left[key] for key in keys[:half]}, heads)
                yield from self.score({key: left[key] for key in keys[half:]}, heads)
                return
            self._deaths = self._deaths + 1 if self._process is None else 0
            yield {key: Score(fault=printable(str(failed))[:_MOST_REASON]) for key in left}
            if self._deaths == _MOST_DEATHS:
                what = f"the scorer's process ended on {_MOST_DEATHS} cases in a row: {failed}"
                raise self._error(what) from None
            return
        self._deaths = 0

    def _asked(
        self, cases: Mapping[str, Mapping[str, Any]], heads: Mapping[str, Mapping[str, Any]]
    ) -> Iterator[dict[str, Score]]:
        """Yield what one question about these cases is answered by.

        Raises _BatchFailed unless each case is answered once, and MachineError as `score` does.
        """
        keys, before = [*cases], time.monotonic()
        if self._process is None:
            self._start()
        early = set[str]()
        question = {"cases": [*cases.values()], "heads": [heads.get(key, {}) for key in keys]}
        for reply in self._exchange(question):
            now = time.monotonic()
            if reply.get("stops"):
                raise self._error(str(reply.get("error")))
            if "score" in reply:
                place = reply["score"].get("case") if isinstance(reply["score"], dict) else None
                if type(place) is not int or not 0 <= place < len(keys) or keys[place] in early:
                    self._stop()  # more of its answer may follow
                    raise _BatchFailed(f"a score names case {shown(place)} of {len(keys)}")
                early.add(keys[place])
                yield self._read([keys[place]], [reply["score"]], now - before)
            else:
                answers, rest = reply.get("scores"), [key for key in keys if key not in early]
                if not isinstance(answers, list) or len(answers) != len(rest):
                    count = len(answers) + len(early) if isinstance(answers, list) else "no"
                    what = reply.get("error") or f"{count} scores for {len(keys)} cases"
                    raise _BatchFailed(what)
                if rest:
                    yield self._read(rest, answers, now - before)
            before = now

    def _read(self, keys: Sequence[str], answers: Sequence[Any], took_s: float) -> dict[str, Score]:
        bounds, seconds = self.scorer.declared["range"], round(took_s / len(keys), 3)
        found = (read_score(answer, bounds, seconds) for answer in answers)
        return dict(zip(keys, found, strict=True))

    def _error(self, what: str, hint: str = "") -> MachineError:
        where = self.scorer.name
        return MachineError(printable(what), where=where, hint=hint, code="machine.scorer")

    def _start(self) -> None:
        """Start the process and give it its options. Raises MachineError."""
        scorer = self.scorer
        (theirs_in, asks), (answers, theirs_out) = os.pipe(), os.pipe()
        self._asks, self._answers = os.fdopen(asks, "wb"), os.fdopen(answers, "rb")
        words = [str(_RUNNER), str(theirs_in), str(theirs_out), scorer.module, scorer.function]
        words += [str(self._replies or ""), str(self._limit_s)]
        try:
            self._process = subprocess.Popen(
                [scorer.python, *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs_in, theirs_out),
                # Its own session: Ctrl-C reaches only hyimg, and a kill also reaches its children.
                start_new_session=True,
            )
        except OSError as error:
            self._asks.close()
            self._answers.close()
            raise self._error(f"{scorer.python} cannot be started: {error.strerror}") from None
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        self._listener = threading.Thread(target=self._listen, args=(self._process,), daemon=True)
        self._listener.start()
        hint = "check the packages of its interpreter; --score-python NAME=PATH names another"
        try:
            (reply,) = self._exchange(scorer.options)
            why, self._keeps_replies = reply.get("error"), bool(reply.get("keeps_replies"))
        except _BatchFailed as failed:
            why = str(failed)
            if failed.is_late:
                hint = "give it more time to import and load: --score-timeout SECONDS"
        if why:
            self._stop()
            said = f" ({'; '.join(self._printed)})" if self._printed else ""
            raise self._error(f"the scorer cannot start: {why}{said}", hint)

    def _exchange(self, question: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Send a line, and yield the objects that answer it: early scores, then the last.

        Raises _BatchFailed once the process has been stopped: it hung, ended, or did not answer
        with JSON.
        """
        process, is_late = self._process, threading.Event()
        assert process is not None, "it was started"
        assert self._asks is not None, "it was started"
        assert self._answers is not None, "it was started"

        def stop_late() -> None:
            is_late.set()
            _kill(process)

        timer = threading.Timer(self._limit_s, stop_late)
        timer.start()
        try:
            with suppress(BrokenPipeError):  # its answer explains the end
                self._asks.write(json.dumps(question).encode() + b"\n")
                self._asks.flush()
            while (answer := _object_in(line := self._answers.readline(_MOST_BYTES))) is not None:
                yield answer
                if "score" not in answer:
                    return
        finally:
            timer.cancel()
        why = "its answer is not one line of JSON"
        if not line.endswith(b"\n"):
            if is_late.is_set():
                why = f"no answer in {self._limit_s:g} s"
            elif not line:
                why = _ending(process)
        self._stop()
        raise _BatchFailed(why, is_late=is_late.is_set())

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        """Pass on what the process prints, without control sequences."""
        assert process.stdout is not None, "it is a pipe"
        with process.stdout as lines:
            # A line without an end is cut.
            while line := lines.readline(10_000):
                said = _ESCAPES.sub("", line.decode(errors="replace")).strip()
                if text := printable(said)[:_MOST_LINE]:
                    self._printed.append(text)
                    self._on_line(f"{self.scorer.name}: {text}")

    def _stop(self, *, is_killed: bool = True) -> None:
        """End the process and everything that it started; `is_killed`: even if it is at work."""
        process, self._process = self._process, None
        if process is None or not self._asks or not self._answers:
            return
        with suppress(BrokenPipeError):
            self._asks.close()  # a runner ends when its input ends
        with suppress(subprocess.TimeoutExpired):
            process.wait(1)
        if not is_killed and process.poll() is None:
            _LEFT.append((process, self._answers))
            return
        _kill(process)
        process.wait()
        self._answers.close()
        self._listener.join(1)


def kept_replies(
    path: Path, limit_s: float, tell: Callable[[str], object]
) -> Iterator[tuple[dict[str, Any], Any]]:
    """Yield the replies, each with its head, that a scorer got after hyimg was killed.

    Waits up to `limit_s` for one that is still at work. The file is gone afterwards, so record what
    it had.
    """
    with suppress(FileNotFoundError), path.open("rb") as file:
        ends, is_told = time.monotonic() + limit_s, False
        while not _is_free(file) and time.monotonic() < ends:
            if not is_told:
                tell("waiting for replies that an earlier run asked for")
            is_told = True
            time.sleep(0.1)
        for line in file:
            kept = _object_in(line) or {}
            if isinstance(kept.get("head"), dict):
                yield kept["head"], kept.get("score")
        path.unlink()


def _is_free(file: BinaryIO) -> bool:
    with suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _object_in(line: bytes) -> dict[str, Any] | None:
    """Return the object in a whole line; None if it has none."""
    with suppress(ValueError):
        if line.endswith(b"\n") and isinstance(answer := json_of(line), dict):
            return answer
    return None


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _ending(process: subprocess.Popen[bytes]) -> str:
    """Return how a process that closed its output ended."""
    with suppress(subprocess.TimeoutExpired):
        code = process.wait(5)
        return f"it exited with {code}" if code >= 0 else f"it was killed by signal {-code}"
    return "it closed its output"


def read_score(answer: Any, bounds: Sequence[float] | None = None, seconds: float = 0.0) -> Score:
    """Return the score in a scorer's answer: a number, null, or an object.

    The value is None for anything but a number within `bounds`.
    """
    given = answer if isinstance(answer, dict) else {"value": answer}
    value, parts = given.get("value"), given.get("parts") or {}
    reason = printable(str(given.get("reason") or ""))[:_MOST_REASON]
    facts = _facts_in(given.get("facts") or {})
    fault = given.get("fault") or _find_fault(value, parts, reason, bounds)
    if facts is None:
        fault = "its facts are not names with texts or numbers"
    if fault or value is None:
        return Score(None, {}, reason, printable(str(fault))[:_MOST_REASON], seconds, facts or {})
    kept = {printable(str(name))[:40]: float(part) for name, part in parts.items()}
    return Score(float(value), kept, reason, None, seconds, facts or {})


def _facts_in(given: Any) -> dict[str, str | float] | None:
    """Return a scorer's facts, cut to what is recorded; None if they are none."""
    facts: dict[str, str | float] = {}
    for name, fact in [*given.items()][:_MOST_FACTS] if isinstance(given, dict) else [("", None)]:
        if isinstance(fact, str):
            fact = printable(fact)[:_MOST_FACT]
        elif not isinstance(fact, int | float) or not abs(fact) < 2**53:
            return None
        facts[printable(str(name))[:40]] = fact
    return facts


def _find_fault(value: Any, parts: Any, reason: str, bounds: Sequence[float] | None) -> str | None:
    """Return why this is not a score; None if it is one."""
    if value is None:
        return "the scorer returned no value"
    if _GUESSED in reason:
        return "reply not readable: the scorer guessed"
    numbers: list[Any] = [value, *parts.values()] if isinstance(parts, dict) else [None]
    if not all(isinstance(n, int | float) and not isinstance(n, bool) for n in numbers):
        return "its value is not a number"
    try:
        is_finite = all(map(math.isfinite, numbers))
    except OverflowError:  # an integer too large for a float
        is_finite = False
    if not is_finite:
        return "its value is not finite"
    if bounds and not bounds[0] <= value <= bounds[1]:
        return f"{value:g} is not in its range {bounds[0]:g} to {bounds[1]:g}"
    return None
