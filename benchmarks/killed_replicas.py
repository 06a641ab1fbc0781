"""Replicas killed and stopped at random while a real manifest runs: nothing lost, nothing twice,
the pixels and keys of one process. On processes of this machine, or on two Ray nodes (`--ray`), of
which one is lost, too: killed in a run, frozen in another. Then the command itself is killed in the
middle, some times, and given again.

    python benchmarks/killed_replicas.py --faults 30 --jobs 60 --out FILE
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from hyimg_cli.engine.replicas.cluster import RayCluster
from hyimg_cli.engine.replicas.local import LocalProcesses
from hyimg_cli.engine.replicas.run import Replicas
from hyimg_cli.engine.runner import accept
from hyimg_cli.engine.session import Session
from hyimg_cli.errors import MachineError
from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.journal.provenance import hardware
from hyimg_cli.journal.resume import ResumePolicy, resume
from hyimg_cli.manifest.manifest import read_manifest
from hyimg_cli.manifest.planner import make_plan
from hyimg_cli.models import registry
from hyimg_cli.parallel.watch import Limits
from hyimg_cli.settings.config import settle
from hyimg_cli.settings.run import ModelChoice, OutputConfig, ParallelConfig, RunConfig
from hyimg_cli.spec.events import JobEnded, ReplicaDied

# A stopped replica is to be noticed within a trial's patience, not within a minute.
_LIMITS, _BEAT_S = Limits(silence_s=20.0), 1.0
_STORE_BYTES = 80_000_000


def main() -> None:
    """Run the trial, print what became of it, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ray", action="store_true")
    parser.add_argument("--jobs", type=int, default=60)
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--commands", type=int, default=3, help="how often the command is killed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    os.environ["TRIAL"] = str(os.getpid())  # of every process that comes of this one
    with tempfile.TemporaryDirectory() as name, _cluster(given.ray) as cluster:
        place, address = Path(name), cluster and cluster.address
        found = _tried(given, place, address)
        print(json.dumps(found), flush=True)
        if cluster:
            found["nodes_lost"] = [
                _node_lost(given, place, cluster, number)
                for number in (signal.SIGKILL, signal.SIGSTOP)
            ]
        found |= _commands_killed(given, place, address)
    packages = ("hyimg-cli", "torch", "ray") if given.ray else ("hyimg-cli", "torch")
    versions = {name: metadata.version(name) for name in packages}
    today = {"date": date.today().isoformat(), "versions": versions}
    print(json.dumps(found), flush=True)
    if given.out:
        given.out.write_text(json.dumps({"machine": hardware()} | today | found, indent=1) + "\n")
    bad = ("lost", "twice", "other_pixels", "alive", "orphans", "lost_by_commands")
    sys.exit(any(one.get(name) for one in (found, *found.get("nodes_lost", ())) for name in bad))


def _tried(given: argparse.Namespace, place: Path, address: str | None) -> dict[str, Any]:
    """Counts of a run under faults, against the same jobs in one process."""
    jobs = _jobs(place, given.jobs)
    alone = RunConfig(OutputConfig(place / "alone"), model=ModelChoice(device="cpu"))
    with Session(alone) as session, RunFolder(alone.output.folder) as folder:
        for _ in session.run(make_plan(jobs, registry.model_card), folder):
            pass
    config = _config(given, place / "many", address)
    faults, deaths, rounds = _Faults(given.faults, given.seed), Counter[str](), 0
    began, load = time.monotonic(), os.getloadavg()[0]
    left = jobs
    while left or faults.left:
        rounds += 1
        assert rounds < 20, "it never ends"
        with RunFolder(config.output.folder) as folder:
            left = resume(folder, jobs, config, ResumePolicy(retry_failed=True)).to_run
            if not left:
                break
            try:
                for event in _several(config).run(make_plan(left, registry.model_card), folder):
                    if isinstance(event, JobEnded) and event.is_done:
                        faults.some()
                    elif isinstance(event, ReplicaDied):
                        deaths[event.why] += 1
            except MachineError as error:
                print(f"run {rounds}: {error}", file=sys.stderr)
    lines = _lines(config.output.folder)
    return {
        "transport": "ray" if address else "local",
        "jobs": given.jobs,
        "replicas": given.replicas,
        "killed": faults.done[signal.SIGKILL],
        "stopped": faults.done[signal.SIGSTOP],
        "deaths": dict(deaths),
        "runs": rounds,
        "failed_lines": sum(line["status"] == "failed" for line in lines),
        **_compared(config.output.folder, alone.output.folder),
        "seconds": round(time.monotonic() - began, 1),
        "load_before": round(load, 2),
        "load_after": round(os.getloadavg()[0], 2),
    }


def _node_lost(given: argparse.Namespace, place: Path, cluster: Any, how: int) -> dict[str, Any]:
    """Counts of a run in whose first third one of two machines is killed or frozen, with all that
    works there; a frozen one thaws behind the run. Then there are two again.
    """
    jobs = _jobs(place, given.jobs)
    config = _config(given, place / f"node-{how}", cluster.address)
    node, began = next(iter(cluster.worker_nodes)), time.monotonic()
    deaths, done = Counter[str](), 0
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    there = raylet.children(recursive=True)
    struck = 0.0
    with RunFolder(config.output.folder) as folder:
        for event in _several(config).run(make_plan(jobs, registry.model_card), folder):
            done += isinstance(event, JobEnded) and event.is_done
            if isinstance(event, ReplicaDied):
                deaths[f"{event.why}, seen after {time.monotonic() - struck:.0f} s"] += 1
            if done == given.jobs // 3 and not struck:
                struck, there = time.monotonic(), raylet.children(recursive=True)
                for one in (raylet, *(there if how == signal.SIGSTOP else ())):
                    one.send_signal(how)
    seconds = round(time.monotonic() - began, 1)
    for one in (raylet, *there):
        with suppress(psutil.Error):
            one.send_signal(signal.SIGCONT)
    found = _compared(config.output.folder, place / "alone")
    cluster.remove_node(node, allow_graceful=False)
    cluster.add_node(num_cpus=2, object_store_memory=_STORE_BYTES)
    fault = "killed" if how == signal.SIGKILL else "frozen"
    return {"node": fault, "deaths": dict(deaths), "seconds": seconds} | found


