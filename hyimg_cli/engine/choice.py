"""Choose what runs a plan: one session here, or replicas of it in processes of their own."""

from collections.abc import Generator
from typing import Protocol

from hyimg_cli.journal.journal import JobFolder
from hyimg_cli.spec.events import Event
from hyimg_cli.spec.plan import Plan
from hyimg_cli.spec.run import RunConfig


class RunsPlans(Protocol):
    """The face that `Session` and `Replicas` share."""

    def request_stop(self, signal_number: int) -> None: ...

    def run(self, plan: Plan, folder: JobFolder) -> Generator[Event, None, None]: ...

    def close(self) -> None: ...


def replicas_of(plan: Plan, config: RunConfig) -> int:
    """Number of replicas that start for a plan: no more than it has jobs."""
    return max(1, min(config.parallel.replicas, len(plan.jobs)))


def refuse_missing_device(config: RunConfig) -> None:
    """Passes a device that is there. Raises MachineError, before anything is made or loaded.

    `auto` takes one that is there, and replicas count theirs: only for a GPU that is asked for by
    name torch is imported here.
    """
    if config.parallel.replicas == 1 and config.model.device not in ("auto", "cpu"):
        from hyimg_cli.parallel.devices import device_of

        device_of(config.model)


def session_for(config: RunConfig) -> RunsPlans:
    """The one that `config` asks for. Raises MachineError where GPUs are missing."""
    # Imported here: `--help` must not wait for torch, and replicas need none in this process.
    if config.parallel.replicas > 1:
        from hyimg_cli.engine.replicas.run import Replicas

        return Replicas(config)
    from hyimg_cli.engine.session import Session

    return Session(config)
