"""Run one scorer in its own interpreter, with Python 3.8 or newer and the standard library.

    PYTHON runner.py READ WRITE MODULE_OR_FILE FUNCTION

READ and WRITE are descriptors of JSON lines. The first line has the options; then each line has
`cases`, and is answered by `scores`, or by `error`. An answer that says its `case` is passed on at
once, as a `score` before that; the other answers are in `scores`, in order. Everything that the
scorer prints goes to standard error. The process ends when its questions end, whatever it is doing.
"""

import importlib
import importlib.util
import json
import os
import queue
import sys
import threading
from typing import Any, BinaryIO


def main() -> None:
    asked, answers = os.fdopen(int(sys.argv[1]), "rb"), os.fdopen(int(sys.argv[2]), "wb")
    os.dup2(2, 1)
    # As in `python -m`: import modules from the working folder, not from this file's folder.
    sys.path[0] = os.getcwd()
    lines: Any = queue.Queue()
    threading.Thread(target=_read, args=(asked, lines), daemon=True).start()
    options = lines.get()
    try:
        function = getattr(_module(sys.argv[3]), sys.argv[4])
        _answer(answers, {"ready": True})
    except BaseException as error:
        _answer(answers, {"error": _said(error), "stops": True})
        return
    while True:
        cases = lines.get()["cases"]
        try:
            in_order = []
            for answer in function(cases, options):
                if isinstance(answer, dict) and "case" in answer:
                    _answer(answers, {"score": answer})
                else:
                    in_order.append(answer)
            _answer(answers, {"scores": in_order})
        except Exception as error:
            stops = bool(getattr(error, "stops_scoring", False))
            _answer(answers, {"error": _said(error), "stops": stops})


def _read(asked: BinaryIO, lines: Any) -> None:
    """Pass each line on. The end of the input is the end of the caller, and so of this process."""
    for line in asked:
        lines.put(json.loads(line))
    os._exit(0)


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
