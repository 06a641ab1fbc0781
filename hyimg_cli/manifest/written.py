"""A text that `hyimg think` wrote on a manifest line: its note, and the effect of edits.

Fields of the line:

    cot_text        for people; if it was edited, it is tokenised again
    cot_token_ids   the text's own tokens, which are used as long as cot_text is unedited
    ratio_index     the size that the text stage chose, if it was asked to
    written         the note: digests that detect an edit, the text's tags, how it was made
                    (ending: the ids after the text; lengths, withdrawn: see `Replay.runs`)
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from hyimg_cli.settings.kinds import Kind, as_json
from hyimg_cli.settings.values import BadValue, shown
from hyimg_cli.spec import digest
from hyimg_cli.spec.job import ImageJob
from hyimg_cli.spec.options import BOT_TASKS

# Of a line whose prompt was rewritten: the given prompt, and the job's key.
REWRITTEN = "x_rewritten"
# Keys of a note, in addition to its tags.
_LISTS = ("ending", "lengths", "withdrawn")


def read_note(value: Any) -> Any:
    """Return the note of a written text. Its other keys are for people. Raises BadValue."""
    as_json(value)
    kinds = {"tags": str} | dict.fromkeys(_LISTS, int)
    # Everything that is read again must exist and have its type.
    if not (
        isinstance(value, dict)
        and all(isinstance(value.get(name), str) for name in ("text_sha256", "ids_sha256", "cut"))
        and value.get("bot_task") in BOT_TASKS[1:]
        and all(isinstance(value.get(name), list) for name in kinds)
        and all(type(one) is kind for name, kind in kinds.items() for one in value[name])
        and all(one >= 0 for name in _LISTS for one in value[name])
    ):
        what = f"{shown(value)} was not written by hyimg think"
        raise BadValue(what, "restore it, or remove it", "written")
    return value


NOTE = Kind(read_note, {})


@dataclass(frozen=True)
class Replay:
    """A text that was written earlier, as its job's AR stage had it.

    If it is fed in the same way, it gives exactly the same K/V. `job`: the job that would write it.
    `confidence`: what its writer had, as JSON. See `KnownText` for the rest.
    """

    job: ImageJob
    ids: tuple[int, ...]
    ending: tuple[int, ...]
    cut: str
    lengths: tuple[int, ...]
    withdrawn: tuple[int, ...]
    confidence: Any = None

    @classmethod
    def of(cls, job: ImageJob) -> "Replay | None":
        """Return the replay of a job's ids; None if they have no note or no size."""
        if not job.written_json or job.cot_token_ids is None or job.size.is_auto:
            return None
        note, ids = json.loads(job.written_json), job.cot_token_ids
        ending, lengths, withdrawn = (tuple(note[name]) for name in _LISTS)
        most = len(ids) + len(ending) + len(withdrawn)
        writing = replace(
            job,
            cot_token_ids=None,
            written_json="",
            bot_task=note["bot_task"],
            text=replace(job.text, max_new_tokens=most),
        )
        confidence = note.get("confidence")
        return cls(writing, ids, ending, note["cut"], lengths, withdrawn, confidence)

    def fed(self, opening: int) -> tuple[int, ...]:
        """Return the ids after a prompt that ends with the first `opening` ids of the text."""
        count = sum(self.lengths) - len(self.withdrawn)
        return (self.ids + self.ending)[opening:][: max(0, count)]

    def runs(self, opening: int) -> tuple[tuple[int, ...], ...]:
        """Return the ids in the runs that entered the network; none if the note was changed."""
        every = self.fed(opening) + self.withdrawn
        if len(every) != sum(self.lengths):
            return ()
        stops = accumulate(self.lengths)
        return tuple(every[stop - n : stop] for n, stop in zip(self.lengths, stops, strict=True))


def note(ids: Sequence[int], text: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the note of a text as it was written; `facts`: how it was made."""
    # The tags that the text's sections open and close.
    tags = _tags(text, set(re.findall(r"<(\w+)>.*?</\1>", text, re.DOTALL)))
    return digests_of(text, ids) | {"tags": tags} | dict(facts)


def digests_of(text: str | None, ids: Sequence[int] | None) -> dict[str, str]:
    """Return the digests by which a note detects an edit."""
    return {
        "text_sha256": digest.of_bytes((text or "").encode()),
        "ids_sha256": digest.of_json(list(ids or ())),
    }


def tag_fault(note: Mapping[str, Any], text: str) -> str:
    """Return the fault of an edited text's tags; empty if they are unchanged."""
    expected = list(note["tags"])
    found = _tags(text, {tag.strip("</>") for tag in expected})
    if found == expected:
        return ""
    for tag in Counter(expected) - Counter(found):
        return f"{tag} is missing"
    for tag in Counter(found) - Counter(expected):
        return f"{tag} appears {found.count(tag)} times"
    return f"its tags are in another order: {' '.join(found)}"


def _tags(text: str, names: set[str]) -> list[str]:
    """Return the tags with these names, in order."""
    return [tag for tag in re.findall(r"</?\w+>", text) if tag.strip("</>") in names]
