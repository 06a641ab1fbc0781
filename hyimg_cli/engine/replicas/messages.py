"""What a run and its replicas tell each other, and how replicas are started; no torch.

    to a replica      Setup as it starts, `begin` once its facts were compared, `stop`
    from a replica    Ready, EventBatch for the display, Ended; Beat now and then, also on behalf
                      of one that waits for room; Exited

Jobs and files do not travel here: a replica takes pieces of the run's folder, and writes there.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hyimg_cli.engine.replicas.joining import SharedWork
from hyimg_cli.errors import HyimgError
from hyimg_cli.parallel.watch import BEAT_S, Beat
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.spec.events import Event
from hyimg_cli.spec.plan import Plan

SESSION = "hyimg_cli.engine.session:Session"


@dataclass(frozen=True)
class Setup:
    """How a replica works, and on what.

    `process`: a token of its process. `share`: its place among all replicas, from 0 to 1. `place`,
    `shard`: the run's folder; `local`: of a folder at an address, the local one of this machine.
    `session`: the module and class of the session. `beat_s`: seconds between heartbeats;
    `progress_s`: minimum seconds between reports of its jobs' progress.
    """

    number: int
    process: str
    share: float
    config: RunConfig
    whole: Plan
    work: SharedWork
    place: Path
    shard: tuple[int, int] | None
    local: Path | None
    log_level: int
    session: str = SESSION
    beat_s: float = BEAT_S
    progress_s: float = 1.0


@dataclass(frozen=True)
class Begin:
    """Take pieces until none is left."""


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
    """Events of the replica's session, whose lines and files are in the run's folder."""

    events: tuple[Event, ...]


@dataclass(frozen=True)
class Ended:
    """The replica takes no more pieces: none is left, or it was stopped.

    With `error`, or the `trace` of an exception that is not a HyimgError, it could not go on.
    """

    error: HyimgError | None = None
    trace: str = ""


@dataclass(frozen=True)
class Exited:
    """The replica's process has ended and sends nothing more; `why` says how."""

    why: str


FromReplica = Ready | EventBatch | Ended | Beat | Exited


class Launcher(Protocol):
    """Starts and ends replicas by number; it does not know jobs or journals.

    Only `events` waits for replicas, up to its time limit. `config`: the run's configuration as
    adapted for one replica.
    """

    config: RunConfig

    def start(self, setup: Setup) -> None:
        """Begin to start a replica, replacing an earlier one with the same number."""

    def begin(self, number: int) -> None:
        """Let a replica that is ready take pieces."""

    def stop(self, number: int, signal_number: int) -> None: ...

    def events(self, timeout_s: float) -> list[tuple[int, FromReplica]]:
        """Return messages of replicas, each with the replica's number; wait for the first one.

        A replica that was killed or replaced sends nothing.
        """

    def kill(self, number: int) -> None:
        """Kill a replica at once; its remaining messages are dropped."""

    def close(self) -> None:
        """End all replicas and the launcher itself."""
