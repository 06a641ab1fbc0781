"""Compare a server with `hyimg generate` on the same mixed jobs.

As whole batches, and from callers that ask for one picture at a time. Also time a single picture,
alone and while a batch runs.

    OMP_NUM_THREADS=1 python benchmarks/serving.py --out FILE
    OMP_NUM_THREADS=1 python benchmarks/serving.py --soak 600 --out FILE

Uses the embedded model; the kinds run in turn, `--rounds` times. Processor seconds count the
drawing process only. `--soak` sends requests of 64 clients over HTTP for a number of seconds: they
abandon a quarter of them, and a tenth is invalid.
"""

import argparse
import base64
import json
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import httpx
import numpy as np
import psutil
import torch
from measured import keep
from PIL import Image

from hyimg_cli.engine.run import AnySession, ManifestRun
from hyimg_cli.engine.runner import RunRequest, accept, cards
from hyimg_cli.engine.service import Service
from hyimg_cli.engine.session import Session
from hyimg_cli.errors import Interrupted
from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.manifest.manifest import manifest_of
from hyimg_cli.manifest.planner import make_plan
from hyimg_cli.settings.config import settings_of
from hyimg_cli.settings.run import CacheConfig, OutputConfig, RunConfig
from hyimg_cli.spec.events import JobEnded

TASKS = ("think_recaption", "none", "recaption", "none")
CLIENTS, SOAKERS = 32, 64
# Equal requests share a drawing, equal prompts their K/V, so none are equal.
_NEW = count(1000, 1000)
Line = dict[str, Any]


class WarmSession(Session):
    """A session that keeps its model between runs, like a service."""

    def close(self) -> None:
        """Do nothing."""


class Bench:
    """Runs jobs in folders below `place`."""

    def __init__(self, place: Path) -> None:
        self._place, self._numbers = place, count()
        output = OutputConfig(place, report=False)
        self.config = RunConfig(output, cache=CacheConfig(folder=place / "cache"))
        noise = np.random.default_rng(0)
        for number in range(3):
            pixels = noise.integers(0, 256, (64, 64, 3), np.uint8)
            Image.fromarray(pixels).save(place / f"{number}.png")

    def lines(self, number: int) -> list[Line]:
        """Return jobs with and without texts, and edits, of 8 to 30 steps."""
        return [
            {"custom_id": f"j{n}", "prompt": f"a red circle number {n}", "seed": n,
             "steps": 8 + n * 7 % 23, "bot_task": TASKS[n % 4]}
            | ({"images": [str(self._place / f"{n % 3}.png")]} if n % 5 == 4 else {})
            for n in range(number)
        ]  # fmt: skip

    def run(
        self, lines: list[Line], session: AnySession, hear: Callable[[Any], Any] = lambda _: None
    ) -> None:
        """Run lines as one manifest."""
        output = replace(self.config.output, folder=self._place / f"run-{next(self._numbers)}")
        config = replace(self.config, output=output)
        manifest = manifest_of("\n".join(map(json.dumps, lines)).encode(), "jobs")
        request = RunRequest(manifest, config, settings_of(config))
        summary = ManifestRun(request, lambda _: session).run(hear)
        assert summary.done == len(lines), "every job is done"

    def ask(self, line: Line, service: Service, name: str) -> None:
        """Draw one line as a single request."""
        manifest = manifest_of(json.dumps(line).encode(), "request")
        jobs, _ = accept(manifest, settings_of(self.config))
        session = service.session(name, name, is_online=True)
        with RunFolder(self._place / f"asked-{next(self._numbers)}") as folder:
            events = session.run(make_plan(jobs, cards(None)), folder)
            assert [event.is_done for event in events if isinstance(event, JobEnded)] == [True]


def seconds(work: Callable[[], object], process: psutil.Process) -> dict[str, float]:
    """Return the processor and wall seconds of some work in one process."""
    before, began = process.cpu_times(), time.perf_counter()
    work()
    after, wall = process.cpu_times(), time.perf_counter() - began
    processor = after.user + after.system - before.user - before.system
    return {"processor": round(processor, 2), "wall": round(wall, 2)}


def in_turns(lines: list[Line], ask: Callable[[Line, str], object]) -> None:
    """Let 32 callers ask for one line after another until all are drawn."""
    with ThreadPoolExecutor(CLIENTS, "client") as pool:
        list(pool.map(lambda line: ask(line, threading.current_thread().name), lines))


def throughput(bench: Bench, service: Service, server: "Server", given: Any) -> dict[str, Any]:
    """Time the same jobs offline, as a served batch, and as single requests."""
    offline, lines, numbers = WarmSession(bench.config), bench.lines(given.jobs), count()

    def generate() -> None:
        offline.forget()
        bench.run(lines, offline)

    def batch() -> None:
        bench.run(lines, service.session(f"batch-{next(numbers)}", "caller"))

    def clients() -> None:
        turn = next(numbers)
        in_turns(lines, lambda line, name: bench.ask(line, service, f"{name} {turn}"))

    me = psutil.Process()
    kinds: dict[str, tuple[Callable[[], object], psutil.Process]] = {
        "offline": (generate, me),
        "batch": (batch, me),
        "clients": (clients, me),
        "clients_http": (lambda: in_turns(lines, server.ask), server.process),
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in kinds}
    for number in range(given.rounds + 1):
        for name, (work, process) in kinds.items():
            took = seconds(work, process)
            if number:  # the first one warms up
                found[name].append(took)
                print(number, name, took, flush=True)
    ratios = {
        name: {
            clock: round(
                median(a[clock] / b[clock] for a, b in zip(of, found["offline"], strict=True)), 3
            )
            for clock in ("processor", "wall")
        }
        for name, of in found.items()
    }
    return found | {"times_offline": ratios}


