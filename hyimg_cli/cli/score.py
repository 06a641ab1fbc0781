"""`hyimg score`: add the scores that a run's folder, or a file of texts, lacks."""

from pathlib import Path

import typer

from hyimg_cli.cli import options as o
from hyimg_cli.cli import render
from hyimg_cli.cli.picks import RUN_OR_TEXTS
from hyimg_cli.cli.progress import stoppable
from hyimg_cli.errors import UsageError
from hyimg_cli.journal.picks import ScoresFile


@o.takes(
    *("score", "score_python", "score_option", "repeat"),
    *("score_timeout", "judge_url", "rubric"),
    # Of the model that `ask` loads.
    *("revision", "device", "dtype", "quantization"),
)
def score(
    ctx: typer.Context,
    run: Path = RUN_OR_TEXTS,
    recipe: Path | None = o.RECIPE,
    retry_failed: bool = o.switch(
        "Score candidates without a value again.", "--retry-failed", is_basic=True
    ),
    quiet: bool = o.QUIET,
) -> None:
    """Score the pictures of a run, or the texts of hyimg think.

    Scores go to scores.jsonl in the run's folder. Existing scores are kept; run the same command
    again to resume. Then choose with hyimg pick.
    """
    from hyimg_cli.scoring.ask import Questions
    from hyimg_cli.scoring.candidates import all_in, read_pool, score_candidates
    from hyimg_cli.scoring.scorers import scorers_of

    whole = o.run_config(o.settings_of(ctx.params), Path())
    config = whole.candidates
    if not (scorers := scorers_of(config, whole.model)):
        raise UsageError("no scorer given", hint="add one, for example --score outside")
    pool, finals = read_pool(run)
    every = [*all_in(pool), *(finals or {}).values()]
    tell = render.note_unless(quiet)
    with stoppable(), ScoresFile(run) as file, Questions(whole) as questions:
        asked = score_candidates(
            every, scorers, file, config, tell, retry_failed=retry_failed, questions=questions
        )
    if not asked:
        tell("nothing was scored: all candidates that the scorers can be shown have their scores")
