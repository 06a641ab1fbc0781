"""What a declared setting says of itself beside its type and its default."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, Field, dataclass, fields
from typing import Any, Literal, get_args

from hyimg_cli.settings.kinds import FOLDER, RUN_FOLDER, SIZE, SPAN, STEP_CACHE, Form, Kind, text
from hyimg_cli.settings.paths import LORAS, REGION
from hyimg_cli.spec.job import SizeRequest
from hyimg_cli.spec.options import Lora, Region
from hyimg_cli.spec.step_cache import StepCache

JobKind = Literal["pictures", "videos"]
PREFIX = "HYIMG_"
# Types whose values have a form of their own.
_FORMS: dict[Any, Form] = {
    SizeRequest: SIZE,
    StepCache: STEP_CACHE,
    Region: REGION,
    tuple[float, float]: SPAN,
    tuple[Lora, ...]: LORAS,
}


@dataclass(frozen=True, eq=False)
class InKey:
    """How a setting that changes pixels stands in the resume key: under `name`, in a video's under
    `of_videos` if that is another, by the word for its value; without `words`, each value but the
    default is its own. A value without a word is not written: keys of runs before the setting was
    there stay.
    """

    name: str
    words: Mapping[Any, str] | None = None
    of_videos: str = ""


@dataclass(frozen=True, eq=False)
class Declaration:
    """A setting, as the field that holds it declares it.

    `name`: of the setting, where the field has another. `panel`: of the help; without one there is
    no flag. `is_basic`: on the first screen of a run's help. `flags`: as spelled, where they do not
    follow from the name. `also_variable`: of another program, read where its own variable is not
    set. `only`: the kind of job that reads it, where not both do. `in_line`: a manifest line may
    say it, too; `aliases`: by these other names. `pixels`: how they depend on it; what is said by
    the "job" or the "checkpoint" is in the resume key by itself, and None changes none. `commands`:
    those that run no manifest and take its flag all the same. The field says the rest: its `kind`
    and its place, `attribute` of `table`, which is a recipe's table and a part of `RunConfig`.
    """

    help: str
    _: KW_ONLY
    name: str
    kind: Kind | Form
    default: Any
    table: str
    attribute: str
    panel: str = ""
    is_basic: bool = False
    only: JobKind | None = None
    flags: tuple[str, ...] = ()
    also_variable: str = ""
    in_line: bool = False
    aliases: tuple[str, ...] = ()
    pixels: InKey | Literal["job", "checkpoint"] | None = None
    commands: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def spelled(self) -> tuple[str, ...]:
        """Its flags as Typer takes them: `--on/--off` for a truth."""
        is_truth = self.kind.is_truth
        return self.flags or ((f"{self.flag}/--no-{self.flag[2:]}",) if is_truth else (self.flag,))

    @property
    def off_flag(self) -> str:
        """The flag that switches a truth off; empty where there is none."""
        return self.spelled[-1].partition("/")[2]

    @property
    def is_by_name_alone(self) -> bool:
        """True of weights and folders, which no file may choose that nobody named."""
        return self.pixels == "checkpoint" or self.kind in (FOLDER, RUN_FOLDER)

    @property
    def field(self) -> str:
        """The field of `RunConfig` that holds it."""
        return f"{self.table}.{self.attribute}"

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return PREFIX + self.name.upper()


def declarations(part: Any, table: str) -> Iterator[Declaration]:
    """The settings among the fields of a part of `RunConfig`, which is a recipe's `table`."""
    for one in fields(part):
        if declared := one.metadata.get("setting"):
            own = {"name": one.name} | declared
            kind = _kind(one, own.pop("marks"), own.pop("spellings", {}))
            yield Declaration(**own, kind=kind, table=table, attribute=one.name)


def _kind(one: Field[Any], marks: Sequence[Any], aliases: Mapping[Any, str]) -> Kind | Form:
    """The kind of a field's values, by its type; a text is named by its field in messages."""
    # Of a type or None, the type: nobody can write None.
    base = get_args(one.type)[0] if type(None) in get_args(one.type) else one.type
    (mark,) = marks or (_FORMS.get(base),)
    if mark is None and base is str:
        mark = text(one.name.replace("_", " "), may_be_empty=one.default == "")
    return mark if isinstance(mark, Form) else Kind(base, mark, aliases)
