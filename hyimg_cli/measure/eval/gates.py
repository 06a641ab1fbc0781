"""Limits that distances must keep. A video must keep them in its worst frame."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from hyimg_cli.measure.distances import Measured


@dataclass(frozen=True)
class Gate:
    """A limit of one metric: the least where `is_floor`, else the most that is allowed."""

    metric: str
    limit: float
    is_floor: bool

    def breach(self, measured: Measured) -> str:
        """The broken limit of a pair in words; empty where it is kept. NaN keeps none."""
        values = measured.values[self.metric]
        value = min(values) if self.is_floor else max(values)
        if value >= self.limit if self.is_floor else value <= self.limit:
            return ""
        side = "below" if self.is_floor else "above"
        return f"{measured.pair.name}: {self.metric} {value:.4g} is {side} {self.limit:g}"


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


def breaches(results: Iterable[Measured], gates: Sequence[Gate]) -> Iterator[str]:
    """Every pair and limit that do not go together, in the order of the pairs."""
    found = (gate.breach(measured) for measured in results for gate in gates)
    yield from filter(None, found)
