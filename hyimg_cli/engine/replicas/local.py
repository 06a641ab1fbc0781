"""Replicas as processes on this machine: nothing is installed for them, and nothing listens."""

import os
from contextlib import suppress
from queue import Empty, Queue

from hyimg_cli.engine.replicas.messages import Assign, Exited, FromReplica, Setup, Stop
from hyimg_cli.errors import MachineError
from hyimg_cli.journal.keys import precision
from hyimg_cli.journal.provenance import cores
from hyimg_cli.memory.available import available_bytes, available_memory, copies_of, replica_config
from hyimg_cli.memory.fit import check_fit
from hyimg_cli.parallel.launch import ChildProcess
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.spec.plan import Plan
from hyimg_cli.spec.units import bytes_text

# Messages of each replica that may wait for the run to look at them, and that it takes at once.
_WAITING = 64
_AT_ONCE = 64


class LocalProcesses:
    """A transport: replicas are children of this process, on a GPU or a share of the cores each."""

    def __init__(self, config: RunConfig, plan: Plan, count: int) -> None:
        """Raises MachineError where there are fewer GPUs than they need, and on a CPU whose memory
        cannot hold a model each.
        """
        if precision(config.model)[0] == "cuda":
            from hyimg_cli.parallel import devices

            ranks, hint = config.parallel.of_session, "use fewer --replicas, or --device cpu"
            what = "replicas" if ranks == 1 else "ranks of all replicas"
            devices.refuse_missing_gpus(count * ranks, what, hint, code="machine.replicas")
        _refuse_little_memory(config, plan, count)
        self.config, self._count = replica_config(config, count), count
        self._processes: dict[int, ChildProcess] = {}
        self._inbox = Queue[tuple[ChildProcess, int, FromReplica]](_WAITING * count)

    def start(self, setup: Setup) -> None:
        environment = self.environment(setup.number)
        process = ChildProcess("hyimg_cli.engine.replicas.replica", environment, setup.beat_s)
        self._processes[setup.number] = process

        def heard(message: FromReplica) -> None:
            self._inbox.put((process, setup.number, message))

        process.listen(heard, lambda: heard(Exited(process.death())))
        process.post(setup)

    def assign(self, number: int, work: Assign) -> None:
        self._processes[number].post(work)

    def stop(self, number: int, signal_number: int) -> None:
        if number in self._processes:
            self._processes[number].post(Stop(signal_number))

    def events(self, timeout_s: float) -> list[tuple[int, FromReplica]]:
        found: list[tuple[int, FromReplica]] = []
        with suppress(Empty):
            while len(found) < _AT_ONCE:
                process, number, message = self._inbox.get(timeout=0.0 if found else timeout_s)
                if self._processes.get(number) is process:
                    found.append((number, message))
                    if isinstance(message, Exited):
                        self._processes.pop(number).end()
        return found

    def kill(self, number: int) -> None:
        process = self._processes.pop(number, None)
        if process is not None:
            process.process.kill()
            process.end()

    def close(self) -> None:
        processes, self._processes = list(self._processes.values()), {}
        for process in processes:
            process.hang_up()  # all end at once, then each is waited for
        for process in processes:
            process.end()

    def environment(self, number: int) -> dict[str, str]:
        """What a replica's process has beside our environment: GPUs of those that we see."""
        found = {}
        if "OMP_NUM_THREADS" not in os.environ:
            found["OMP_NUM_THREADS"] = str(max(1, cores() // self._count))
        if precision(self.config.model)[0] == "cuda":
            ranks = self.config.parallel.of_session
            every = ",".join(map(str, range(self._count * ranks)))
            names = os.environ.get("CUDA_VISIBLE_DEVICES", every).replace(" ", "").split(",")
            found["CUDA_VISIBLE_DEVICES"] = ",".join(names[number * ranks : (number + 1) * ranks])
        return found


def _refuse_little_memory(config: RunConfig, plan: Plan, count: int) -> None:
    """On a CPU every replica's model lies in the same memory; each is asked before any loads.

    Raises MachineError.
    """
    if copies_of(config, count) == 1:
        return
    for model in dict.fromkeys(group.model for group in plan.groups):
        part = available_memory(config, replicas=count)
        found = check_fit(model, plan.jobs_of_model(model), config, part)
        if not found.is_enough:
            raise MachineError(
                f"{count} replicas need {bytes_text(found.needed.weights)} for weights each, "
                f"but main memory has {bytes_text(available_bytes())} free",
                hint="use fewer --replicas",
                code="machine.memory",
            )
