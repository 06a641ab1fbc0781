"""The driver of many replicas: how many jobs a second it writes and journals, with the real queue,
folder and journal, and replicas that are simulated: their messages are ready when they are asked,
with the files, as replicas of other machines send them.

    python benchmarks/many_replicas.py --replicas 1000 --jobs 6000 --bytes 1500000 --out FILE
"""

import argparse
import json
import os
import tempfile
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from hyimg_cli.engine.replicas.messages import Assign, FromReplica, PieceDone, Ready, Setup, Told
from hyimg_cli.engine.replicas.parcels import Parcel
from hyimg_cli.engine.replicas.run import Replicas
from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.journal.keys import ReplicaFacts, key_of
from hyimg_cli.journal.provenance import hardware
from hyimg_cli.manifest.planner import make_plan
from hyimg_cli.models import registry
from hyimg_cli.settings.run import ModelChoice, OutputConfig, ParallelConfig, RunConfig
from hyimg_cli.spec.events import JobDone, JobStarted, Outcome, OutputFile
from hyimg_cli.spec.job import ImageJob, SizeRequest
from hyimg_cli.spec.options import TextSampling
from hyimg_cli.spec.plan import Plan

_AT_ONCE = 64


class Simulated:
    """A transport without processes: whatever it is given is done at once, by outcomes at hand."""

    def __init__(self, config: RunConfig, plan: Plan, data: bytes) -> None:
        self.config, self._data = config, data
        self._ready = Ready(ReplicaFacts.of(config, plan))
        self._said: deque[tuple[int, FromReplica | Parcel]] = deque()
        self._folders: dict[int, Path] = {}
        self._outcomes = {job.custom_id: _outcome(job, config) for job in plan.jobs}

    def start(self, setup: Setup) -> None:
        self._folders[setup.number] = setup.folder
        self._said.append((setup.number, self._ready))

    def assign(self, number: int, work: Assign) -> None:
        for job in work.piece.jobs:
            outcome = self._outcomes[job.custom_id]
            files = {outcome.outputs[0].path: self._data}
            self._said.append((number, Told((JobStarted(job.custom_id),))))
            self._said.append((number, Parcel(Told((JobDone(outcome),)), files, {})))
        self._said.append((number, PieceDone()))

    def events(self, timeout_s: float) -> list[tuple[int, FromReplica]]:
        some = [self._said.popleft() for _ in range(min(_AT_ONCE, len(self._said)))]
        with ThreadPoolExecutor(8) as writers:
            return list(writers.map(self._unpacked, some))

    def _unpacked(self, said: tuple[int, FromReplica | Parcel]) -> tuple[int, FromReplica]:
        number, message = said
        if isinstance(message, Parcel):
            return number, message.unpack(self._folders[number])
        return number, message

    def stop(self, number: int, signal_number: int) -> None: ...
    def wake(self) -> None: ...
    def kill(self, number: int) -> None: ...
    def close(self) -> None: ...


def main() -> None:
    """Run once, print the rate, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=3000)
    parser.add_argument("--bytes", type=int, nargs="+", default=[1_500_000, 5_000])
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found = [_measured(given.replicas, given.jobs, nbytes) for nbytes in given.bytes]
    for one in found:
        print("{replicas} replicas, {bytes} bytes a file: {jobs_per_s:.0f} jobs/s".format(**one))
    if given.out:
        given.out.write_text(json.dumps({"machine": hardware(), "runs": found}, indent=1) + "\n")


def _measured(replicas: int, jobs: int, nbytes: int) -> dict[str, Any]:
    """Jobs a second from the first piece to the last line, and what else the machine did."""
    with tempfile.TemporaryDirectory() as place:
        config = RunConfig(
            OutputConfig(Path(place) / "out"),
            model=ModelChoice(device="cpu"),
            parallel=ParallelConfig(replicas=replicas),
        )
        plan = make_plan(_jobs(jobs), registry.model_card)
        data = os.urandom(nbytes)
        simulated = Simulated(config, plan, data)
        run = Replicas(config, transport=lambda *_: simulated)
        load, cpu = os.getloadavg()[0], time.process_time()
        began = time.perf_counter()
        with RunFolder(config.output.folder) as folder:
            done = sum(isinstance(event, JobDone) for event in run.run(plan, folder))
        seconds = time.perf_counter() - began
        lines = (config.output.folder / "results.jsonl").read_bytes().splitlines()
        assert done == len(lines) == len({json.loads(line)["custom_id"] for line in lines}) == jobs
        return {
            "replicas": replicas,
            "jobs": jobs,
            "bytes": nbytes,
            "seconds": round(seconds, 2),
            "jobs_per_s": round(jobs / seconds, 1),
            "cpu_s": round(time.process_time() - cpu, 2),
            "load_before": round(load, 2),
            "load_after": round(os.getloadavg()[0], 2),
        }


def _outcome(job: ImageJob, config: RunConfig) -> Outcome:
    file = OutputFile(f"outputs/{job.custom_id}.png", "0" * 64, "0" * 64, 1024, 1024, job.seed)
    return Outcome(job.custom_id, "done", key=key_of(job, (), config), outputs=(file,))


def _jobs(count: int) -> list[ImageJob]:
    one = ImageJob(
        custom_id="",
        task="t2i",
        prompt="a red circle",
        images=(),
        model=registry.EMBEDDED,
        seed=0,
        size=SizeRequest(),
        num_inference_steps=50,
        guidance_scale=3.0,
        flow_shift=2.0,
        bot_task="none",
        text=TextSampling(1.0, 0, 1.0, 8),
    )
    return [replace(one, custom_id=f"j{n}", seed=n, prompt=f"circle {n}") for n in range(count)]


if __name__ == "__main__":
    main()
