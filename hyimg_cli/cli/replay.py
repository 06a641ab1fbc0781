"""`hyimg replay`: run the job of a finished file again and compare the pixels."""

import math
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import typer

from hyimg_cli.addresses import shown_place
from hyimg_cli.cli import options as o
from hyimg_cli.cli import render
from hyimg_cli.cli.progress import show_run, stoppable
from hyimg_cli.engine.run import ManifestRun
from hyimg_cli.engine.runner import RunRequest
from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.journal.resume import ResumePolicy
from hyimg_cli.measure.replay.records import Records
from hyimg_cli.measure.replay.restored import Wishes, restore_job
from hyimg_cli.measure.replay.run_folder import refuse_folder
from hyimg_cli.measure.replay.verdict import ReplayVerdict, answer_to, compared_file, verdict
from hyimg_cli.settings.config import settle
from hyimg_cli.settings.table import SETTINGS
from hyimg_cli.spec.model_name import with_components
from hyimg_cli.spec.options import MODEL

_replay_option = partial(o.option, panel="What is replayed")
# A replay runs one job and skips nothing; the result is compared with the file's own record.
ALWAYS = {"metadata": True, "report": False, "skip_invalid": False, "prewarm": False, "replicas": 1}
_SETTINGS = o.settings_for("replay")
AGAIN = ResumePolicy(resume=False, retry_failed=True, force=True)


@o.takes(*_SETTINGS)
def replay(
    ctx: typer.Context,
    file: Path = typer.Argument(
        metavar="FILE",
        help="Picture, MP4 or answer (.txt) that hyimg wrote, or a video's .json.",
    ),
    output_dir: Path | None = o.output("Output folder. Default: runs/replay-<id>."),
    images_from: Path | None = _replay_option(
        "Folder with the source images. Default: FILE's folder, then where its run found them."
    ),
    allow_changed: bool = _replay_option(
        "Run even if the model or a source image has changed.", "--allow-changed", default=False
    ),
    expect_equal: bool = _replay_option(
        "Exit with code 1 if the pixels, or the texts, are not equal.",
        "--expect-equal",
        default=False,
    ),
    model: str | None = o.option("Folder or hub id of the recorded model.", panel=MODEL),
    progress: str = o.PROGRESS,
    as_json: bool = o.AS_JSON,
    quiet: bool = o.QUIET,
    verbose: int = o.VERBOSE,
) -> None:
    """Run the job of a finished file again, and compare the pixels, or the text of an answer.

    Uses the settings recorded in the file: job, seeds, precision, quantization and ranks. Flags
    override them; environment variables for a job's own settings do not. Exit code 0: the job ran;
    1: it failed, or pixels differ and --expect-equal is given; 2: the file has no record, or its
    model or a source image has changed; 3: this machine cannot run it.
    """
    render.log_to_stderr(verbose)
    with stoppable():
        raise typer.Exit(_run(ctx.params, render.command_line(ctx)))


def _run(given: Mapping[str, Any], again: str) -> int:
    """Run the job, show what is equal, and return the exit code."""
    style = render.style_of(given)
    described = Records().read(given["file"])
    wishes = Wishes(
        images_from=given["images_from"],
        model=given["model"] and with_components(given["model"], given["components"]),
        revision=given["revision"],
        components=given["video_components"],
        device=given["device"] or "auto",
        allow_changed=given["allow_changed"],
    )
    source = restore_job(described, wishes)
    folder = given["output_dir"] or Path("runs") / f"replay-{source.custom_id.replace('/', '-')}"
    refuse_folder(folder, described.path, source.custom_id)
    render.remarks(source.notes, style)
    # The recorded settings, overridden by those of the user; the job names the model.
    o.refuse_misspelt(os.environ)
    of_jobs = {row.variable for row in SETTINGS.values() if row.in_line}
    environ = {name: value for name, value in os.environ.items() if name not in of_jobs}
    flags = {name: given[name] for name in _SETTINGS if given[name] is not None}
    settings = settle(flags, environ, {}, record=source.settings | ALWAYS)
    config = o.run_config(settings, folder)
    request = RunRequest(source.manifest, config, settings, policy=AGAIN)
    code = show_run(ManifestRun(request), style, again=again, retry=again)
    made_again = RunFolder(folder).results().get(source.custom_id, {})
    # A failed gate (exit code 1) does not matter to a replay.
    if code > 1 or made_again.get("status") != "done":
        return code
    original = compared_file(described)
    if original is None:
        render.remarks([f"no video next to {described.path.name} to compare with"], style)
        return 1 if given["expect_equal"] else 0
    layer = described.record.layer if described.record else 0
    made, digest = answer_to(original, folder, made_again, layer)
    found = verdict(described, original, made, digest)
    _show(found, original, made, style)
    return 1 if given["expect_equal"] and not found.equal else 0


def _show(found: ReplayVerdict, original: Path, made: Path, style: render.Style) -> None:
    of, tell = shown_place(original), render.note_unless(style.is_quiet)
    if style.as_json:
        render.json_line({"replay": {"file": of, "made": str(made), **found.to_json()}})
    if found.equal:
        tell(f"equal: the {found.compared} of {made} are those of {of}")
        return
    if found.psnr is None:
        apart = found.not_measured
    elif math.isinf(found.psnr):
        apart = "but they differ once compressed"
    else:
        apart = f"PSNR {found.psnr:.2f} dB, at most {found.max_abs:g} levels"
    tell(f"not equal: the {found.compared} of {made} and {of} differ: {apart}")
    for reason in found.reasons or ("no recorded setting differs; please report it",):
        tell(f"  possible reason: {reason}")
