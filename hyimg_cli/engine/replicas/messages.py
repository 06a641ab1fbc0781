"""Messages between a run and one of its replicas; no torch.

    to the replica     Setup, then for each piece Dispatch; Recorded after each OutcomeLine; Stop
    from the replica   Ready, then for each piece SessionEvents and OutcomeLines, and PieceDone

Pickled by plain `pickle`: frozen dataclasses without tensors.
"""

from dataclasses import dataclass
from pathlib import Path

from hyimg_cli.errors import HyimgError
from hyimg_cli.spec.events import Event, Outcome
from hyimg_cli.spec.plan import Plan
from hyimg_cli.spec.run import RunConfig


@dataclass(frozen=True)
class Setup:
    """How the replica works, and the plan of which it will get pieces; `folder` takes its files."""

    number: int
    config: RunConfig
    whole: Plan
    folder: Path
    log_level: int


@dataclass(frozen=True)
class Dispatch:
    """Jobs to do, and how often each of them was tried before."""

    piece: Plan
    attempts: dict[str, int]


@dataclass(frozen=True)
class Recorded:
    """The line is in the journal, on disk."""


@dataclass(frozen=True)
class Stop:
    """Stop after the current token or denoise step."""

    signal_number: int


@dataclass(frozen=True)
class Ready:
    """The replica has imported what it needs."""


@dataclass(frozen=True)
class SessionEvent:
    """An event of the replica's session."""

    event: Event


@dataclass(frozen=True)
class OutcomeLine:
    """An outcome whose file is in its place: to be recorded, and answered with `Recorded`."""

    outcome: Outcome


@dataclass(frozen=True)
class PieceDone:
    """No more of the piece. With `error`, or the `trace` of one that is not ours, the replica
    itself ends too.
    """

    error: HyimgError | None = None
    trace: str = ""


ToReplica = Setup | Dispatch | Recorded | Stop
FromReplica = Ready | SessionEvent | OutcomeLine | PieceDone
