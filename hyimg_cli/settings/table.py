"""All settings, by recipe table and by name; each is declared in a part of `RunConfig`."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, get_args

from hyimg_cli.settings.kinds import SPAN, STEP_CACHE, Kind, plain, text
from hyimg_cli.settings.paths import LORAS, REGION
from hyimg_cli.settings.run import InKey, JobKind, Readers, RunConfig
from hyimg_cli.spec.options import Lora, Region
from hyimg_cli.spec.step_cache import StepCache

PREFIX = "HYIMG_"


class Reader(NamedTuple):
    """Jobs, or a kind of models, that alone read some settings: in words, and their jobs."""

    words: str
    makes: tuple[JobKind, ...]


# What the readers of a setting are called; `of`: the kinds of jobs that they can make.
READERS: dict[Readers, Reader] = {
    "pictures": Reader("pictures", ("pictures",)),
    "videos": Reader("videos", ("videos",)),
    "latents": Reader("videos and diffusers image models", ("pictures", "videos")),
    "text": Reader("models that write text", ("pictures",)),
    "batches": Reader("models that draw jobs together", ("pictures",)),
    "negative": Reader("models that take a negative prompt", ("pictures", "videos")),
    "pair": Reader("models of two transformers", ("videos",)),
    "camera": Reader("models that follow a camera", ("videos",)),
}
# For types that have a kind of their own.
_KINDS: dict[Any, Kind] = {
    StepCache: STEP_CACHE,
    Region: REGION,
    tuple[float, float]: SPAN,
    tuple[Lora, ...]: LORAS,
}


@dataclass(frozen=True, eq=False)
class Field:
    """A field of a manifest line.

    `aliases`: its other names. `only`: the jobs, or the kind of models, that read it, if not all
    do. Given for a whole run, such a setting is left out of all other jobs. If `only` names jobs, a
    model of theirs that does not follow it refuses it.
    """

    name: str
    kind: Kind
    help: str
    aliases: tuple[str, ...] = ()
    only: Readers | None = None

    def concerns(self, kind: JobKind, *, denoises_latents: bool = False) -> bool:
        """Return True if jobs of a kind may read it. `denoises_latents`: their model does that."""
        if self.only == "latents" and kind == "pictures":
            return denoises_latents
        return self.only is None or kind in READERS[self.only].makes


@dataclass(frozen=True, eq=False, kw_only=True)
class Declaration(Field):
    """A setting, as declared by the field that holds it.

    `name`: the setting's name, if different from the field's. `panel`: its panel in the help;
    without one it has no flag. `is_basic`: shown on the first page of a run's help. `flags`:
    spellings that do not follow from the name. `also_variable`: another program's variable, read if
    its own is not set. `in_line`: a manifest line can set it. `pixels`: how they depend on it:
    settings of the "job" or the "checkpoint" are in the resume key anyway, and None changes no
    pixel. `commands`: commands without a manifest that also have its flag. The field gives the
    rest: its `kind`, and its place, `attribute` of `table`. A table belongs to a recipe and is a
    part of `RunConfig`.
    """

    default: Any
    table: str
    attribute: str
    panel: str = ""
    is_basic: bool = False
    flags: tuple[str, ...] = ()
    also_variable: str = ""
    in_line: bool = False
    pixels: InKey | Literal["job", "checkpoint"] | None = None
    commands: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def spelled(self) -> tuple[str, ...]:
        """Return its flags as Typer expects them: `--on/--off` for a boolean."""
        is_truth = self.kind.schema is bool
        return self.flags or ((f"{self.flag}/--no-{self.flag[2:]}",) if is_truth else (self.flag,))

    @property
    def variable(self) -> str:
        """The name of its environment variable."""
        return PREFIX + self.name.upper()


def _declarations(part: Any, table: str) -> Iterator[Declaration]:
    """Yield the settings among the fields of a part of `RunConfig`, a recipe's `table`.

    Its own come before the ones that it has in common with jobs.
    """
    for one in sorted(fields(part), key=lambda one: one.name not in part.__annotations__):
        if declared := one.metadata.get("setting"):
            own = {"name": one.name} | declared
            aliases = own.pop("spellings", None)
            # For a type or None, the type: None cannot be written.
            kind_of = get_args(one.type)[0] if type(None) in get_args(one.type) else one.type
            kind = next((mark for mark in get_args(kind_of) if isinstance(mark, Kind)), None)
            if kind_of is str:  # named by its field in messages
                kind = text(one.name.replace("_", " "), may_be_empty=one.default == "")
            kind = kind or _KINDS.get(kind_of) or plain(kind_of, aliases)
            yield Declaration(**own, kind=kind, table=table, attribute=one.name)


PARTS: dict[str, Any] = {part.name: part.type for part in fields(RunConfig)}
TABLES: dict[str, dict[str, Declaration]] = {
    table: {row.name: row for row in _declarations(part, table)} for table, part in PARTS.items()
}
SETTINGS = {name: row for rows in TABLES.values() for name, row in rows.items()}
BY_NAME = {name: row for row in SETTINGS.values() for name in (row.name, *row.aliases)}
