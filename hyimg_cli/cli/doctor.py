"""`hyimg doctor`: check whether this machine is ready for a run."""

from collections import Counter
from dataclasses import asdict
from pathlib import Path

import typer

from hyimg_cli import __version__
from hyimg_cli.cli import options as o
from hyimg_cli.cli import render
from hyimg_cli.doctor.check import is_ready, run_checks
from hyimg_cli.doctor.checks import BY_NAME, CHECKS, RANKS
from hyimg_cli.doctor.models import model_name
from hyimg_cli.errors import UsageError
from hyimg_cli.loading.hub import stays_local
from hyimg_cli.spec.units import time_text

NOT_READY = 3


@o.takes(*o.settings_for("doctor"))
@stays_local()
def doctor(
    ctx: typer.Context,
    what: str | None = typer.Argument(
        None,
        metavar="determinism",
        show_default=False,
        help="Instead, draw one picture with the chosen model three times: alone, again and in a "
        "batch, and report which are equal to the bit.",
    ),
    recipe: Path | None = o.RECIPE,
    output_dir: Path | None = o.output("Folder runs will write to. Default: runs."),
    ranks: bool = o.switch("Start a second process and compute with it, too.", "--ranks"),
    as_json: bool = o.AS_JSON,
) -> None:
    """Check that this machine can run the chosen models, and draw a small test picture.

    Loads only the embedded weights, unless determinism is given. The report contains no user, host,
    token or absolute path, so you can attach it to an issue. Exit code 0: ready; 3: not ready.
    """
    settings = o.settings_of(ctx.params)
    config = o.run_config(settings, Path(settings["output_dir"].value or "runs"))
    has_ranks = ranks or config.parallel.of_session > 1
    checks = (*CHECKS, RANKS) if has_ranks else CHECKS
    if what is not None:
        if what not in BY_NAME:
            hint = f"remove it, or use {', '.join(BY_NAME)}"
            raise UsageError(f"{what} is not a check", hint=hint, code="usage.doctor")
        checks = ((what, BY_NAME[what]),)
    answers = []
    for answer in run_checks(config, checks):
        answers.append(answer)
        if not as_json:
            render.line(f"{answer.status:<8}{answer.name}: {answer.found}")
            if answer.status != "ok" and answer.hint:
                render.line(f"{'':<8}hint: {answer.hint}")
    models = {name: model_name(getattr(config.model, name)) for name in ("model", "video_model")}
    if as_json:
        facts = {"ready": is_ready(answers), "version": __version__} | models
        records = [asdict(one) | {"seconds": round(one.seconds, 3)} for one in answers]
        render.json_line(facts | {"checks": records})
    else:
        verdict = "ready" if is_ready(answers) else "not ready"
        counts = Counter(answer.status for answer in answers)
        counted = ", ".join(f"{counts[status]} {status}" for status in ("ok", "warning", "failed"))
        took = sum(one.seconds for one in answers)
        render.line(
            f"{verdict} for {' and '.join(models.values())}: {counted}, in {time_text(took)}"
        )
    raise typer.Exit(0 if is_ready(answers) else NOT_READY)
