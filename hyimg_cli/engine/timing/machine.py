"""This machine as it is now: its processors' names, how old this process is, who else computes."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from hyimg_cli.journal.provenance import cores, cpu_name

_STAT = Path("/proc/stat")
_SELF = Path("/proc/self/stat")
_GPUS = Path("/proc/driver/nvidia/gpus")
# An older process was not started for this one run.
_COMMAND_S = 60.0
# The system counts a processor's time in hundredths of a second.
_MOMENT_S = 0.25
_NOISE = 0.15
# Of all processors' time: where so much is used, more may be wanted.
_FULL = 0.9


def device_name(kind: str) -> str:
    """The processor that a kind of device, cpu or cuda, stands for here; without torch."""
    if kind == "cpu":
        return cpu_name()
    try:
        facts = [path.read_text() for path in sorted(_GPUS.glob("*/information"))]
    except OSError:
        facts = []
    lines = (line for text in facts for line in text.splitlines() if line.startswith("Model:"))
    return next((line.partition(":")[2].strip() for line in lines), kind)


def threads(replicas: int = 1) -> int:
    """Threads that one process computes with on the CPU; torch takes them so."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdecimal() and int(asked) else max(1, cores() // replicas)


def process_age_s() -> float:
    """Seconds since this process began; 0 where the system does not tell, or it is no command's."""
    try:
        began = int(_SELF.read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - began / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
    return age if 0 <= age < _COMMAND_S else 0.0


@dataclass(frozen=True)
class Processors:
    """A reading of the machine's processors: seconds that passed, were busy, and were ours; how
    many programs want one (`load`, over the last minute).
    """

    passed_s: float
    busy_s: float
    own_s: float
    load: float = 0.0

    @classmethod
    def read(cls) -> "Processors":
        """Where the system does not tell, nobody else is taken to compute."""
        own_s = sum(os.times()[:4])
        try:
            ticks = [int(word) for word in _STAT.read_text().split("\n")[0].split()[1:9]]
            # user, nice, system, idle, waiting for disks, interrupts, other machines.
            busy_s = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError, IndexError):
            busy_s = own_s
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
        return cls(time.perf_counter(), busy_s, own_s, load)

    def others_since(self, before: "Processors") -> float:
        """Cores that other processes had on average since an earlier reading, and where no core
        was left, those that they wanted.
        """
        passed_s, busy_s = self.passed_s - before.passed_s, self.busy_s - before.busy_s
        if passed_s <= 0:
            return 0.0
        own = (self.own_s - before.own_s) / passed_s
        others = busy_s / passed_s - own
        if busy_s > _FULL * cores() * passed_s:
            others = max(others, (self.load + before.load) / 2 - own)
        return max(0.0, others)


def others_now(before: Processors) -> float:
    """Cores that other processes have now; `before` was read a moment ago."""
    time.sleep(max(0.0, before.passed_s + _MOMENT_S - time.perf_counter()))
    others = Processors.read().others_since(before)
    return others if others > _NOISE else 0.0


def slowdown(others: float, threads: int, cores: int) -> float:
    """Factor by which so many threads take longer where others want so many cores."""
    return max(1.0, (others + threads) / max(cores, threads))
