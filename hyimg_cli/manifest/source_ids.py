"""Make ids of jobs, and names of their results, from file names or values.

An id depends on the name alone, so it is the same when files are added or removed. A valid name is
used unchanged; a name with replaced characters ends in a digest of the whole name. A result is
named after its picture, unless another result has that name.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import count

from hyimg_cli.settings.kinds import is_custom_id
from hyimg_cli.settings.name_template import fault_of, fit, fold_name
from hyimg_cli.spec import digest

_DIGITS = 10
_LONGEST, _LONGEST_FOLDER, _KEPT = 60, 40, 28
_AS_IT_IS = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", re.ASCII)
_FOLDER_AS_IT_IS = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)
# A shell treats these specially, some even in quotes, and takes a leading "-" for a flag. Spaces
# and parentheses are kept, because people use them in names.
_OF_SHELLS = re.compile(r"[&$;'`!]|(?:^|(?<=/))-")
# Device names on Windows, whatever follows them after a dot.
_DEVICES = re.compile(r"(^|/)(con|prn|aux|nul|com[0-9]|lpt[0-9])(?=$|[./])", re.IGNORECASE)
# An id that ends in something like a digest could collide with another's.
_LIKE_DIGEST = re.compile(rf".*-[0-9a-f]{{{_DIGITS}}}", re.ASCII | re.DOTALL)


def ids_of_files(names: Iterable[str], suffixes: Iterable[str]) -> dict[str, str]:
    """Return the id of each file by its name, a path with `/`; `suffixes` are image suffixes.

    A subset of files gets the same ids as the whole, unless names differ in case only: then all but
    the first of them, in character order, end in a digest.
    """
    marks = tuple(f"-{suffix.lstrip('.')}" for suffix in suffixes)
    ids: dict[str, str] = {}
    claimed: set[str] = set()
    for name in sorted(set(names)):
        folder, slash, file = name.rpartition("/")
        stem, _, suffix = file.rpartition(".")
        # Other types are added to the id, so cat.jpg is always cat and cat.png always cat-png,
        # even without the other file.
        is_plain = suffix.lower() == "jpg"
        if (
            len(stem) > _LONGEST
            or not _AS_IT_IS.fullmatch(stem)
            # Such names belong to other file types, or end in a digest.
            or (is_plain and (stem.lower().endswith(marks) or _LIKE_DIGEST.fullmatch(stem.lower())))
        ):
            own = _with_digest(stem, name)
        else:
            own = stem if is_plain else f"{stem}-{suffix.lower()}"
        own = f"{_folder(folder)}{slash}{own}"
        if own.casefold() in claimed:
            own = f"{own}-{short(name)}"
        claimed.add(own.casefold())
        ids[name] = own
    return ids


def names_of_files(ids: Mapping[str, str], recorded: Mapping[str, str]) -> dict[str, str]:
    """Return the base name of each picture's results.

    It is the picture's own name. If two collide, the one whose id equals the name keeps it; the
    others add their type, then a digest. `ids`: by the picture's name. `recorded`: names of
    existing results by id, which are kept.
    """
    names: dict[str, str] = {}
    # For pictures without a name yet, try the next form if the first is taken; the last is the id.
    ways: dict[str, list[str]] = {}
    for name, own in ids.items():
        first = recorded.get(f"{own}-0", "")
        there = recorded.get(own) or (first.removesuffix("-0") if first.endswith("-0") else "")
        if there:
            names[name] = there
            continue
        stem, _, suffix = name.rpartition(".")
        plain = _DEVICES.sub(r"\g<0>_", _OF_SHELLS.sub("_", fit(stem)))
        marked = f"{plain}-{suffix.lower()}"
        fit_ones = (way for way in (plain, marked, f"{marked}-{short(name)}") if not fault_of(way))
        ways[name] = [*fit_ones, own]
    taken = {fold_name(own) for own in recorded.values()}
    while True:
        found = {name: left[0] for name, left in ways.items()}
        claims = Counter(map(fold_name, found.values()))
        met = [
            name
            for name, own in found.items()
            if len(ways[name]) > 1
            and (fold_name(own) in taken or (claims[fold_name(own)] > 1 and own != ids[name]))
        ]
        if not met:
            return names | found
        for name in met:
            ways[name].pop(0)


def in_id(text: str) -> str:
    """Return `text` as part of an id: unchanged, or its valid characters and a digest."""
    if len(text) <= _LONGEST and _AS_IT_IS.fullmatch(text):
        return text
    return _with_digest(text, text)


def request_ids(text: str) -> Iterator[str]:
    """Yield ids for the custom_id of an OpenAI request, best first: itself, if it is valid."""
    if is_custom_id(text):
        yield text
    for turn in count():
        yield _with_digest(text, text + "\n" * turn)


def short(text: str) -> str:
    """Return a short digest of a text, also of bytes that are not valid text."""
    return digest.of_bytes(text.encode("utf-8", "surrogatepass"))[:_DIGITS]


def _folder(path: str) -> str:
    """Return a folder's path as the part of an id before its last slash."""
    parts = path.split("/") if path else []
    kept = [
        part
        if _FOLDER_AS_IT_IS.fullmatch(part) and not _LIKE_DIGEST.fullmatch(part.lower())
        else _with_digest(part, "/".join(parts[: number + 1]), dots="")
        for number, part in enumerate(parts)
    ]
    whole = "/".join(kept)
    return whole if len(whole) <= _LONGEST_FOLDER else _with_digest(parts[-1], path, dots="")


def _with_digest(text: str, whole: str, *, dots: str = ".") -> str:
    """Return the valid part of `text`, shortened, with a digest of `whole`."""
    letters = "".join(
        c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c)
    )
    kept = re.sub(rf"[^A-Za-z0-9_{dots}-]+", "-", letters)[:_KEPT].strip("-.")
    return f"{kept or 'x'}-{short(whole)}"
