"""`hyimg first-night`: measure a model on some photographs of the user, and report it."""

from pathlib import Path

import typer

from hyimg_cli.cli import options as o
from hyimg_cli.cli import render
from hyimg_cli.errors import UsageError
from hyimg_cli.manifest.sources import sources
from hyimg_cli.settings.table import SETTINGS
from hyimg_cli.spec.units import counted

_PROMPT = "make the main object bright red"
# What may be given besides the model: settings of generate.
_SETTINGS = ("revision", "dtype", "quantization", "cpu_offload", "num_inference_steps")


@o.takes("model", "device", *_SETTINGS)
def first_night(
    ctx: typer.Context,
    folder: Path = typer.Argument(
        metavar="FOLDER", parser=o.folder, help="Folder with photographs."
    ),
    prompt: str = o.option(
        f'Edit each photograph by this prompt (default: "{_PROMPT}").',
        default=_PROMPT,
        metavar="<text>",
        is_basic=True,
    ),
    count: int = o.number("Use this many photographs (default 20).", default=20, min=1),
    output: Path | None = o.output("Output folder. Default: first-night.", is_basic=True),
    yes: bool = o.switch("Fetch the model without asking.", "-y", "--yes"),
) -> None:
    """Measure a model on 20 of your photographs, and write a report to share.

    hyimg first-night photos --model Qwen/Qwen-Image-Edit-2511

    Checks the machine, fetches the model, plans, edits the photographs twice (as a whole, and at
    their own resolution), kills both runs and resumes them, and edits the same ones by a plain loop
    of diffusers. first-night.json has figures only: no path, name, prompt or pixel. Exit code 1: a
    result is missing.
    """
    from hyimg_cli.measure.first_night.night import PAGE, RECORD, Night

    given = ctx.params
    if folder.is_file():
        hint = f"name the folder of the photographs: hyimg first-night {folder.parent}"
        raise UsageError("this is a file, not a folder", where=folder, hint=hint)
    found = [*sources([str(folder)], is_recursive=False).files.values()]
    if not found:
        raise UsageError("no photographs in this folder", where=folder, code="usage.no-manifest")
    # From the whole folder, because neighbours are alike.
    chosen = found[:: max(1, len(found) // count)][:count]
    values = {name: given[name] for name in ("model", "device", *_SETTINGS) if given.get(name)}
    flags = [word for name, value in values.items() for word in (SETTINGS[name].flag, str(value))]
    model, place = str(values.get("model", "tiny-image")), output or Path("first-night")
    night = Night(
        model, flags, chosen, prompt, place, device=str(values.get("device", "auto")), yes=yes
    )
    render.note(f"{counted(len(chosen), 'photograph')} with {model}; results in {place}")
    for said in night.steps():
        render.note(said)
    render.line(f"page: {place / PAGE}")
    render.line(
        f"to share: attach {place / RECORD} to an issue of hyimg, template First night; it has no "
        "path, name, prompt or pixel of yours"
    )
    raise typer.Exit(0 if night.is_whole else 1)
