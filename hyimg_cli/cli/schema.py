"""`hyimg schema`: print JSON schemas, with which editors complete and check manifests and
recipes.
"""

import json
from typing import Literal

import typer

from hyimg_cli.cli import render
from hyimg_cli.cli.completion import among
from hyimg_cli.errors import UsageError
from hyimg_cli.manifest.schema import json_schema, line_model, recipe_model
from hyimg_cli.settings.kinds import plain
from hyimg_cli.settings.values import BadValue

MODELS = {"line": line_model, "recipe": recipe_model}
_MEANT = {
    **dict.fromkeys(("manifest", "manifests", "lines", "job", "jobs"), "line"),
    **dict.fromkeys(("recipes", "settings", "config", "toml"), "recipe"),
}


def schema(
    of: str = typer.Argument(
        metavar="|".join(MODELS), autocompletion=among(MODELS), help="Schema to print."
    ),
) -> None:
    """Print the JSON Schema of a manifest line or a recipe. Editors use it to complete and check.

    hyimg schema recipe > hyimg-recipe.schema.json
    """
    try:
        name = plain(Literal["line", "recipe"]).read(of)
    except BadValue as bad:
        hint = f"did you mean {_MEANT[of]}?" if of in _MEANT else bad.hint
        raise UsageError(bad.what, hint=hint, code="usage.schema") from None
    render.lines(json.dumps(json_schema(MODELS[name]()), ensure_ascii=False, indent=2))
