"""What a declared setting says of itself beside its type and its default."""

from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, MISSING, dataclass, field, fields, replace
from typing import Any, Literal, get_args

from hyimg_cli.settings.kinds import Kind

JobKind = Literal["pictures", "videos"]
# The default of what the job's checkpoint says where nobody else does.
CHECKPOINT = object()
PREFIX = "HYIMG_"


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
    the "job" or the "checkpoint" is in the resume key by itself, and None changes none. The field
    says the rest: its `kind`, narrowed by `marks`, and its place, `attribute` of `table`, which is
    a recipe's table and a part of `RunConfig`.
    """

    help: str
    _: KW_ONLY
    name: str = ""
    panel: str = ""
    is_basic: bool = False
    only: JobKind | None = None
    flags: tuple[str, ...] = ()
    also_variable: str = ""
    in_line: bool = False
    aliases: tuple[str, ...] = ()
    pixels: InKey | Literal["job", "checkpoint"] | None = None
    default: Any = None
    marks: tuple[Any, ...] = ()
    kind: Kind = field(default_factory=lambda: Kind(object))
    table: str = ""
    attribute: str = ""

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
    def field(self) -> str:
        """The field of `RunConfig` that holds it."""
        return f"{self.table}.{self.attribute}"

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return PREFIX + self.name.upper()


def option(default: Any, help: str, *marks: Any, **declared: Any) -> Any:
    """A field of a part of `RunConfig` that is a setting; `marks` narrow its type."""
    row = Declaration(help, default=default, marks=marks, **declared)
    is_unset = default in (CHECKPOINT, None)
    return field(default=None if is_unset else default, metadata={"setting": row})


def declarations(part: Any, table: str) -> Iterator[Declaration]:
    """The settings among the fields of a part of `RunConfig`, which is a recipe's `table`."""
    for one in fields(part):
        if row := one.metadata.get("setting"):
            # Of a type or None, the type: nobody can write None.
            base = get_args(one.type)[0] if type(None) in get_args(one.type) else one.type
            default = None if row.default is MISSING else row.default
            kind = Kind(base, *row.marks)
            name = row.name or one.name
            yield replace(
                row, name=name, kind=kind, default=default, table=table, attribute=one.name
            )
