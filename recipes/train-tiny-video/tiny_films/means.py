"""Means for a log line, since the line before."""

from collections.abc import Mapping


class Means:
    """Collects facts of steps by name."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}

    def add(self, facts: Mapping[str, float]) -> None:
        for name, value in facts.items():
            self._values.setdefault(name, []).append(value)

    def taken(self) -> dict[str, float]:
        """Return the means so far, and start again."""
        means = {name: round(sum(v) / len(v), 5) for name, v in self._values.items()}
        self._values = {}
        return means
