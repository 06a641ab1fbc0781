"""JSON Schema of a manifest line and of a recipe, for editors; built from the declarations.

Its models are pydantic's: what each field may hold, and which fields a kind of job has. Files are
read by `line` and `settings.recipe`, whose messages name the place and the way out; they also see
what several fields together do wrong, so they refuse more than a schema can.
"""

from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, RootModel, create_model
from pydantic.json_schema import GenerateJsonSchema

from hyimg_cli.addresses import ADDRESS_PATTERN
from hyimg_cli.manifest.envelope import TASK_OF_URL
from hyimg_cli.manifest.fields import FIELDS, IN_MATRIX, NOT_IN
from hyimg_cli.manifest.matrix import MOST
from hyimg_cli.settings import kinds as k
from hyimg_cli.settings.file_names import NameTemplate
from hyimg_cli.settings.table import TABLES, Declaration, JobKind
from hyimg_cli.spec.job import MAX_SOURCE_IMAGES, TASKS

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_WRITTEN = r"[^\x00]*[^\s\x00][^\x00]*"
_NO_STORE = "|".join("".join(f"[{c.upper()}{c}]" for c in name) for name in k.NO_STORES)
_COUNT = "(interval|order|first|tail)=[0-9]{1,4}"
_PICTURE = rf"(?!(?:{_NO_STORE}):/|[Dd][Aa][Tt][Aa]:)[^\x00]+"
_PATTERNS: dict[type[k.Kind], str] = {
    k.CustomId: k.ID_PATTERN,
    k.DeviceName: k.DEVICE_PATTERN,
    k.SizeText: k.SIZE_PATTERN,
    k.LoraText: f"|{_WRITTEN}",
    k.StepCacheText: rf"none|taylor(:{_COUNT}(,{_COUNT})*)?",
    k.Text: _WRITTEN,
    k.Region: r"(?!https?://|data:)[^\x00]+",
    k.Folder: f"(?!{ADDRESS_PATTERN}){_WRITTEN}",
    k.RunPlace: f"(?!(?:{_NO_STORE}):/){_WRITTEN}",
    NameTemplate: _WRITTEN,
}


class _Closed(BaseModel):
    """Names that are not known are refused."""

    model_config = ConfigDict(extra="forbid", regex_engine="python-re")


class _Line(BaseModel):
    """So are they in a line, but for what is copied through."""

    model_config = ConfigDict(
        extra="allow",
        regex_engine="python-re",
        json_schema_extra={"patternProperties": {"^x_": {}}, "additionalProperties": False},
    )
    __pydantic_extra__: dict[Annotated[str, Field(pattern="^x_")], Any]


def line_model() -> type[BaseModel]:
    """A line of a manifest: a job of pictures, one of videos, with or without a
    picture to start from, or an OpenAI batch request.
    """
    pictures = _line("Pictures", "pictures", task=(Literal[TASKS], _unset("Default: by images.")))
    videos = _line("Videos", "videos", without=NOT_IN["t2v"], task=(Literal["t2v"], ...))
    started = _line("Videos from pictures", "videos", task=(Literal["i2v"], ...))
    request = _line(
        "OpenAI batch request",
        None,
        prompt=(str, _unset("In the body.")),
        method=(Literal["POST"], _unset("")),
        url=(Literal[tuple(TASK_OF_URL)], ...),
        body=(dict[str, Any], ...),
    )
    union = RootModel[pictures | videos | started | request]  # type: ignore[valid-type]
    return create_model("A line of an hyimg manifest", __base__=union)


def recipe_model() -> type[BaseModel]:
    """A recipe: its tables of settings."""
    tables: dict[str, Any] = {}
    for table, rows in TABLES.items():
        fields: dict[str, Any] = {
            name: (_annotation(row.kind), _unset(row.help, **_default(row)))
            for name, row in rows.items()
        }
        tables[table] = (create_model(table, __base__=_Closed, **fields), _unset(""))
    return create_model("An hyimg recipe", __base__=_Closed, **tables)


class _WithoutTitles(GenerateJsonSchema):
    """A field's name says as much."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def json_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The JSON Schema of a model, draft 2020-12."""
    return {"$schema": DIALECT} | model.model_json_schema(schema_generator=_WithoutTitles)