def single(bench: Bench, service: Service, requests: int) -> dict[str, Any]:
    """Time a picture alone, and while a full batch runs."""
    chance, numbers = random.Random(0), count()

    def timed() -> list[float]:
        found = []
        for _ in range(requests):
            number = next(numbers)
            line = {"custom_id": f"s{number}", "prompt": f"a blue square {number}", "seed": number}
            began = time.perf_counter()
            bench.ask(line | {"steps": 20}, service, f"single {number}")
            found.append(time.perf_counter() - began)
            time.sleep(0.1 + 0.5 * chance.random())  # at any moment of the batch
        return found

    alone, ended = timed(), list[float]()
    session = service.session("night", "night")

    def hear(event: Any) -> None:
        if isinstance(event, JobEnded):
            ended.append(time.perf_counter())

    def work() -> None:
        with suppress(Interrupted):
            bench.run(bench.lines(2000), session, hear)

    batch = threading.Thread(target=work)
    batch.start()
    while len(ended) < 20:
        time.sleep(0.05)
    since = len(ended)
    beside = timed()
    moved = ended[since:]
    session.request_stop(signal.SIGTERM)
    batch.join()
    gaps = [after - before for before, after in pairwise(moved)]
    found: dict[str, Any] = {"alone": spread(alone), "beside": spread(beside)}
    found["ratio"] = {
        name: round(found["beside"][name] / of, 2) for name, of in found["alone"].items()
    }
    print(found, flush=True)
    return found | {"batch_pictures": len(moved), "longest_gap_s": round(max(gaps), 2)}


def spread(found: list[float]) -> dict[str, float]:
    """Return the median, the 95th percentile and the maximum."""
    p95 = quantiles(found, n=20, method="inclusive")[-1]
    return {"p50": round(median(found), 3), "p95": round(p95, 3), "max": round(max(found), 3)}


class Server:
    """`hyimg serve` in its own process."""

    def __init__(self, place: Path, *options: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = f"http://127.0.0.1:{free.getsockname()[1]}"
        command = [sys.executable, "-m", "hyimg_cli", "serve", "-q", "-o", str(place / "served")]
        command += ["--port", self.address.rpartition(":")[2], "--cache-dir", str(place / "cache")]
        self._child = subprocess.Popen([*command, *options])
        self.process = psutil.Process(self._child.pid)
        self.http = httpx.Client(base_url=self.address, timeout=600, limits=httpx.Limits())
        while True:
            with suppress(httpx.HTTPError):
                if self.http.get("/ready").status_code == 200:
                    return
            assert self._child.poll() is None, "the server has ended"
            time.sleep(0.1)

    def ask(self, line: Line, name: str) -> None:
        """Draw a line; its pictures are sent as data URLs."""
        body = {key: value for key, value in line.items() if key not in ("custom_id", "images")}
        route = "/v1/images/generations"
        if images := line.get("images"):
            data = [base64.b64encode(Path(path).read_bytes()).decode() for path in images]
            body["images"] = [{"image_url": f"data:image/png;base64,{one}"} for one in data]
            route = "/v1/images/edits"
        new = next(_NEW)
        body |= {"seed": body["seed"] + new, "prompt": f"{body['prompt']} {new}"}
        answer = self.http.post(route, json=body)
        assert answer.status_code == 200, answer.text

    def close(self) -> None:
        self.http.close()
        self._child.terminate()
        assert self._child.wait(120) == 0, "it ends in order"


def soak(server: Server, seconds: float) -> dict[str, Any]:
    """Let 64 clients send requests; they abandon a quarter, and a tenth is invalid."""
    until, counts, lock = time.monotonic() + seconds, Counter[str](), threading.Lock()

    def client(number: int) -> None:
        chance = random.Random(number)
        with httpx.Client(base_url=server.address, timeout=600) as http:
            while time.monotonic() < until:
                body: Line = {"prompt": f"a red circle number {chance.randrange(10**9)}"}
                body |= {"steps": chance.randrange(8, 31), "bot_task": chance.choice(TASKS)}
                kind, patience = chance.random(), 600.0
                if kind < 0.1:
                    body["steps"] = chance.choice([-1, "many", 10**6])
                elif kind < 0.35:
                    patience = chance.uniform(0.05, 3.0)
                try:
                    answer = http.post(
                        "/v1/images/generations", json=body, timeout=httpx.Timeout(patience)
                    )
                    name = str(answer.status_code)
                except httpx.TimeoutException:
                    name = "left"
                with lock:
                    counts[name] += 1
                if name == "429":
                    time.sleep(1)

    looks = list[dict[str, Any]]()

    def look() -> None:
        memory = server.process.memory_info().rss / 1e6
        facts = {"mb": round(memory), "descriptors": server.process.num_fds()}
        looks.append(facts | {"threads": server.process.num_threads(), "answers": dict(counts)})
        print(looks[-1], flush=True)

    look()
    with ThreadPoolExecutor(SOAKERS) as pool:
        clients = [pool.submit(client, number) for number in range(SOAKERS)]
        while time.monotonic() < until:
            time.sleep(min(60.0, seconds / 10))
            look()
        for one in clients:
            one.result()
    time.sleep(15)
    look()
    return {"looks": looks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--soak", type=float, default=0.0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as made, ExitStack() as ends:
        place = Path(made)
        server = Server(place, *(["--prefix-cache-mb", "100"] if given.soak else []))
        ends.callback(server.close)
        if given.soak:
            found = soak(server, given.soak)
        else:
            bench = Bench(place)
            service = Service(bench.config)
            service.start()
            found = {"throughput": throughput(bench, service, server, given)}
            found["single"] = single(bench, service, given.requests)
            service.stop(0.0)
    keep(given, found)


if __name__ == "__main__":
    main()
