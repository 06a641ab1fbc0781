"""Choose what runs a plan: one session here, or replicas of it in processes of their own."""

import os
import secrets
import sys
from collections.abc import Generator
from dataclasses import replace
from typing import Protocol

from hyimg_cli.errors import require
from hyimg_cli.journal.journal import JobFolder
from hyimg_cli.journal.past_run import read_run_info
from hyimg_cli.settings.run import MachineInfo, RunConfig
from hyimg_cli.spec.events import Event
from hyimg_cli.spec.gc_paused import gc_paused
from hyimg_cli.spec.plan import Plan


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
    if not config.parallel.has_replicas and config.model.device not in ("auto", "cpu"):
        from hyimg_cli.parallel.devices import device_of

        device_of(config.model)


def find_place(config: RunConfig) -> RunConfig:
    """Find what the machines of a cluster have, where the run is done on one: as its folder tells,
    or as one of them does. This one may have no GPU.

    Raises MachineError where the cluster is not there, or has not what the replicas need.
    """
    if config.parallel.ray_address is None:
        return config
    found = read_run_info(config.output.folder).get("place")
    if isinstance(found, dict) and found.keys() == {"has_gpu", "has_triton"}:
        place = MachineInfo(**{name: bool(value) for name, value in found.items()})
    else:
        _admit_ray(config.parallel.ray_address)
        from hyimg_cli.engine.replicas.cluster import place_of

        place = place_of(config)
    return replace(config, model=replace(config.model, machine=place))


def _admit_ray(address: str) -> None:
    """Pass where Ray is installed; the cluster that it may start lets nobody else in.

    Raises MachineError.
    """
    require("ray", extra="ray")
    # Ray reads these as it is imported. Of a worker's death we tell ourselves, and not on stdout.
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS_SKIP_REGEX": "."}
    if address == "local" and "ray" not in sys.modules:
        # Ray listens to the network, and whoever gets in runs code.
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


@gc_paused()
def session_for(config: RunConfig) -> RunsPlans:
    """The one that `config` asks for. Raises MachineError where GPUs are missing."""
    # Imported here: `--help` must not wait for torch, and replicas need none in this process.
    if not config.parallel.has_replicas:
        from hyimg_cli.engine.session import Session

        return Session(config)
    from hyimg_cli.engine.replicas.run import Replicas

    if config.parallel.ray_address is None:
        return Replicas(config)
    _admit_ray(config.parallel.ray_address)
    from hyimg_cli.engine.replicas.cluster import RayCluster

    return Replicas(config, transport=RayCluster)