def _line(
    title: str, kind: JobKind | None, without: Collection[str] = (), **own: Any
) -> type[BaseModel]:
    """A line of one kind of job; None: with the fields of all, but those it is `without`."""
    fields: dict[str, Any] = {}
    for field in FIELDS:
        more = {"uniqueItems": True} if getattr(field.kind, "is_distinct", False) else {}
        if field.name not in without and (kind is None or field.only in (None, kind)):
            for name in (field.name, *field.aliases):
                fields[name] = (_annotation(field.kind, kind), _unset(field.help, **more))
    fields["prompt"] = (_annotation(k.Text()), Field(description="What to show, or to change."))
    return create_model(title, __base__=_Line, **(fields | own))


def _unset(help: str, **more: Any) -> Any:
    """A field that may be left out, but never be null."""

    def as_declared(schema: dict[str, Any]) -> None:
        del schema["default"]
        schema.update(more)

    return Field(None, description=help or None, json_schema_extra=as_declared)


def _default(row: Declaration) -> dict[str, Any]:
    """The default, where a file could say it."""
    return {"default": row.default} if isinstance(row.default, str | int | float) else {}


def _matrix(jobs: JobKind | None) -> Any:
    """Lists of what each field may hold that such jobs have."""
    fields: dict[str, Any] = {
        name: (
            Annotated[list[_annotation(field.kind)], Field(min_length=1, max_length=MOST)],  # type: ignore[misc]
            _unset("", uniqueItems=True),
        )
        for name, field in IN_MATRIX.items()
        if jobs is None or field.only in (None, jobs)
    }
    return create_model(f"Matrix of {jobs or 'any'}", __base__=_Closed, **fields)


def _annotation(kind: k.Kind, jobs: JobKind | None = None) -> Any:
    """A kind's values as pydantic describes them; `jobs`: the kind of job they are for."""
    match kind:
        case k.Integer(low, high):
            return Annotated[int, Field(strict=True, ge=low, le=high)]
        case k.Number(low, high, above_low):
            least = Field(gt=low) if above_low else Field(ge=low)
            return Annotated[float, Field(strict=True, le=high, allow_inf_nan=False), least]
        case k.NumberPair(low, high):
            end = Annotated[float, Field(strict=True, ge=low, le=high)]
            pair = Annotated[list[end], Field(min_length=2, max_length=2)]
            return Annotated[pair, AfterValidator(_rising)]
        case k.Truth():
            return Annotated[bool, Field(strict=True)]
        case k.Switch(values):
            return Literal[values] | Annotated[bool, Field(strict=True)]
        case k.OneOf(values, aliases):
            return Literal[(*values, *(alias for alias, _ in aliases))]
        case k.Paths():
            path = Annotated[str, Field(pattern=_whole(_PICTURE))]
            return path | Annotated[list[path], Field(max_length=MAX_SOURCE_IMAGES)]
        case k.Integers(most, high, is_distinct):
            number = Annotated[int, Field(strict=True, ge=0, le=high)]
            numbers = Annotated[list[number], Field(min_length=1, max_length=most)]
            return Annotated[numbers, AfterValidator(_distinct)] if is_distinct else numbers
        case k.Names():
            return list[Annotated[str, Field(pattern=_whole(_WRITTEN))]]
        case k.Text(_, may_be_empty=True):
            return Annotated[str, Field(pattern=_whole(f"|{_WRITTEN}"))]
        case k.Region():
            pixel = Annotated[int, Field(strict=True, ge=0)]
            box = Annotated[list[pixel], Field(min_length=4, max_length=4)]
            return Annotated[str, Field(pattern=_whole(_PATTERNS[k.Region]))] | box
        case k.Matrix():
            return _matrix(jobs)
        case k.Anything():
            return Any
    return Annotated[str, Field(pattern=_whole(_PATTERNS[type(kind)]))]


def _rising(pair: list[float]) -> list[float]:
    if pair[0] >= pair[1]:
        raise ValueError("the smaller number stands first")
    return pair


def _distinct(numbers: list[int]) -> list[int]:
    if len(set(numbers)) < len(numbers):
        raise ValueError("a number is there twice")
    return numbers


def _whole(pattern: str) -> str:
    # NOTE: Python's `$` also matches before a line's end at the end; that of JSON Schema does not.
    return rf"^(?:{pattern})$(?!\n)"
