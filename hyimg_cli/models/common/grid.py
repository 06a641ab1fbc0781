"""Image tokens as rows and columns; no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Grid:
    """Rows and columns of image tokens."""

    rows: int
    columns: int

    @property
    def cells(self) -> int:
        return self.rows * self.columns

    def places(self, side: int) -> list[int]:
        """Row of each token in a table of `side` x `side` positions."""
        return [y * side + x for y in range(self.rows) for x in range(self.columns)]
