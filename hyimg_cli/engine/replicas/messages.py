"""What a run and its replicas say to each other, and the transport that carries it; no torch.

    to a replica      Setup as it starts, then Assign for each piece; Stop
    from a replica    Ready, then for each piece EventBatch until PieceDone; Beat now and then,
                      also on behalf of one that waits for room; Exited

Pickled by plain `pickle`: frozen dataclasses without tensors. A replica writes its files into a
folder of its own; the run moves them to where they belong, then writes their line.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hyimg_cli.errors import HyimgError
from hyimg_cli.parallel.watch import BEAT_S, Beat
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.spec.events import Event
from hyimg_cli.spec.plan import Plan

SESSION = "hyimg_cli.engine.session:Session"


@dataclass(frozen=True)
class Setup:
    """How a replica works, and the plan of which it will get pieces. `folder`: where the run finds
    its files, below the run's own folder. `session`: the module and class that do the work. It
    tells that it goes on every `beat_s`, and of its jobs' progress every `progress_s` at most.
    """

    number: int
    config: RunConfig
    whole: Plan
    folder: Path
    log_level: int
    session: str = SESSION
    beat_s: float = BEAT_S
    progress_s: float = 1.0


@dataclass(frozen=True)
class Assign:
    """Jobs to do, and how often each of them was tried before."""

    piece: Plan
    attempts: Mapping[str, int]


@dataclass(frozen=True)
class Stop:
    """Stop after the current token or denoise step."""

    signal_number: int


@dataclass(frozen=True)
class Ready:
    """The replica has imported what it needs. `node`: the machine it is on, empty where that is
    this; `facts` are what it finds there.
    """

    facts: Mapping[str, object]
    node: str = ""


@dataclass(frozen=True)
class EventBatch:
    """Events of the replica's session; the files of a job that ended are in its folder."""

    events: tuple[Event, ...]


@dataclass(frozen=True)
class PieceDone:
    """No more of the piece. With `error`, or the `trace` of one that is not ours, the replica
    itself ends too.
    """

    error: HyimgError | None = None
    trace: str = ""


@dataclass(frozen=True)
class Exited:
    """The replica's process has ended, `why` in words: nothing more will come."""

    why: str


FromReplica = Ready | EventBatch | PieceDone | Beat | Exited


class Transport(Protocol):
    """Starts replicas by their numbers and carries messages; it knows of no job and no journal.

    Nothing here waits for a replica, but `events` for as long as it is told. `config`: the run's,
    as one replica has it.
    """

    config: RunConfig

    def start(self, setup: Setup) -> None:
        """Begin to start a replica, in place of an earlier one of the number."""

    def assign(self, number: int, work: Assign) -> None: ...

    def stop(self, number: int, signal_number: int) -> None: ...

    def events(self, timeout_s: float) -> list[tuple[int, FromReplica]]:
        """Some of what replicas have said, by their numbers; waits for the first of it.

        Nothing comes of a replica that was killed, or that another took the place of.
        """

    def kill(self, number: int) -> None:
        """End a replica, whatever it does; nobody waits for what it says."""

    def close(self) -> None:
        """End all replicas and what carried them."""
