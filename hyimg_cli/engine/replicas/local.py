"""Replicas as processes on this machine, without installing or listening on anything."""

import os
from contextlib import suppress
from queue import Empty, Queue

from hyimg_cli.engine.replicas.messages import Begin, Exited, FromReplica, Setup, Stop
from hyimg_cli.errors import MachineError
from hyimg_cli.journal.keys import precision
from hyimg_cli.journal.provenance import cores
from hyimg_cli.memory.available import available_bytes, available_memory, copies_of, replica_config
from hyimg_cli.memory.fit import check_fit
from hyimg_cli.parallel.launch import ChildProcess
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.spec.plan import Plan
from hyimg_cli.spec.units import bytes_text

# Maximum number of unread messages per replica, and of messages read at once.
_WAITING = 64
_AT_ONCE = 64


class LocalProcesses:
    """A launcher of child processes, each on a GPU or a share of the cores."""

    def __init__(self, config: RunConfig, plan: Plan, count: int) -> None:
        """Raises MachineError if GPUs are missing, or main memory cannot hold the models."""
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
        process = ChildProcess("hyimg_cli.engine.replicas.worker", environment, setup.beat_s)
        self._processes[setup.number] = process

        def heard(message: FromReplica) -> None:
            self._inbox.put((process, setup.number, message))

        process.listen(heard, lambda: heard(Exited(process.death())))
        process.post(setup)

    def begin(self, number: int) -> None:
        self._processes[number].post(Begin())

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
                        self._processes.pop(number).terminate()
        return found

    def kill(self, number: int) -> None:
        process = self._processes.pop(number, None)
        if process is not None:
            process.process.kill()
            process.terminate()

    def close(self) -> None:
        processes, self._processes = list(self._processes.values()), {}
        for process in processes:
            process.hang_up()  # end all of them at once, then wait for each
        for process in processes:
            process.terminate()

    def environment(self, number: int) -> dict[str, str]:
        """Return variables to add to a replica's environment, such as its visible GPUs."""
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
    """Check before loading that main memory can hold every replica's model on a CPU.

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
