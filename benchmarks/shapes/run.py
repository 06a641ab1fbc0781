"""A run of the benchmark: requested rows, remaining time, and rows one by one."""

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch

import torch

from shapes.cases import Case, Subject
from shapes.kept import Kept
from shapes.timing import Deadline, let_go, profiled, timed

PARTS = ("rows", "requests", "checkpoint")
# Seconds that the steps around a case, and writing, may take.
_LEAST_LEFT_S = 5.0


@dataclass(frozen=True)
class Run:
    """The run that every measurement uses. `asked`: the command line."""

    asked: Namespace
    device: torch.device
    deadline: Deadline
    kept: Kept

    def wanted(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the requested ones of these names."""
        return tuple(n for n in names if any(fnmatch(n, pattern) for pattern in self.asked.only))

    def share(self, parts: int) -> "Run":
        """Return the same run with an equal share of the remaining time."""
        return replace(self, deadline=self.deadline.share(parts))

    @property
    def has_time(self) -> bool:
        """Return True if there is enough time for a case."""
        return self.deadline.left_s >= _LEAST_LEFT_S

    def rows(
        self, names: Sequence[str], cases: Callable[[], Iterator[Case]], subject: Subject
    ) -> None:
        """Measure the cases with these names; one that fails does not stop the others.

        A case can fail by its own fault or for memory.
        """
        left, why = list(names), "out of time"
        try:
            for case in cases() if left and self.has_time else ():
                if case.name in left:
                    left.remove(case.name)
                    try:
                        self._row(case, subject)
                    except Exception as error:
                        self.kept.leave_out(case.name, subject.form, said(error))
                if not left or not self.has_time:
                    break
        except Exception as error:
            why = said(error)
        for name in left:
            self.kept.leave_out(name, subject.form, why)
        let_go()

    def _row(self, case: Case, subject: Subject) -> None:
        is_real = self.asked.scale.name == "real"
        seconds = min(2.0 if is_real else 0.02, self.deadline.left_s / 4)
        pace = case.pace if is_real else replace(case.pace, most=min(case.pace.most, 3))
        took = timed(case.call, self.device, seconds=seconds, pace=pace)
        kernel, fault = _kernel(case)
        row = subject.row(case, took, note=kernel, fault=fault)
        self.kept.add_row(row)
        # Cases that can run only once are not run again for the profile.
        if (row.misses_goal or self.asked.profile) and case.pace.least > 1:
            self._profile(case, subject.form)

    def _profile(self, case: Case, form: str) -> None:
        """Record where a case's time goes; a machine that cannot be profiled loses no row."""
        name = f"{case.name}, {form}"
        if not self.has_time:
            return self.kept.leave_out(f"profile of {name}", form, "out of time")
        try:
            self.kept.add_profile(name, profiled(case.call, self.device))
        except Exception as error:
            self.kept.leave_out(f"profile of {name}", form, said(error))


def _kernel(case: Case) -> tuple[str, str]:
    """Return the kernel that did the work, and any fault; a row is kept without it."""
    try:
        return case.kernel() if case.kernel else ("", "")
    except Exception as error:
        return "", f"its kernels are not seen: {said(error)}"


def said(error: Exception) -> str:
    """Return an error in one line, with its kind."""
    return f"{type(error).__name__}: {error}"
