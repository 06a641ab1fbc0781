"""JSON Schema of a manifest line and of a recipe, for editors; built from the declarations.

Its models are pydantic's: what each field may hold, and which fields a kind of job has. Files are
read by `line` and `settings.config`, whose messages name the place and a fix. These also check
combinations of fields, so they refuse more than a schema can.
"""

from collections.abc import Collection
from typing import Annotated, Any, Literal

from annotated_types import Len
from pydantic import BaseModel, ConfigDict, Field, RootModel, create_model
from pydantic.json_schema import GenerateJsonSchema

from hyimg_cli.manifest.envelope import TASKS_OF_URL
from hyimg_cli.manifest.fields import BY_NAME, FIELDS, IN_MATRIX, NOT_IN
from hyimg_cli.manifest.matrix import MOST
from hyimg_cli.settings.kinds import CHOICES, text
from hyimg_cli.settings.run import JobKind
from hyimg_cli.settings.table import TABLES
from hyimg_cli.spec.job import Task, TextTask

DIALECT = "https://json-schema.org/draft/2020-12/schema"


class _Closed(BaseModel):
    """Refuses unknown names."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _Line(_Closed):
    """Refuses unknown names in a line, except for names that are copied through."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={"patternProperties": {"^x_": {}}, "additionalProperties": False},
    )
    __pydantic_extra__: dict[Annotated[str, Field(pattern="^x_")], Any]


def line_model() -> type[BaseModel]:
    """Return the model of a manifest line.

    A line is a job of pictures, an answer, a video with or without a start picture, or an OpenAI
    batch request.
    """
    answers = _line(
        "Answers",
        "pictures",
        without=NOT_IN["t2t"],
        task=(TextTask, ...),
        choices=(CHOICES.annotation, _unset("The answers of which one is chosen.")),
    )
    pictures = _line(
        "Pictures", "pictures", without={"choices"}, task=(Task, _unset("Default: by images."))
    )
    videos = _line("Videos", "videos", without=NOT_IN["t2v"], task=(Literal["t2v"], ...))
    started = _line("Videos from pictures", "videos", task=(Literal["i2v"], ...))
    request = _line(
        "OpenAI batch request",
        None,
        prompt=(str, _unset("Inside the body.")),
        # Any text: the job's id is made from it. The method is read in any case.
        **dict.fromkeys(
            ("custom_id", *BY_NAME["custom_id"].aliases),
            (text("custom_id").annotation, _unset("Id of the request; any text.")),
        ),
        method=(Annotated[str, Field(pattern="^[Pp][Oo][Ss][Tt]$")], _unset("")),
        url=(Literal[tuple(TASKS_OF_URL)], ...),
        body=(dict[str, Any], ...),
    )
    union = RootModel[pictures | answers | videos | started | request]  # type: ignore[valid-type]
    return create_model("A line of an hyimg manifest", __base__=union)


def recipe_model() -> type[BaseModel]:
    """Return the model of a recipe: its tables of settings."""
    tables: dict[str, Any] = {}
    for table, rows in TABLES.items():
        fields: dict[str, Any] = {
            name: (row.kind.annotation, _unset(row.help, row.default)) for name, row in rows.items()
        }
        tables[table] = (create_model(table, __base__=_Closed, **fields), _unset(""))
    return create_model("An hyimg recipe", __base__=_Closed, **tables)


class _WithoutTitles(GenerateJsonSchema):
    """Leaves out titles, which only repeat the field's name."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def json_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return the JSON Schema of a model, draft 2020-12."""
    return {"$schema": DIALECT} | model.model_json_schema(schema_generator=_WithoutTitles)


def _line(
    title: str, kind: JobKind | None, without: Collection[str] = (), **own: Any
) -> type[BaseModel]:
    """Return the model of a line for one kind of job, or with all fields but `without` if None."""
    read = [one for one in FIELDS if kind is None or one.concerns(kind, denoises_latents=True)]
    # Lists of what each field may hold.
    axes: dict[str, Any] = {
        name: (Annotated[list[field.kind.annotation], Len(1, MOST)], _unset("", uniqueItems=True))  # type: ignore[name-defined]
        for name, field in IN_MATRIX.items()
        if field in read
    }
    matrix = create_model(f"Matrix of {kind or 'any'}", __base__=_Closed, **axes)
    fields: dict[str, Any] = {}
    for field in read:
        if field.name not in without:
            annotation = matrix if field.name == "matrix" else field.kind.annotation
            for name in (field.name, *field.aliases):
                fields[name] = (annotation, _unset(field.help))
    fields["prompt"] = (text("prompt").annotation, Field(description="What to show, or to change."))
    return create_model(title, __base__=_Line, **(fields | own))


def _unset(help: str, default: Any = None, **more: Any) -> Any:
    """A field that may be left out but not null, with its default if a file could contain it."""
    if isinstance(default, str | int | float):
        more["default"] = default

    def as_declared(schema: dict[str, Any]) -> None:
        del schema["default"]
        schema.update(more)

    return Field(None, description=help or None, json_schema_extra=as_declared)
