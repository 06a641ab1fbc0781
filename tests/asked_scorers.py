"""Scores by a scorer's process, in the order of their cases."""

from collections.abc import Mapping, Sequence
from typing import Any

from hyimg_cli.scoring.process import Score, ScorerProcess


def in_order(process: ScorerProcess, cases: Sequence[Mapping[str, Any]]) -> list[Score]:
    found: dict[str, Score] = {}
    for some in process.score({str(n): case for n, case in enumerate(cases)}):
        assert not some.keys() & found.keys(), "a case was scored twice"
        found |= some
    return [found[str(n)] for n in range(len(cases))]
