"""Measure the memory and processor time of a manifest of many lines.

`generate` up to its first pictures (then it is stopped), `check` and `plan`, each in its own
process.

    python benchmarks/many_lines.py --lines 1000000 --commands generate --out FILE
    python benchmarks/many_lines.py --lines 100000 --against ../before     in turn with another tree

`simple` lines have an id and a prompt; `varied` ones prompts of 60 to 200 characters, eight edits
a photo, seeds and metadata.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

from measured import keep
from PIL import Image

_HERE = Path(__file__).resolve().parent.parent
_PICTURES = 3
_EDITS = 8


def main() -> None:
    """Run each command on each manifest, print what it took, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=100_000)
    parser.add_argument("--kinds", nargs="+", default=["simple", "varied"])
    parser.add_argument("--commands", nargs="+", default=["generate", "check", "plan"])
    parser.add_argument("--against", type=Path, help="another version's tree, in turn with this")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    trees = [_HERE, *filter(None, [given.against])]
    runs = []
    with tempfile.TemporaryDirectory() as place:
        for kind in given.kinds:
            manifest = _manifest(Path(place) / kind, kind, given.lines)
            for command, tree in product(given.commands, trees):
                found = {"kind": kind, "lines": given.lines} | _run(tree, command, manifest)
                print(json.dumps(found), flush=True)
                runs.append(found)
    keep(given, {"runs": runs})


def _run(tree: Path, command: str, manifest: Path) -> dict[str, Any]:
    """Run one command on one manifest; return its peak memory, wall time and processor time.

    For `generate`, up to its first pictures.
    """
    with tempfile.TemporaryDirectory() as place:
        line = [sys.executable, "-m", "hyimg_cli", command, str(manifest), "-o", f"{place}/out"]
        env = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        env |= {"HYIMG_CACHE_DIR": f"{place}/cache"}
        load, began = os.getloadavg()[0], time.perf_counter()
        with (Path(place) / "said").open("wb") as said:
            process = subprocess.Popen(line, env=env, stdout=said, stderr=said)
            if command == "generate":
                _until_drawn(process, Path(place) / "out" / "results.jsonl")
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode not in (0, -signal.SIGKILL):
            sys.exit((Path(place) / "said").read_text()[-2000:])
        seconds = time.perf_counter() - began
        return {
            "command": command,
            "tree": tree.name,
            "peak_mb": used.ru_maxrss * 1024 // 1_000_000,
            "seconds": round(seconds, 1),
            "cpu_s": round(used.ru_utime + used.ru_stime, 1),
            "load_before": round(load, 2),
        }


def _until_drawn(process: "subprocess.Popen[bytes]", journal: Path) -> None:
    """Wait for the first pictures, then end the run."""
    while process.poll() is None:
        if journal.exists() and journal.read_bytes().count(b"\n") >= _PICTURES:
            process.kill()
            return
        time.sleep(0.2)


def _manifest(folder: Path, kind: str, lines: int) -> Path:
    folder.mkdir()
    path = folder / "jobs.jsonl"
    of = _simple(lines) if kind == "simple" else _varied(lines, folder)
    with path.open("w") as file:
        file.writelines(json.dumps(line) + "\n" for line in of)
    return path


def _simple(lines: int) -> Iterator[Mapping[str, Any]]:
    return ({"custom_id": f"job-{n}", "prompt": f"circle {n}"} for n in range(lines))


def _varied(lines: int, folder: Path) -> Iterator[Mapping[str, Any]]:
    dice = random.Random(7)
    for n in range(lines):
        photo = f"photos/{n // _EDITS:06d}.png"
        if n % _EDITS == 0:
            _add_photo(folder / photo, n // _EDITS)
        words = "".join(dice.choices("abcdefgh  ", k=dice.randint(60, 200)))
        line = {"custom_id": f"shop/{n // _EDITS:06d}-{n % _EDITS}", "prompt": words}
        yield line | {"images": [photo], "seed": n * 7919, "metadata": {"order": n}}


def _add_photo(path: Path, number: int) -> None:
    """Add one of a hundred photos under another name."""
    path.parent.mkdir(exist_ok=True)
    first = path.parent / f"{number % 100:06d}.png"
    if number < 100:
        Image.new("RGB", (64 + 16 * (number % 5), 64 + 16 * (number % 3)), (number,) * 3).save(path)
    else:
        os.link(first, path)


if __name__ == "__main__":
    main()
