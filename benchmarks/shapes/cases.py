"""A case is what a row runs; a row is a measurement of it; a group is cases run together."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shapes.floors import Floors, Work
from shapes.timing import EVERY, Pace, Timed

if TYPE_CHECKING:
    from shapes.rows import Bench

# The format of rows that run no layer: they are the same in any format of the experts.
ANY_FORM = "any"
# Goals in milliseconds of a layer, by row and by format of the experts.
GOALS = {
    "denoise step, 2 rows": {"dense": 12.5, "fp8": 9.5},
    "AR decode, 1 row": {"dense": 0.26, "fp8": 0.26},
    "AR decode, 1 row, graph": {"dense": 0.26, "fp8": 0.26},
    "AR decode, 16 rows": {"dense": 1.5, "fp8": 1.5},
    "AR decode, 16 rows, graph": {"dense": 1.5, "fp8": 1.5},
    "prefill": {"dense": 11.0, "fp8": 11.0},
    "first step without reuse": {"dense": 36.0, "fp8": 36.0},
}


@dataclass(frozen=True)
class Row:
    """One measurement. Milliseconds of a call and, if layers do the work, of one layer.

    `layers`: how many ran, None without layers; `is_whole`: they are all of the network's. `floor`:
    the minimum possible time, of a layer if there is `per_layer`, else of the call; `of_floor`: the
    measured time over it. `gb_s`: bytes moved by the time. `fault`: what went wrong.
    """

    name: str
    form: str
    layers: int | None
    timed: Timed
    per_layer: float | None = None
    is_whole: bool = False
    floor: float | None = None
    of_floor: float | None = None
    goal: float | None = None
    gb_s: float | None = None
    note: str = ""
    fault: str = ""
    shows_first: bool = False

    @property
    def misses_goal(self) -> bool:
        """True if a goal was set and not reached."""
        return self.goal is not None and self.per_layer is not None and self.per_layer > self.goal


@dataclass(frozen=True)
class Case:
    """What a row runs.

    `work`: the work of one layer. `flops`: what a call computes outside of layers. `moved`: bytes
    that it moves. `kernel`: returns, once the case has been timed, which kernel did the work, and
    any fault. `shows_first`: the first call is reported separately.
    """

    name: str
    call: Callable[[], object]
    work: Work | None = None
    flops: float | None = None
    moved: int | None = None
    pace: Pace = EVERY
    note: str = ""
    fault: str = ""
    shows_first: bool = False
    kernel: Callable[[], tuple[str, str]] | None = None


@dataclass(frozen=True)
class Group:
    """Cases that share what they run on, by the names of their rows.

    `is_apart`: they run no layer, and are measured once for all formats of the experts.
    """

    names: tuple[str, ...]
    cases: "Callable[[Bench], Iterator[Case]]"
    is_apart: bool = False


@dataclass(frozen=True)
class Subject:
    """What rows measure: a format, a number of the network's layers, and a machine's floors."""

    form: str
    layers: int | None = None
    floors: Floors | None = None
    is_whole: bool = False
    has_goals: bool = False

    @property
    def apart(self) -> "Subject":
        """Return the same for rows that run no layer."""
        return Subject(ANY_FORM, floors=self.floors)

    def row(self, case: Case, took: Timed, note: str = "", fault: str = "") -> Row:
        """Return the row of a case's time; `note` and `fault` come after the case's own."""
        said = "; ".join(filter(None, (case.note, note)))
        wrong = "; ".join(filter(None, (case.fault, fault)))
        per_layer, goal, floor = None, None, None
        if case.work is not None and self.layers and self.floors:
            per_layer = took.median / self.layers
            floor = self.floors.milliseconds(case.work, self.form)
            goal = GOALS.get(case.name, {}).get(self.form) if self.has_goals else None
        elif case.flops is not None and self.floors:
            floor = 1e3 * case.flops / self.floors.tflops / 1e12
        return Row(
            case.name,
            self.form,
            self.layers,
            took,
            per_layer=per_layer,
            is_whole=self.is_whole,
            floor=floor,
            of_floor=None if floor is None else (per_layer or took.median) / floor,
            goal=goal,
            gb_s=None if case.moved is None else case.moved / took.median / 1e6,
            note=said,
            fault=wrong,
            shows_first=case.shows_first,
        )
