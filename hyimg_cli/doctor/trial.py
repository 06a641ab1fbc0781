"""Short real runs, to check which results have equal pixels.

The embedded model edits a picture twice, or the chosen model draws a picture alone, again, and in
a batch.
"""

import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hyimg_cli.doctor.check import Check
from hyimg_cli.doctor.models import model_name
from hyimg_cli.engine import runner
from hyimg_cli.errors import JobError
from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.journal.keys import precision
from hyimg_cli.manifest.manifest import manifest_of
from hyimg_cli.media.formats import encode
from hyimg_cli.models import registry
from hyimg_cli.settings.run import CacheConfig, OutputConfig, RunConfig
from hyimg_cli.spec.events import JobEnded, OutputFile
from hyimg_cli.spec.units import time_text

Lines = Sequence[Mapping[str, Any]]
# Every stage of a run, with few steps.
_JOB = {"num_inference_steps": 4, "max_new_tokens": 16}
# Different lengths of texts and prompts, so each forward combines the first job with other rows.
_PROMPTS = ("a red circle", "a blue square above a green circle", "a dog", "two yellow stars")
_SIDE = 64


def trial(config: RunConfig) -> Check:
    """Report seconds and pixel digest of an edit; failed if a repeat differs on a CPU."""
    model = replace(config.model, model=registry.EMBEDDED, revision=None)
    with tempfile.TemporaryDirectory() as name:
        source = Path(name, "source.png")
        pixels = np.full((_SIDE, _SIDE, 3), 255, dtype=np.uint8)
        pixels[16:48, 16:48] = (220, 30, 30)
        source.write_bytes(encode(pixels))
        edit = _JOB | {"prompt": "make it blue", "seed": 1, "images": [str(source)]}
        times = [time.perf_counter()]
        drawn: list[str] = []
        for digests in draw_pictures(replace(config, model=model), Path(name), [[edit], [edit]]):
            drawn += digests.values()
            times.append(time.perf_counter())
    (first, second), (first_s, second_s) = drawn, np.diff(times)
    found = f"{registry.EMBEDDED} drew an edit in {time_text(first_s)} with loading, again in "
    if first == second:
        return Check("ok", f"{found}{time_text(second_s)} with equal pixels ({first[:12]})")
    found += f"{time_text(second_s)} with other pixels ({first[:12]}, {second[:12]})"
    if precision(config.model)[0] == "cpu":
        return Check("failed", found, "please report it: on a CPU they should be equal")
    return Check("warning", found, "replays will not be equal on this device")


def determinism(config: RunConfig) -> Check:
    """Report which runs of one job, by the chosen model, give the same pixels.

    Failed if runs differ that should be equal: on a CPU all of them, on a GPU with
    `--deterministic` runs with the same jobs in the batch.
    """
    shared = _JOB | {"model": config.model.model}
    lines = [shared | {"prompt": prompt, "seed": n} for n, prompt in enumerate(_PROMPTS)]
    with tempfile.TemporaryDirectory() as name:
        runs = (lines[:1], lines[:1], lines, lines)
        alone, again, batch, batch_again = draw_pictures(config, Path(name), runs)
    (first,) = alone
    together = f"in a batch of {len(lines)}"
    found = {
        "alone, again": alone == again,
        together: alone[first] == batch[first],
        f"{together}, again": batch == batch_again,
    }
    told = "; ".join(f"{what}: {'equal' if it else 'different'}" for what, it in found.items())
    kind, dtype = precision(config.model)
    said = f"{model_name(config.model.model)} on {kind} in {dtype}, {told}"
    if all(found.values()):
        return Check("ok", said)
    if kind == "cpu" and config.batch.is_invariant:
        return Check("failed", said, "please report it: on a CPU they should be equal")
    if alone == again and batch == batch_again:
        return Check("ok", f"{said} (results may depend on the batch on this device)")
    if config.model.deterministic:
        return Check("failed", said, "please report it: with --deterministic they should be equal")
    return Check("warning", said, "use --deterministic to avoid operations that may differ")


def draw_pictures(
    config: RunConfig, folder: Path, runs: Sequence[Lines]
) -> Iterator[dict[str, str]]:
    """Yield the pixel digests of each run by job, from one session that forgets between runs.

    Raises JobError if a job fails.
    """
    from hyimg_cli.engine.session import Session

    config = replace(
        config,
        output=OutputConfig(folder),
        model=replace(config.model, cpu_offload="none"),  # for videos only
        batch=replace(config.batch, prewarm=False),
        cache=CacheConfig(None),
    )
    with Session(config) as session:
        for number, lines in enumerate(runs):
            manifest = manifest_of("\n".join(map(json.dumps, lines)).encode(), "doctor")
            digests = {}
            with RunFolder(folder / str(number)) as run_folder:
                for event in session.run(runner.make_plan(manifest), run_folder):
                    if isinstance(event, JobEnded):
                        if error := event.outcome.error:
                            raise JobError(error.message, hint=error.hint)
                        (file,) = event.outcome.outputs
                        assert isinstance(file, OutputFile), "the trial draws"
                        digests[event.outcome.custom_id] = file.pixel_sha256
            session.forget()
            yield digests
