"""Each room of the package stays near its number of lines, which is written down in `rooms.tsv`.

An alarm, not a target. A line of code is neither blank, nor a comment, nor part of a docstring. A
room may grow by `GROWTH`; a change that needs more raises its line in the same commit, with a
sentence why; one that needs less lowers it.
"""

import ast
from collections import Counter
from pathlib import Path

import hyimg_cli

PACKAGE = Path(hyimg_cli.__file__).parent
BUDGET = Path(__file__).with_name("rooms.tsv")
# Not part of an unpacked source distribution.
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
GROWTH = 1.02
# A line further above its room than this has not been lowered.
SLACK = 60


def code_lines(source: str) -> int:
    prose: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                prose |= {*range(first.lineno, (first.end_lineno or first.lineno) + 1)}
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") and number not in prose
        for number, line in enumerate(source.splitlines(), 1)
    )


def test_rooms_keep_to_their_budgets() -> None:
    lines: Counter[str] = Counter()
    for path in PACKAGE.rglob("*.py"):
        folders = path.relative_to(PACKAGE).parts[:-1]
        lines[folders[0] if folders else "(top)"] += code_lines(path.read_text(encoding="utf-8"))
    for path in BENCHMARKS.rglob("*.py"):
        lines["benchmarks"] += code_lines(path.read_text(encoding="utf-8"))
    rows = (row.split("\t") for row in BUDGET.read_text().splitlines() if not row.startswith("#"))
    budget = {room: int(most) for room, most in rows}
    assert lines.keys() == budget.keys() - ({"benchmarks"} if "benchmarks" not in lines else set())
    above = {room: (n, budget[room]) for room, n in lines.items() if n > budget[room] * GROWTH}
    assert not above, f"rooms that grew (lines, before): {above}"
    loose = {room: (n, budget[room]) for room, n in lines.items() if n < budget[room] - SLACK}
    assert not loose, f"rooms that shrank (lines, before): {loose}"


def test_prose_is_no_code() -> None:
    assert (
        code_lines('"""A\nmodule."""\n\n# why\nx = 1\n\ndef f():\n    """Doc."""\n    return x\n')
        == 3
    )
