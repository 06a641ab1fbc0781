"""Verdicts: a comparison in one of six words, and why.

identical · equal · within floor · as declared    good, exit code 0
differs · not explained                           exit code 1
"""

from dataclasses import dataclass
from typing import Literal

VerdictName = Literal[
    "identical", "equal", "within floor", "as declared", "differs", "not explained"
]
_GOOD = ("identical", "equal", "within floor", "as declared")


@dataclass(frozen=True)
class Verdict:
    """A verdict; `reasons` are sentences."""

    name: VerdictName
    reasons: tuple[str, ...] = ()

    @property
    def is_good(self) -> bool:
        return self.name in _GOOD

    @property
    def exit_code(self) -> int:
        return 0 if self.is_good else 1
