"""The rules of a text stage that may write anything; no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class FreeScript:
    """A `TextScript` that allows anything, up to the token that ends a text."""

    opening: tuple[int, ...]
    end: int

    def allowed(self, last: int) -> tuple[int, ...] | None:
        return None

    def is_done(self, last: int) -> bool:
        return last == self.end

    def early_end(self, id_: int) -> str:
        return ""

    def is_open(self, written: list[int]) -> bool:
        return written[-1] != self.end

    def forced_ending(self, written: list[int], before: int | None = None) -> list[int]:
        return [*written, self.end]

    def text_of(self, written: list[int]) -> list[int]:
        return written
