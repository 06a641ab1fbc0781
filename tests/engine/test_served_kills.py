"""SIGKILL at any moment of a process that serves three batches, then it again: nothing is lost,
nothing is made twice, and every pixel is that of `hyimg generate`.

The children of one process that has imported everything are killed, so that a kill costs about a
second. KILLS=30 in the environment kills more often.
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

KILLS = int(os.environ.get("KILLS", 4))
BATCHES = ("a", "b", "c")
# Runs the batches in a service once for each entry on standard input, [count, delay]: the child
# kills itself `delay` seconds behind the count-th event that the engine tells; with a count of 0 it
# may end. Prints each child's status.
DRIVER = """
import json, os, signal, sys, threading
from pathlib import Path
import torch
from hyimg_cli.engine.run import ManifestRun
from hyimg_cli.engine.runner import RunRequest
from hyimg_cli.engine.service import Service
from hyimg_cli.manifest.manifest import read_manifest
from hyimg_cli.settings.config import settings_of
from hyimg_cli.settings.run import BatchConfig, OutputConfig, RunConfig
import hyimg_cli.models.hunyuan_image3.family

noted, left, wait = Service.note, 0, 0

def note(self, ticket, told):
    global left
    noted(self, ticket, told)
    left -= 1
    if left == 0:
        threading.Timer(wait, os.kill, (os.getpid(), signal.SIGKILL)).start()

def serve(manifest, place, batches):
    batch = BatchConfig(max_size=4, prewarm=False)
    service = Service(RunConfig(OutputConfig(place), batch=batch))
    service.start()
    codes = []

    def run(name):
        config = RunConfig(OutputConfig(place / name), batch=batch)
        request = RunRequest(read_manifest(manifest), config, settings_of(config))
        ManifestRun(request, lambda _: service.session(name, "key")).run(lambda event: None)
        codes.append(0)

    threads = [threading.Thread(target=run, args=(name,)) for name in batches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    service.stop(0.0)
    sys.stderr.flush()
    os._exit(len(batches) - len(codes))

Service.note = note
manifest, place, *batches = sys.argv[1:]
for left, wait in json.load(sys.stdin):
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        serve(Path(manifest), Path(place), batches)
    print(os.waitpid(child, 0)[1], flush=True)
"""


def test_killed_at_any_moment_nothing_is_lost_and_nothing_is_made_twice(
    write_manifest: Callable[..., Path], run_cli: Callable[..., Any], tmp_path: Path
) -> None:
    lines = [
        {"custom_id": f"j{n}", "prompt": f"a red circle {n}", "steps": 2 + n % 3}
        | ({"max_new_tokens": 6} if n % 2 else {"bot_task": "none"})
        for n in range(max(6, KILLS))
    ]
    manifest = write_manifest(*lines)
    assert run_cli("generate", manifest, "-o", "alone").code == 0
    chance = random.Random(7)
    moments = [(chance.randrange(5, 70), chance.choice((0, 0.003, 0.02))) for _ in range(KILLS)]
    ran = subprocess.run(
        [sys.executable, "-c", DRIVER, str(manifest), str(tmp_path), *BATCHES],
        input=json.dumps([*moments, (0, 0)]),
        capture_output=True,
        text=True,
        check=True,
    )
    sys.stderr.write(ran.stderr)
    assert [int(code) for code in ran.stdout.split()] == [9] * KILLS + [0]
    alone = entries(tmp_path / "alone")
    for name in BATCHES:
        found = entries(tmp_path / name)
        assert sorted(one["custom_id"] for one in found) == sorted(
            one["custom_id"] for one in lines
        )
        assert pixels(found) == pixels(alone)
        outputs = {f"outputs/{path.name}" for path in (tmp_path / name / "outputs").iterdir()}
        assert outputs == {one["outputs"][0]["path"] for one in found}, "no temporary is left"


def entries(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def pixels(found: list[dict[str, Any]]) -> dict[str, str]:
    return {one["custom_id"]: one["outputs"][0]["pixel_sha256"] for one in found}
