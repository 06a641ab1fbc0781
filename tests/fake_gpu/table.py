"""The table of all traces, a row each: `benchmarks/results/fake-gpu.json`.

cd tests; python -m fake_gpu.table films Wan2.1-T2V-14B --offload group    traces it again
"""

import argparse
import json
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fake_gpu.trace import Trace

PATH = Path(__file__).parents[2] / "benchmarks" / "results" / "fake-gpu.json"
_HEAD = {
    "machine": "2-core CPU, torch's fake CUDA: tensors' sizes alone, without gaps and workspaces",
    "command": "cd tests; python -m fake_gpu.table FAMILY NAME",
}
_LIBRARIES = ("torch", "diffusers", "transformers")


def rows() -> list[dict[str, Any]]:
    """Return every row as it is in the file."""
    found: list[dict[str, Any]] = json.loads(PATH.read_text())["rows"]
    return found


def put(family: str, name: str, offload: str, found: "Trace") -> None:
    """Write a row in place of the one for the same run."""
    row = {
        "family": family,
        "name": name,
        "offload": offload,
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {one: version(one) for one in _LIBRARIES},
        **asdict(found),
    }
    kept = rows() if PATH.exists() else []
    same = (family, name, offload)
    kept = [one for one in kept if (one["family"], one["name"], one["offload"]) != same] + [row]
    kept.sort(key=lambda one: (one["family"], one["name"], one["offload"]))
    PATH.write_text(json.dumps(_HEAD | {"rows": kept}, indent=1) + "\n")


def arguments(description: str | None) -> argparse.Namespace:
    """The family, the name and the offload on the command line of a trace."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("family")
    parser.add_argument("name")
    parser.add_argument("--offload", default="none", choices=("none", "model", "group", "experts"))
    return parser.parse_args()


def main() -> None:
    from fake_gpu.trace import traced  # the rows can be read without the libraries

    given = arguments(__doc__)
    put(given.family, given.name, given.offload, traced(given.family, given.name, given.offload))


if __name__ == "__main__":
    main()
