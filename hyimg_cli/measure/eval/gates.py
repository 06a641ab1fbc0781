"""Limits that distances must keep. A video must keep them in its worst frame."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from hyimg_cli.measure.eval.measure import Measured


@dataclass(frozen=True)
class Gate:
    """A limit of one metric: the least where `is_floor`, else the most that is allowed."""

    metric: str
    limit: float
    is_floor: bool

    def worst(self, measured: Measured) -> float:
        """The value that counts."""
        spread = measured.values[self.metric]
        return spread.min if self.is_floor else spread.max

    def holds(self, value: float) -> bool:
        """Whether a value keeps the limit; one that is no number does not."""
        return value >= self.limit if self.is_floor else value <= self.limit


def given_gates(
    *,
    min_psnr: float | None = None,
    min_ssim: float | None = None,
    max_lpips: float | None = None,
    max_abs: int | None = None,
) -> tuple[Gate, ...]:
    """A gate for each limit that was given: dB, at most 1, at least 0, levels."""
    limits = (
        (min_psnr, "psnr", True),
        (min_ssim, "ssim", True),
        (max_lpips, "lpips", False),
        (max_abs, "max_abs", False),
    )
    return tuple(Gate(name, limit, floor) for limit, name, floor in limits if limit is not None)


@dataclass(frozen=True)
class Breach:
    """A pair that does not keep a limit."""

    name: str
    gate: Gate
    value: float

    def __str__(self) -> str:
        sign = "below" if self.gate.is_floor else "above"
        return f"{self.name}: {self.gate.metric} {self.value:.4g} is {sign} {self.gate.limit:g}"


def breaches(results: Iterable[Measured], gates: Sequence[Gate]) -> Iterator[Breach]:
    """Every pair and limit that do not go together, in the order of the pairs."""
    for measured in results:
        for gate in gates:
            value = gate.worst(measured)
            if not gate.holds(value):
                yield Breach(measured.pair.name, gate, value)
