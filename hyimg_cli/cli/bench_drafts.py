"""`hyimg bench --compare drafts`: whether drafts choose as well as full pictures."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hyimg_cli.cli import options as o
from hyimg_cli.cli import packaged, render
from hyimg_cli.engine.runner import RunRequest
from hyimg_cli.errors import UsageError
from hyimg_cli.settings.config import Setting

NAME = "drafts"


def bench_drafts(
    given: Mapping[str, Any], flags: Mapping[str, Any], counts: str, candidates: int
) -> int:
    """Compare, show and record; the exit code, which is 0 whatever the verdict."""
    from hyimg_cli.measure.bench.drafts import compare_drafts, lines

    steps = [*dict.fromkeys(part.strip() for part in counts.split(","))]
    if not all(part.isdecimal() and 0 < int(part) <= 1000 for part in steps):
        what = f"--draft-steps {counts!r} is not a list of whole numbers"
        raise UsageError(what, hint="for example --draft-steps 6,8,10")
    if not given["manifest"]:
        hint = "give a few dozen typical jobs: --manifest jobs.jsonl"
        raise UsageError("drafts can only be compared on your own jobs", hint=hint)
    settings = o.settings_of(flags) | {"n": Setting("n", candidates, "flag")}
    folder = given["output_dir"] or Path("runs") / f"bench-{NAME}"
    request = RunRequest(packaged.read(given["manifest"]), o.run_config(settings, folder), settings)
    found = compare_drafts(request, [*map(int, steps)], render.teller(is_quiet=given["quiet"]))
    if given["as_json"]:
        render.json_line(found)
    else:
        render.lines("\n".join(lines(found)))
        render.note(f"written: {folder}/drafts.json")
    return 0
