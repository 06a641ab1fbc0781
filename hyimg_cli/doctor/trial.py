"""A short real run: the embedded model edits one picture twice, and the pixels must be equal."""

import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hyimg_cli.doctor.check import Check
from hyimg_cli.engine import runner
from hyimg_cli.errors import JobError
from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.journal.keys import precision
from hyimg_cli.manifest.manifest import manifest_of
from hyimg_cli.media.images import write_png
from hyimg_cli.models import registry
from hyimg_cli.settings.run import CacheConfig, OutputConfig, RunConfig
from hyimg_cli.spec.events import JobEnded
from hyimg_cli.spec.plan import Plan

if TYPE_CHECKING:
    from hyimg_cli.engine.session import Session

# The text stage, a source image and the denoise loop: every stage of a run, in few steps.
_JOB = {
    "custom_id": "trial",
    "prompt": "make it blue",
    "seed": 1,
    "num_inference_steps": 4,
    "max_new_tokens": 16,
}
_SIDE = 64


def trial(config: RunConfig) -> Check:
    """Seconds and pixel digest of the picture; failed where the second is another on a CPU."""
    from hyimg_cli.engine.session import Session

    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        model = replace(config.model, model=registry.EMBEDDED, revision=None)
        config = bare(replace(config, model=model), place)
        plan = _plan(place / "source.png")
        runs = []
        with Session(config) as session:
            for run in ("first", "second"):
                began = time.perf_counter()
                (digest,) = draw_pictures(session, plan, place / run).values()
                runs.append((digest, time.perf_counter() - began))
                session.forget()
    (first, first_s), (second, second_s) = runs
    found = f"{registry.EMBEDDED} drew an edit in {first_s:.1f} s with loading, again in "
    if first == second:
        return Check("ok", f"{found}{second_s:.1f} s with equal pixels ({first[:12]})")
    found += f"{second_s:.1f} s with other pixels ({first[:12]}, {second[:12]})"
    if precision(config.model)[0] == "cpu":
        return Check("failed", found, "please report it: on a CPU they should be equal")
    return Check("warning", found, "a replay will not be equal on this device")


def bare(config: RunConfig, place: Path) -> RunConfig:
    """The run's own with nothing kept from one drawing to the next; offload is for videos alone."""
    return replace(
        config,
        output=OutputConfig(place),
        model=replace(config.model, cpu_offload="none"),
        batch=replace(config.batch, prewarm=False),
        cache=CacheConfig(None),
    )


def _plan(source: Path) -> Plan:
    """The plan of one edit, its source picture written to `source`: a red square on white."""
    pixels = np.full((_SIDE, _SIDE, 3), 255, dtype=np.uint8)
    pixels[16:48, 16:48] = (220, 30, 30)
    write_png(source, pixels, {})
    line = json.dumps(_JOB | {"images": [str(source)]}).encode()
    return runner.make_plan(manifest_of(line, "trial"))


def draw_pictures(session: "Session", plan: Plan, folder: Path) -> dict[str, str]:
    """Pixel digests by job, of a run into `folder`. Raises JobError for a job that fails."""
    found = {}
    with RunFolder(folder) as run_folder:
        for event in session.run(plan, run_folder):
            if isinstance(event, JobEnded):
                if error := event.outcome.error:
                    raise JobError(error.message, hint=error.hint)
                found[event.outcome.custom_id] = event.outcome.outputs[0].pixel_sha256
    return found
