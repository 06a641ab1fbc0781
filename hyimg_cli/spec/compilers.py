"""What a machine lacks to compile kernels when a run starts, found without importing a library.

Triton and torch's compiler write small extension modules in C, and build them at their first use.
"""

import os
import shutil
import sysconfig
from functools import cache
from importlib.util import find_spec
from pathlib import Path

COMPILER_HINT = "install gcc and Python's headers (python3-dev), or set CC"


@cache
def triton_lacks() -> str:
    """Return what Triton's kernels lack on this machine, as a clause; empty if nothing."""
    if find_spec("triton") is None:
        return "triton is not installed"
    return compiler_lacks()


def compiler_lacks(*, is_cpp: bool = False) -> str:
    """Return what extension modules in C, or in C++, lack here, as a clause; empty if nothing."""
    variable, names = ("CXX", ("g++", "clang++")) if is_cpp else ("CC", ("gcc", "clang"))
    if not os.environ.get(variable) and not any(map(shutil.which, names)):
        return f"a {'C++' if is_cpp else 'C'} compiler is missing"
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return "" if headers.is_file() else "Python.h is missing"
