"""Run one scorer in its own interpreter, with Python 3.8 or newer and the standard library.

    PYTHON runner.py READ WRITE MODULE_OR_FILE FUNCTION REPLIES SECONDS

READ and WRITE are descriptors of JSON lines. The first line has the options; then each line has
`cases`, and is answered by `scores`, or by `error`. An answer that says its `case` is passed on at
once, as a `score` before that; the other answers are in `scores`, in order. Everything that the
scorer prints goes to standard error. The process ends when its questions end, whatever it is doing.

Only a function with `keeps_replies` goes on with its question then, for SECONDS at most, because an
endpoint charges for what it was asked: each `score` is also in the file REPLIES, with the `head` of
its case. The file is locked as long as this process may write into it.
"""

import fcntl
import importlib
import importlib.util
import json
import os
import queue
import sys
import threading
import time
from contextlib import suppress
from typing import Any, BinaryIO


class Questions:
    """Lines of questions, read by a thread; their end is the end of the caller."""

    def __init__(self, file: BinaryIO, limit_s: float) -> None:
        self.keeps_replies = self.is_orphan = False
        self._file, self._limit_s = file, limit_s
        self._lines: Any = queue.Queue()
        self._lock, self._is_busy = threading.Lock(), False
        threading.Thread(target=self._read, daemon=True).start()

    def next(self) -> Any:
        with self._lock:
            self._is_busy = False
            if self.is_orphan:
                os._exit(0)
        line = self._lines.get()
        with self._lock:
            self._is_busy = True
        return line

    def _read(self) -> None:
        for line in self._file:
            self._lines.put(json.loads(line))
        with self._lock:
            if not (self._is_busy and self.keeps_replies):
                os._exit(0)
            self.is_orphan = True
        time.sleep(self._limit_s)
        os._exit(0)


def main() -> None:
    asked, answers = os.fdopen(int(sys.argv[1]), "rb"), os.fdopen(int(sys.argv[2]), "wb")
    os.dup2(2, 1)
    # As in `python -m`: import modules from the working folder, not from this file's folder.
    sys.path[0] = os.getcwd()
    questions = Questions(asked, float(sys.argv[6]))
    options, replies = questions.next(), None
    try:
        function = getattr(_module(sys.argv[3]), sys.argv[4])
        if getattr(function, "keeps_replies", False) and sys.argv[5]:
            replies = open(sys.argv[5], "ab", buffering=0)  # noqa: SIM115 - open to the end
            fcntl.flock(replies, fcntl.LOCK_EX)
            questions.keeps_replies = True
        _answer(answers, {"ready": True, "keeps_replies": questions.keeps_replies})
    except BaseException as error:
        _answer(answers, {"error": _said(error), "stops": True})
        return
    while True:
        question = questions.next()
        try:
            in_order = []
            for answer in function(question["cases"], options):
                if isinstance(answer, dict) and "case" in answer:
                    if replies is None:
                        _answer(answers, {"score": answer})
                        continue
                    head = question["heads"][answer["case"]]
                    line = json.dumps({"head": head, "score": answer}, default=_number)
                    replies.write(line.encode() + b"\n")
                    with suppress(BrokenPipeError):  # nobody listens any more
                        _answer(answers, {"score": answer})
                else:
                    in_order.append(answer)
            _answer(answers, {"scores": in_order})
        except BrokenPipeError:
            continue
        except Exception as error:
            stops = bool(getattr(error, "stops_scoring", False))
            _answer(answers, {"error": _said(error), "stops": stops})


def _answer(answers: BinaryIO, answer: Any) -> None:
    # Values that JSON cannot hold are the scorer's fault, and an error of this batch.
    answers.write(json.dumps(answer, default=_number).encode() + b"\n")
    answers.flush()


def _number(value: Any) -> Any:
    """Return the number in a scalar or an array of one element, as numpy and torch have them."""
    try:
        number = value.item()
    except Exception:  # any library's own
        number = None
    if isinstance(number, (bool, int, float)):
        return number
    raise TypeError("a value of type " + type(value).__name__ + " is not a number")


def _module(name: str) -> Any:
    if not name.endswith(".py"):
        return importlib.import_module(name)
    # Not under the file's name: hpsv3.py may import the package hpsv3.
    spec: Any = importlib.util.spec_from_file_location("hyimg_scorer", name)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
