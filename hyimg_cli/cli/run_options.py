"""Options of `generate`, `plan` and `check`: one list, so that each reads the others' lines.

`check` and `plan` refuse what `generate` would refuse; flags that only matter once jobs run change
nothing there.
"""

from collections.abc import Callable

import typer

from hyimg_cli.cli import options as o
from hyimg_cli.settings.table import SETTINGS


def run_command(command: Callable[[typer.Context], None]) -> Callable[..., None]:
    """`command` with every option of a run, which it finds in `ctx.params`."""

    @o.takes(*(row.name for row in SETTINGS.values() if row.panel))
    def called(
        ctx: typer.Context,
        inputs: o.Inputs = None,
        prompt: o.Prompt = None,
        task: o.Task = None,
        recursive: o.Recursive = False,
        recipe: o.Recipe = None,
        no_config: o.NoConfig = False,
        resume: o.Resume = True,
        retry_failed: o.RetryFailed = False,
        force: o.Force = False,
        dry_run: o.DryRun = False,
        select: o.Select = None,
        limit: o.Limit = None,
        shard: o.Shard = None,
        assume_think: o.AssumeThink = 256,
        progress: o.Progress = "auto",
        as_json: o.AsJson = False,
        quiet: o.Quiet = False,
        verbose: o.Verbose = 0,
        help_all: o.HelpAll = False,
    ) -> None:
        command(ctx)

    return called
