"""Messages between a run and its replicas, and the transport that carries them; no torch.

    to a replica      Setup as it starts, then Assign for each piece; Stop
    from a replica    Ready, then for each piece EventBatch until PieceDone; Beat now and then,
                      also on behalf of a replica that waits for room; Exited

Messages are frozen dataclasses without tensors, pickled by plain `pickle`. A replica writes its
files into its own folder. The run moves them to their final places, then writes their line.
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
    """How a replica works, and the plan from which it will get pieces.

    `folder`: where the run finds the replica's files, below the run's own folder. `session`: the
    module and class of the session. `beat_s`: seconds between heartbeats; `progress_s`: minimum
    seconds between reports of its jobs' progress.
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
    """Jobs to run, and how often each of them was tried before."""

    piece: Plan
    attempts: Mapping[str, int]


@dataclass(frozen=True)
class Stop:
    """Stop after the current token or denoise step."""

    signal_number: int


@dataclass(frozen=True)
class Ready:
    """The replica has imported what it needs.

    `node`: its machine, empty if that is this one; `facts`: what the replica found there.
    """

    facts: Mapping[str, object]
    node: str = ""


@dataclass(frozen=True)
class EventBatch:
    """Events of the replica's session; files of finished jobs are in its folder."""

    events: tuple[Event, ...]


@dataclass(frozen=True)
class PieceDone:
    """The piece has ended.

    With `error`, or the `trace` of an exception that is not a HyimgError, the replica ends too.
    """

    error: HyimgError | None = None
    trace: str = ""


@dataclass(frozen=True)
class Exited:
    """The replica's process has ended and sends nothing more; `why` says how."""

    why: str


FromReplica = Ready | EventBatch | PieceDone | Beat | Exited


class Transport(Protocol):
    """Starts replicas by number and carries messages; it does not know jobs or journals.

    Only `events` waits for replicas, up to its time limit. `config`: the run's configuration as
    adapted for one replica.
    """

    config: RunConfig

    def start(self, setup: Setup) -> None:
        """Begin to start a replica, replacing an earlier one with the same number."""

    def assign(self, number: int, work: Assign) -> None: ...

    def stop(self, number: int, signal_number: int) -> None: ...

    def events(self, timeout_s: float) -> list[tuple[int, FromReplica]]:
        """Return messages of replicas, each with the replica's number; wait for the first one.

        A replica that was killed or replaced sends nothing.
        """

    def kill(self, number: int) -> None:
        """Kill a replica at once; its remaining messages are dropped."""

    def close(self) -> None:
        """End all replicas and the transport itself."""
