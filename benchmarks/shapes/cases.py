"""A case is what a row runs, a row is what was measured of it, a group is cases run together."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shapes.floors import Floors, Work
from shapes.timing import EVERY, Pace, Timed

if TYPE_CHECKING:
    from shapes.rows import Bench

# Of rows that run no layer: they are the same however the experts are held.
ANY_FORM = "any"
# Milliseconds of a layer that are wanted, by row and by how the experts are held.
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
    """One measurement. Milliseconds of a call, and, where layers do the work, of one layer.

    `layers`: how many were run, None where none was; `is_whole`: they are all of the network's.
    `floor`: the least time that is possible, of a layer where there is `per_layer`, else of the
    call; `of_floor`: the time measured over it. `gb_s`: bytes moved by the time. `fault`: what went
    otherwise than it should.
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
        """A goal was set and not reached."""
        return self.goal is not None and self.per_layer is not None and self.per_layer > self.goal


@dataclass(frozen=True)
class Case:
    """What a row runs. `work`: what one layer of it must do; `flops`: what a call computes that is
    not of layers; `moved`: bytes that it moves.

    `kernel`: says, once the case has been timed, which kernel did the work, and what is wrong about
    that. `shows_first`: the first call is a figure of its own.
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

    `is_apart`: they run no layer, and are measured once, whatever the experts' format.
    """

    names: tuple[str, ...]
    cases: "Callable[[Bench], Iterator[Case]]"
    is_apart: bool = False


@dataclass(frozen=True)
class Subject:
    """What rows are of: a format, so many layers of the network's, on a machine of such floors."""

    form: str
    layers: int | None = None
    floors: Floors | None = None
    is_whole: bool = False
    has_goals: bool = False

    @property
    def apart(self) -> "Subject":
        """The same, of rows that run no layer."""
        return Subject(ANY_FORM, floors=self.floors)

    def row(self, case: Case, took: Timed, note: str = "", fault: str = "") -> Row:
        """What a case's time means; `note` and `fault` stand behind the case's own."""
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
