"""Names of a job's files: a template, filled from the job and its first source image.

    {custom_id} {stem} {folder} {index} {seed}; {index:04}; {{ and }} for braces

A name is a path below the run's `outputs`, without its suffix. It stays there, is of characters
that any disk takes, and no part of it is hidden.
"""

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from string import Formatter

from hyimg_cli.settings.kinds import TEXT, Kind, read_text
from hyimg_cli.settings.values import BadValue, nearest, shown

FIELDS = ("custom_id", "stem", "folder", "index", "seed")
_TEXTS, _NUMBERS = FIELDS[:3], FIELDS[3:]
_ANY: Mapping[str, str | int] = dict.fromkeys(_TEXTS, "x") | dict.fromkeys(_NUMBERS, 1)
# Fields of earlier versions; of a picture they are known only once it is drawn.
_SIDES = ("width", "height")
# Below the 255 of most disks: a suffix, a process's number and ".tmp" stand around it for a while.
MAX_PART_BYTES = 200
_MAX_BYTES = 1000
_RESERVED = set('<>:"|?*\\')
# What a run itself puts beside a file, and what a folder would hide.
_OF_FILES = (".png", ".jpg", ".webp", ".mp4", ".json", ".frames", ".tmp")
_SPEC = re.compile(r"0?[1-9]?[0-9]?d?")
_HINT = f"its fields are {', '.join(f'{{{name}}}' for name in FIELDS)}"


def read_template(value: object) -> str:
    """A template of names. What it gives for a job may still be none: `fault_of` tells."""
    template = read_text("name", value)
    what, hint = _fault_of_template(template)
    if what:
        raise BadValue(f"{shown(template)}: {what}", hint, "bad-name")
    return template


NAME_TEMPLATE = Kind(read_template, TEXT)


def _fault_of_template(template: str) -> tuple[str, str]:
    """Fault of a template and the way out; the fault is empty where it may be used."""
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        return str(error).rstrip("."), "write {{ and }} for braces themselves"
    for _, name, spec, conversion in parts:
        if name in _SIDES:
            hint = f"leave it out: each result line has the size; {_HINT}"
            return f"{{{name}}} is no longer a field", hint
        if name is not None and name not in FIELDS:
            close = nearest(name, FIELDS)
            guess = f"did you mean {{{close}}}? " if close else ""
            return f"{{{name}}} is no field", guess + _HINT
        if conversion or (spec and not (name in _NUMBERS and _SPEC.fullmatch(spec))):
            return f"{{{name}}} has a format that is not read", "numbers: {index:04}"
    fault = fault_of(fill_template(template, _ANY))
    if template.startswith("/") or template.endswith("/"):
        fault = "it begins or ends with a slash"
    return fault, "it is a path below the run's outputs: {folder}/{stem}"


def fill_template(template: str, values: Mapping[str, str | int]) -> str:
    """The name that a checked template gives. An empty folder leaves no slash."""
    return "/".join(filter(None, template.format_map(values).split("/")))


def tells_results_apart(template: str) -> bool:
    """True if a template gives each result of a line a name of its own."""
    fields = {name for _, name, _, _ in Formatter().parse(template)}
    return not fields.isdisjoint(("custom_id", "index", "seed"))


def fit(text: str) -> str:
    """The name of a user's file or folder as part of a name: NFC, "_" for what none may hold."""
    clean = "".join(
        "_" if c in _RESERVED or not c.isprintable() else c
        for c in unicodedata.normalize("NFC", text)
    )
    return "/".join(part.strip(" .") or "_" for part in clean.split("/")) if clean else ""


def fault_of(name: str) -> str:
    """Fault of a finished name; empty where it may be used."""
    parts = name.split("/")
    folders = parts[:-1]
    if not all(parts):
        return "a part of it is empty"
    if any(part.startswith(".") for part in parts):
        return "a part of it begins with a dot"
    if any(folder.endswith((".", " ")) for folder in folders):
        return "a folder in it ends with a dot or a space"
    if odd := sorted({c for c in name if c in _RESERVED or not c.isprintable()}):
        return f"it holds {shown(odd[0])}, which not every disk takes"
    if any(folder.casefold().endswith(_OF_FILES) for folder in folders):
        return "a folder in it ends like a file of a run"
    if len(name.encode()) > _MAX_BYTES or any(len(p.encode()) > MAX_PART_BYTES for p in parts):
        return f"it is too long: {MAX_PART_BYTES} bytes for a part, {_MAX_BYTES} for all"
    return ""


def fold_name(path: str) -> str:
    """A path as disks compare it that know neither case nor ways to write an accent."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", path).casefold())


def clashes(paths: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Index of each path that is an earlier one, with the index of that.

    On some disks case and the way an accent is written make no difference.
    """
    seen: dict[str, int] = {}
    for index, path in enumerate(paths):
        if (twin := seen.setdefault(fold_name(path), index)) != index:
            yield index, twin


def template_of(text: str) -> str:
    """The template of a name that has no fields."""
    return text.replace("{", "{{").replace("}", "}}")