def _config(given: argparse.Namespace, out: Path, address: str | None) -> RunConfig:
    parallel = ParallelConfig(replicas=given.replicas, ray_address=address)
    return RunConfig(OutputConfig(out), model=ModelChoice(device="cpu"), parallel=parallel)


def _several(config: RunConfig) -> Replicas:
    transport = RayCluster if config.parallel.ray_address else LocalProcesses
    return Replicas(config, transport=transport, limits=_LIMITS, setup={"beat_s": _BEAT_S})


def _compared(out: Path, alone: Path) -> dict[str, int]:
    """A folder beside that of one process, and who is still there."""
    done = Counter(line["custom_id"] for line in _lines(out) if line["status"] == "done")
    ours, theirs = _made(out), _made(alone)
    time.sleep(8)  # Ray takes 5 s to end a stopped process
    return {
        "lost": sum(name not in done for name in theirs),
        "twice": sum(count > 1 for count in done.values()),
        "other_pixels": sum(ours.get(name) != facts for name, facts in theirs.items()),
        "alive": len(list(_replicas())),
    }


def _commands_killed(given: argparse.Namespace, place: Path, address: str | None) -> dict[str, Any]:
    """Counts of a command that is killed with SIGKILL, then given again, until all is done."""
    out, orphans, killed = place / "commands", 0, 0
    command = [sys.executable, "-m", "hyimg_cli", "generate", str(place / "jobs.jsonl")]
    command += ["-o", str(out), "--device", "cpu", "--replicas", str(given.replicas)]
    command += ["--no-report"] + (["--ray-address", address] if address else [])
    for number in range(given.commands + 1):
        ran = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wanted = given.jobs * (number + 1) // (given.commands + 1)
        while ran.poll() is None and (number == given.commands or _count(out) < wanted):
            time.sleep(0.1)
        if ran.poll() is None:
            ran.kill()
            killed += 1
        ran.wait()
        time.sleep(10)
        orphans += len(list(_replicas(psutil.process_iter())))
    done = Counter(line["custom_id"] for line in _lines(out) if line["status"] == "done")
    lost, ours, theirs = given.jobs - len(done), _made(out), _made(place / "alone")
    other = sum(ours.get(name) != facts for name, facts in theirs.items())
    found = {"commands_killed": killed, "orphans": orphans, "lost_by_commands": lost + other}
    return found | {"twice_by_commands": sum(count > 1 for count in done.values())}


def _count(folder: Path) -> int:
    path = folder / "results.jsonl"
    return len(path.read_bytes().splitlines()) if path.exists() else 0


class _Faults:
    """So many faults, each a moment after some job is done: a kill or a stop of any replica."""

    def __init__(self, count: int, seed: int) -> None:
        self.left, self.done, self._random = count, Counter[int](), random.Random(seed)

    def some(self) -> None:
        if self.left and self._random.random() < 0.8:
            self.left -= 1
            threading.Timer(self._random.random(), self._one).start()

    def _one(self) -> None:
        number = self._random.choice([signal.SIGKILL, signal.SIGSTOP])
        running = [one for one in _replicas() if one.status() != psutil.STATUS_STOPPED]
        if not running:
            threading.Timer(0.5, self._one).start()
            return
        self._random.choice(running).send_signal(number)
        self.done[number] += 1


def _replicas(among: Iterable[psutil.Process] | None = None) -> Iterator[psutil.Process]:
    """Processes of replicas, in any state; by default those below this one."""
    for one in among or psutil.Process().children(recursive=True):
        try:
            words = " ".join(one.cmdline())
            if one.environ().get("TRIAL") != os.environ["TRIAL"]:
                continue
        except psutil.Error:
            continue
        if "hyimg_cli.engine.replicas.replica" in words or words.startswith("ray::Replica"):
            yield one


def _jobs(place: Path, count: int) -> Any:
    lines = [
        {"custom_id": f"j{n}", "prompt": f"circle {n % 7}", "seed": n, "bot_task": "none"}
        for n in range(count)
    ]
    path = place / "jobs.jsonl"
    path.write_text("".join(json.dumps(line | {"steps": 20}) + "\n" for line in lines))
    return list(accept(read_manifest(path), settle({}, {}, {}))[0])


def _lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def _made(folder: Path) -> dict[str, tuple[str, str]]:
    done = [line for line in _lines(folder) if line["status"] == "done"]
    return {line["custom_id"]: (line["key"], line["outputs"][0]["pixel_sha256"]) for line in done}


@contextmanager
def _cluster(is_wanted: bool) -> Iterator[Any]:
    """Two nodes of two cores on this machine, with the environment that their workers need."""
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    if not is_wanted:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="ray-") as place:
        os.environ["RAY_TMPDIR"] = place
        from ray.cluster_utils import Cluster

        store = {"object_store_memory": _STORE_BYTES}
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0} | store)
        for _ in range(2):
            cluster.add_node(num_cpus=2, **store)
        try:
            yield cluster
        finally:
            cluster.shutdown()


if __name__ == "__main__":
    main()
