"""Names of a job's files: a template, filled from the job and its first source image.

    {custom_id} {stem} {folder} {index} {seed}; {index:04}; {{ and }} for braces

A name is a path below the run's `outputs`, without its suffix. It cannot leave that folder, has
only characters that every file system accepts, and no hidden parts.
"""

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from string import Formatter

from hyimg_cli.settings.kinds import TEXT, Kind, text
from hyimg_cli.settings.values import BadValue, nearest, shown

FIELDS = ("custom_id", "stem", "folder", "index", "seed")
_TEXT = r"([^{}]|\{\{|\}\}|\{(custom_id|stem|folder)\}|\{(index|seed)(:0?[1-9]?[0-9]?d?)?\})*"
_HINT = f"its fields are {', '.join(f'{{{name}}}' for name in FIELDS)}; numbers: {{index:04}}"
# Below the 255 of most file systems: a suffix, a process id and ".tmp" are added for a while.
_MAX_PART = 200
_MAX_BYTES = 1000
_RESERVED = set('<>:"|?*\\')
_DIGITS = re.compile(r"([0-9]+)")
# Invisible, but they change what is shown: joiners in Persian or Hindi words and in emoji, and the
# tags of regional flags.
_JOINERS = "[\u200c\u200d\U000e0020-\U000e007f]"
# What no name may match. A folder must not hide a file that the run itself writes.
_FAULTS = {
    "^$|^/|//|/$": "a part of it is empty",
    r"(^|/)\.": "a part of it begins with a dot",
    "[. ]/": "a folder in it ends with a dot or a space",
    r"(?i)\.(png|jpg|webp|mp4|json|frames|tmp)/": "a folder in it is named like a file of a run",
}


def read_template(value: object) -> str:
    """Parse a template of names.

    The name that it gives for a job may still be invalid: see `fault_of`.
    """
    template: str = text("name").read(value)
    if rest := re.sub(_TEXT, "", template, count=1):
        bad = rest[: rest.find("}") + 1] or rest
        close = nearest(bad.strip("{}"), FIELDS)
        guess = f"did you mean {{{close}}}? " if close else ""
        hint = f"{guess}{_HINT}; write {{{{ and }}}} for braces"
        raise BadValue(f"{shown(template)}: {bad} is not a field", hint, "bad-name")
    if fault := fault_of(re.sub("//+", "/", template.format_map(dict.fromkeys(FIELDS, 1)))):
        hint = "it must be a path inside the run's outputs, such as {folder}/{stem}"
        raise BadValue(f"{shown(template)}: {fault}", hint, "bad-name")
    return template


NAME_TEMPLATE = Kind(read_template, TEXT)


def fill_template(template: str, values: Mapping[str, str | int]) -> str:
    """Return the name that a checked template gives. An empty folder leaves no slash."""
    return "/".join(filter(None, template.format_map(values).split("/")))


def tells_results_apart(template: str) -> bool:
    """True if a template gives each result of a line its own name."""
    fields = {name for _, name, _, _ in Formatter().parse(template)}
    return not fields.isdisjoint(("custom_id", "index", "seed"))


def _is_allowed(character: str) -> bool:
    """Return True if every disk and every terminal accepts a character in a name."""
    is_shown = character.isprintable() or re.match(_JOINERS, character) is not None
    return is_shown and character not in _RESERVED


def fit(text: str) -> str:
    """Return a user's file or folder name as part of a name: NFC, invalid characters as "_"."""
    clean = "".join(c if _is_allowed(c) else "_" for c in unicodedata.normalize("NFC", text))
    parts = (part.strip(" .") for part in clean.split("/"))
    return "/".join(p if any(map(str.isprintable, p)) else "_" for p in parts) if clean else ""


def fault_of(name: str) -> str:
    """Return the fault of a finished name; empty if it is valid."""
    for pattern, fault in _FAULTS.items():
        if re.search(pattern, name):
            return fault
    if odd := min((c for c in name if not _is_allowed(c)), default=""):
        return f"it contains {shown(odd)}, which not every disk allows"
    if len(name.encode()) > _MAX_BYTES or max(len(p.encode()) for p in name.split("/")) > _MAX_PART:
        limits = f"{_MAX_PART} bytes for each part and {_MAX_BYTES} in total"
        return f"it is too long: the limit is {limits}"
    return ""


def fold_name(path: str) -> str:
    """Return a path as compared by file systems that ignore case and how accents are encoded."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", path).casefold())


def natural_order(path: str) -> list[tuple[list[str | int], str]]:
    """Return a sort key that puts 2 before 10 and keeps folders together, ignoring case."""
    # After a split at numbers, every second part is a number.
    split = ((_DIGITS.split(fold_name(part)), part) for part in path.split("/"))
    return [([int(r) if at % 2 else r for at, r in enumerate(runs)], part) for runs, part in split]


def files_in_order(folder: Path, pattern: str) -> list[Path]:
    """Return what matches a pattern below a folder in natural order, hidden files left out."""
    names = {path.relative_to(folder).as_posix(): path for path in folder.glob(pattern)}
    shown = [name for name in names if not re.search(r"(^|/)\.", name)]
    return [names[name] for name in sorted(shown, key=natural_order)]


def clashes(paths: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield the index of each path that equals an earlier one, with the earlier index.

    Some file systems ignore case and how accents are encoded.
    """
    seen: dict[str, int] = {}
    for index, path in enumerate(paths):
        if (twin := seen.setdefault(fold_name(path), index)) != index:
            yield index, twin


def template_of(name: str) -> str:
    """Return the template of a name without fields."""
    return name.replace("{", "{{").replace("}", "}}")
