"""A text that `hyimg think` wrote, on its manifest line: what is noted of it, and what of it still
holds once people have edited it.

    cot_text        for people; edited, it is tokenised as it stands
    cot_token_ids   the text's own tokens: what counts as long as cot_text is as it was written
    ratio_index     the size that the text stage chose, where it was asked to
    written         the note: digests that tell an edit, the text's tags, how it came about
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hyimg_cli.settings.kinds import Anything, BadValue, shown
from hyimg_cli.spec import digest

_SECTION = re.compile(r"<(\w+)>.*?</\1>", re.DOTALL)


class Note(Anything):
    """What is noted of a written text. Keys beyond the digests and the tags are for people."""

    def read(self, value: Any) -> Any:
        super().read(value)
        is_whole = (
            isinstance(value, dict)
            and all(isinstance(value.get(name), str) for name in ("text_sha256", "ids_sha256"))
            and isinstance(value.get("tags"), list)
            and all(isinstance(tag, str) for tag in value["tags"])
        )
        if not is_whole:
            what = f"{shown(value)} is no note of hyimg think"
            raise BadValue(what, "leave it as it was written, or take it out", "written")
        return value


def note(ids: Sequence[int], text: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The note of a text as it was written; `facts`: how it came about."""
    digests = {"text_sha256": _of_text(text), "ids_sha256": _of_ids(ids)}
    return digests | {"tags": _tags(text, _names(text))} | dict(facts)


def is_as_written(note: Mapping[str, Any], text: str) -> bool:
    return bool(_of_text(text) == note["text_sha256"])


def has_its_ids(note: Mapping[str, Any], ids: Sequence[int]) -> bool:
    return bool(_of_ids(ids) == note["ids_sha256"])


def fault_of_tags(note: Mapping[str, Any], text: str) -> str:
    """What is wrong with the tags of an edited text; empty where they are as they were."""
    expected = list(note["tags"])
    found = _tags(text, {tag.strip("</>") for tag in expected})
    if found == expected:
        return ""
    for tag in expected:
        if found.count(tag) < expected.count(tag):
            return f"{tag} is missing"
    for tag in found:
        if found.count(tag) > expected.count(tag):
            return f"{tag} is there {found.count(tag)} times"
    return f"its tags stand in another order: {' '.join(found)}"


def _names(text: str) -> set[str]:
    """The names of the sections that a text has: of tags that are opened and closed."""
    return set(_SECTION.findall(text))


def _tags(text: str, names: set[str]) -> list[str]:
    """The tags of these names, in order."""
    return [tag for tag in re.findall(r"</?\w+>", text) if tag.strip("</>") in names]


def _of_text(text: str) -> str:
    return digest.of_bytes(text.encode())


def _of_ids(ids: Sequence[int]) -> str:
    return digest.of_json(list(ids))
