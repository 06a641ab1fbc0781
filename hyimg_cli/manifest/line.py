"""One manifest line: from bytes to checked fields, and every fault on the way.

Types and ranges of single fields are in `fields.py`; checks that involve several fields are here.
Defaults of settings and model are not known yet.
"""

import json
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from hyimg_cli.errors import HyimgError, UsageError
from hyimg_cli.files import json_of, refuse_constant
from hyimg_cli.manifest.envelope import unwrap
from hyimg_cli.manifest.fields import AR_FIELDS, BY_NAME, COT_FIELDS, NOT_IN, SAMPLED_FIELDS
from hyimg_cli.manifest.json_faults import NO_LIST, explain
from hyimg_cli.manifest.matrix import Axes, axes_of
from hyimg_cli.manifest.source_ids import in_id
from hyimg_cli.manifest.written import digests_of, tag_fault
from hyimg_cli.settings.kinds import SIZE_PATTERN, as_json, size_request, text
from hyimg_cli.settings.other_names import field_of, lacking
from hyimg_cli.settings.paths import LINK
from hyimg_cli.settings.table import SETTINGS
from hyimg_cli.settings.values import BadValue, nearest, shown
from hyimg_cli.spec.job import TEXT_TASKS, VIDEO_TASKS, SizeRequest

Same = TypeVar("Same", bound=Hashable)
_TAGS_HINT = "edit only the text between the tags; without written, any text is allowed"
# How chat endpoints write a conversation; the released models draw from a single turn.
_TURNS = ("messages", "message_list", "conversation", "history")

# At most this many unknown keys of a line, or unknown columns of a table, are named.
_MOST_UNKNOWN = 20
# Tasks that start from a picture, and the hint if there is none.
_WITHOUT_IMAGES = {
    "it2i": "name the picture to edit, or use task t2i",
    "i2t": "name the picture to ask about, or use task t2t",
    "i2v": "name the picture to start from, or use task t2v",
}
# Tasks without a picture, and the same with one.
_ONLY_TEXT = {"t2i": "it2i", "t2t": "i2t"}
# The custom_id of an OpenAI request: the job's id is made from it.
_REQUEST_ID = text("custom_id")


@lru_cache(1024)
def _shared(value: Same) -> Same:
    """Return one shared object for equal values.

    In a manifest of a million lines, most lines set the same few fields, and lines about the same
    picture are adjacent.
    """
    return value


@dataclass(frozen=True, slots=True)
class ManifestLine:
    """A line without faults: `names` of its fields, canonical, and their typed `values`.

    `given` names the fields that the user set (custom_id and task may be filled in here).
    `extra_json` has the `x_` keys.
    """

    line_number: int
    where: str
    names: tuple[str, ...]
    values: tuple[Any, ...]
    extra_json: str
    given: frozenset[str]

    @property
    def fields(self) -> dict[str, Any]:
        """Return the values by name, as a new dictionary each time."""
        return dict(zip(self.names, self.values, strict=True))


def fault(slug: str, what: str, where: Path | str, hint: str = "") -> UsageError:
    """Return a fault of the manifest's text, with the code `manifest.<slug>`."""
    return UsageError(what, where=where, hint=hint, code=f"manifest.{slug}")


def _not_a_field(key: str, value: Any) -> tuple[str, str]:
    """Return the fault for an unknown key, with a hint; knows the names that other tools use."""
    if key in _TURNS:
        hint = "write one turn as prompt and images; earlier turns are not read"
        return "jobs have no earlier turns", hint
    if not_here := lacking(key):
        meaning, hint = not_here
        return f"{shown(key)} is not supported: hyimg has no {meaning}", hint
    hint = "fields that begin with x_ are copied to the result"
    if key == "image_size":
        size = "WIDTHxHEIGHT"
        if sides := re.fullmatch(r"([0-9]+)[xX]([0-9]+)", str(value)):
            size = f"{sides[2]}x{sides[1]}"
        elif isinstance(value, str) and re.fullmatch(r"auto|[0-9]+:[0-9]+", value):
            size = value
        hint = f'write "size": "{size}"; the official script puts height first'
    elif meant := field_of(key):
        hint = f'did you mean "{meant}"?'
        if meant == "region":
            hint = "write region, a box or the path of a mask that is white where edits are allowed"
        elif meant == "size":
            hint = 'write "size": "W:H" or "WIDTHxHEIGHT", width first'
            if isinstance(value, str) and re.fullmatch(SIZE_PATTERN, value, re.ASCII):
                hint = f'write "size": "{value}"'
        elif meant not in BY_NAME and SETTINGS[meant].panel:
            hint = f"set it for the whole run: {SETTINGS[meant].flag}"
    elif close := nearest(key, BY_NAME):
        hint = f'did you mean "{close}"?'
    elif isinstance(value, dict) and "class_type" in value:
        hint = "this is a workflow of ComfyUI, which is not read: write a prompt and images"
    elif isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
        hint = f"write each object of its list on a line of its own: jq -c '.{key}[]' FILE"
    return f"{shown(key)} is not a field", hint


# Fields that have no effect without a source image.
_OF_PICTURES = {
    "infer_align_image_size": "there is no source image to align with",
    "keep_outside": "there is no source image to keep",
}


def idle_fields(
    fields: Mapping[str, Any], given: Iterable[str], bot_task: str | None
) -> dict[str, str]:
    """Return the fields in `given` that no stage would use, each with the reason.

    The AR stage writes text only if bot_task is not none and no text is given. Greedy decoding
    ignores the sampling options. Only a thinking text can be dropped. `fields` has the values;
    `bot_task` is None if it is not known yet.
    """
    names = set(given)
    idle: dict[str, str] = {}
    if not names.isdisjoint(COT_FIELDS):
        reason = "the text is given, so none is written"
        # A dynamic system prompt depends on the bot_task.
        is_dynamic = fields.get("use_system_prompt") == "dynamic"
        idle = dict.fromkeys((*AR_FIELDS, *(() if is_dynamic else ("bot_task",))), reason)
    elif bot_task == "none":
        idle = dict.fromkeys((*AR_FIELDS, "drop_think"), "bot_task is none, so no text is written")
    else:
        if fields.get("temperature") == 0:
            reason = "temperature is 0, so the most likely token is always chosen"
            idle = dict.fromkeys(SAMPLED_FIELDS, reason)
        if bot_task == "recaption" and fields.get("drop_think"):
            idle["drop_think"] = "bot_task is recaption, so there is no think text to drop"
    if not fields.get("images"):
        idle |= _OF_PICTURES
    return {name: idle[name] for name in sorted(names & idle.keys())}


def idle_in_answers(fields: Mapping[str, Any], given: Iterable[str]) -> dict[str, str]:
    """Return the fields in `given` that an i2t or t2t line does not use, each with the reason."""
    idle: dict[str, str] = {}
    if fields.get("choices"):
        idle = dict.fromkeys((*AR_FIELDS, "seed"), "one of the choices is the answer")
    elif not fields.get("temperature"):
        reason = "temperature is 0, so the most likely token is always chosen"
        idle = dict.fromkeys((*SAMPLED_FIELDS, "seed", "seeds", "n"), reason)
    return {name: idle[name] for name in sorted(idle.keys() & {*given})}


class Line:
    """A line while it is read. `refused` names the fields whose value cannot be used.

    `is_request`: it is an OpenAI request, whose custom_id may be any text.
    """

    def __init__(self, where: str) -> None:
        self.where = where
        self.fields: dict[str, Any] = {}
        self.extra: dict[str, Any] = {}
        self.given: set[str] = set()
        self.refused: set[str] = set()
        self.axes: Axes = {}
        self.faults: list[HyimgError] = []
        self.unknown = 0
        self.is_request = False

    def add(self, slug: str, what: str, field: str = "", hint: str = "") -> None:
        """Add a fault of the line, or of a field in it."""
        where = f"{self.where}: {field}" if field else self.where
        self.faults.append(fault(slug, what, where, hint))

    def add_unknown(self, key: str, value: Any = None) -> None:
        """Add the fault of an unknown key; if there are very many, only the first ones."""
        self.unknown += 1
        if self.unknown <= _MOST_UNKNOWN:
            what, hint = _not_a_field(key, value)
            self.add("unknown-field", what, plain_key(key), hint)

    def end_unknown(self, what: str) -> None:
        """Add how many more faults there were; `what` names them."""
        if self.unknown > _MOST_UNKNOWN:
            more = self.unknown - _MOST_UNKNOWN
            self.add("unknown-field", f"{more:,} more {what} are not fields")

    def done(self, number: int) -> ManifestLine:
        """Return the finished line."""
        given, names = _shared(frozenset(self.given)), _shared(tuple(self.fields))
        if "images" in self.fields:
            self.fields["images"] = _shared(self.fields["images"])
        values = tuple(self.fields.values())
        extra_json = json.dumps(self.extra) if self.extra else "{}"
        return ManifestLine(number, self.where, names, values, extra_json, given)

    def read(self, raw: bytes, *, is_prompt: bool = False) -> None:
        """Read the line as a JSON object of fields, or as a prompt."""
        with self._noting_bad_values():
            try:
                text = raw.decode()
            except UnicodeDecodeError as error:
                what = f"byte {error.start + 1} of the line is not UTF-8"
                raise BadValue(what, "save the file as UTF-8", "not-utf8") from None
            entry = {"prompt": text} if is_prompt else _parsed(text)
            self.is_request = "body" in entry or "url" in entry
            if self.is_request:
                try:
                    entry = unwrap(entry)
                except BadValue:
                    if "custom_id" in entry:
                        self._take("custom_id", entry["custom_id"])
                    raise
            self.read_fields(entry.items())

    def read_fields(self, entries: Iterable[tuple[str, Any]], *, are_cells: bool = False) -> None:
        """Read the line as fields, or as cells of a table; empty cells are skipped."""
        for key, value in entries:
            if key.startswith("x_"):
                with self._noting_bad_values(plain_key(key)):
                    as_json(value)
                    self.extra[key] = value
            elif not are_cells or value.strip():
                self._take(key, value, is_cell=are_cells)
        self.end_unknown("keys")
        if not self.axes:
            self._check_together()

    @contextmanager
    def _noting_bad_values(self, field: str = "") -> Iterator[None]:
        try:
            yield
        except BadValue as bad:
            self.add(bad.slug, bad.what, field, bad.hint)

    def children(self) -> list["Line"]:
        """Return the lines that the line's matrix makes, each checked; none without a matrix.

        Their faults are also faults of this line. A fault that all of them have is reported once,
        for the line itself.
        """
        # A field is never both in the line and in its matrix.
        both = self.axes.keys() & self.given
        if "seed" in self.axes:
            both |= {"n", "seeds"} & self.given
        for name in sorted(both):
            axis = "seed" if name in ("n", "seeds") else name
            what = f"{name} cannot be used with a matrix of {axis}"
            self.add("conflict", what, name, "remove one of the two")
        if not self.axes or self.faults:
            return []
        children = [
            self._child(dict(zip(self.axes, texts, strict=True)))
            for texts in product(*self.axes.values())
        ]
        found: dict[tuple[str, str, str], list[HyimgError]] = {}
        for child in children:
            child._check_together()
            for one in child.faults:
                place = one.where.removeprefix(child.where).removeprefix(": ")
                found.setdefault((one.code, one.what, place), []).append(one)
        for (code, what, place), same in found.items():
            if len(same) < len(children):
                self.faults += same
            else:  # the same for all of them: a fault of the line
                self.add(code.partition(".")[2], what, place, same[0].hint)
        return children

    def _child(self, texts: Mapping[str, str]) -> "Line":
        """Return the line with one value of each axis, named by the values' texts."""
        marks = [in_id(f"{name}-{text}") for name, text in texts.items()]
        child = Line(f"{self.where} ({', '.join(f'{n}={text}' for n, text in texts.items())})")
        child.fields = self.fields | {name: self.axes[name][texts[name]] for name in texts}
        child.fields["custom_id"] = "-".join((self.fields["custom_id"], *marks))
        own = {"x_custom_id": self.fields["custom_id"]} if self.is_request else {}
        child.extra = own | self.extra
        child.given = self.given | self.axes.keys()
        child.is_request = self.is_request
        return child

    def _take(self, key: str, value: Any, *, is_cell: bool = False) -> None:
        known = BY_NAME.get(key)
        if known is None:
            self.add_unknown(key, value)
        elif known.name in self.given:
            self.refused.add(known.name)
            hint = f"give one of {', '.join((known.name, *known.aliases))}"
            self.add("duplicate-field", f"{known.name} is given under two names", key, hint)
        else:
            self.given.add(known.name)
            is_free = self.is_request and known.name == "custom_id"
            kind = _REQUEST_ID if is_free else known.kind
            try:
                typed = kind.parse(value) if is_cell else kind.read(value)
            except BadValue as bad:
                self.refused.add(known.name)
                hint = "remove the field to use its default" if value is None else bad.hint
                self.add(bad.slug, bad.what, key, hint)
                return
            if known.name == "matrix":
                self.given.discard("matrix")
                with self._noting_bad_values("matrix"):
                    self.axes = axes_of(typed, self.add)
            else:
                self.fields[known.name] = typed

    def _check_together(self) -> None:
        """Check what depends on several fields."""
        # Width and height become the size.
        sides = {"width", "height"} & self.given
        if sides and "size" in self.given:
            hint = "give either size, or width and height"
            self.add("conflict", "the size is given twice", "size", hint)
        elif len(sides) == 1:
            (side,) = sides
            (other,) = {"width", "height"} - sides
            self.add("conflict", f"{side} is given without {other}", side, f"give {other} too")
        elif sides and not sides & self.refused:
            self.given = self.given - sides | {"size"}
            height, width = self.fields.pop("height"), self.fields.pop("width")
            with self._noting_bad_values("width"):
                self.fields["size"] = size_request(height, width)
        if "links" in self.fields:
            self._take_links()
        self._check_task()
        for other in ("n", "seed"):
            if {"seeds", other} <= self.given:
                what = f"{other} cannot be used with seeds"
                self.add("conflict", what, other, f"give {other} or seeds")
        is_candidate = "candidate_of" in self.given
        for name in sorted(({"n", "seeds"} if is_candidate else {"candidate"}) & self.given):
            what = "a candidate has one result" if is_candidate else "it needs candidate_of"
            self.add("conflict", what, name, "remove the field")
        # A region turns keep_outside on, unless the line says otherwise.
        if "region" in self.fields and not self.fields.setdefault("keep_outside", True):
            what = "a region needs keep_outside, which is false"
            self.add("conflict", what, "region", "remove one of the two")
        if self.fields.get("task") not in VIDEO_TASKS:
            self._check_text()

    def _check_task(self) -> None:
        """Check that prompt, images and all other fields fit the task; fill in a missing task."""
        if "prompt" not in self.given:
            hint = "describe what it should show"
            self.add("missing-field", "the line has no prompt", "prompt", hint)
        if "task" in self.refused:
            return
        if "images" not in self.refused:
            images = self.fields.get("images", ())
            task = self.fields.setdefault("task", "it2i" if images else "t2i")
            if task in _WITHOUT_IMAGES and not images:
                self.add("missing-field", f"{task} needs images", "images", _WITHOUT_IMAGES[task])
            if task in _ONLY_TEXT and images:
                hint = f"use task {_ONLY_TEXT[task]}, or remove the images"
                self.add("conflict", f"{task} does not use images", "images", hint)
        task = self.fields.get("task", "t2i")
        foreign = NOT_IN[task]
        for name in sorted(self.given & foreign.keys()):
            hint = "remove the field"
            if name == "choices":
                hint = f'set "task": "{"i2t" if "images" in self.given else "t2t"}"'
            elif not (task in VIDEO_TASKS or "task" in self.given):
                hint += f', or set "task": "{"i2v" if "images" in self.given else "t2v"}"'
            self.add("foreign-field", foreign[name], name, hint)

    def _take_links(self) -> None:
        """Let the images that are results of the run name them."""
        links, images = self.fields.pop("links"), self.fields.get("images", ())
        self.given.discard("links")
        if len(links) != len(images) and "images" not in self.refused:
            self.add("link", f"{len(links)} links for {len(images)} images", "links", "remove it")
            return
        both = zip(links, images, strict=False)
        self.fields["images"] = tuple(f"{LINK}{name}" if name else path for name, path in both)

    def _check_text(self) -> None:
        """Check the fields about the text that the AR stage writes or is given."""
        # A ratio belongs to a given text, and is the only field that sets the size.
        if "ratio_index" in self.given:
            if self.given.isdisjoint(COT_FIELDS):
                what, hint = "it needs a given text (cot_text)", "give size instead"
                self.add("unconsumed", what, "ratio_index", hint)
            if not self.fields.get("size", SizeRequest()).is_auto:
                what = "ratio_index cannot be used with a size"
                hint = "remove ratio_index: the size has changed"
                self.add("conflict", what, "ratio_index", hint)
        if {"written"} & self.given - self.refused:
            self._settle_written()
        elif self.given.issuperset(COT_FIELDS):
            what = "cot_text cannot be used with cot_token_ids"
            self.add("conflict", what, "cot_text", "remove one of the two")
        # Pictures that cannot be used are not missing.
        of_pictures = _OF_PICTURES if "images" in self.refused else ()
        given = self.given.difference(of_pictures)
        idle = idle_fields(self.fields, given, self.fields.get("bot_task"))
        if self.fields.get("task") in TEXT_TASKS:
            idle = idle_in_answers(self.fields, given)
        kind = self.fields.get("use_system_prompt", "custom")
        if "system_prompt" in self.given and kind != "custom":
            idle["system_prompt"] = f"use_system_prompt is {kind}"
        for name, reason in idle.items():
            self.add("unconsumed", f"it has no effect: {reason}", name, "remove the field")

    def _settle_written(self) -> None:
        """Keep one form of a written text: its tokens while the text is unedited, else the text."""
        if self.refused & {*COT_FIELDS}:
            return
        noted = self.fields["written"]
        text, ids = (self.fields.get(name) for name in COT_FIELDS)
        found = digests_of(text, ids)
        if text is None:
            if ids is None:
                hint = "restore the text, or remove written to have a new one written"
                self.add("written", "the line has no text", "written", hint)
        elif found["text_sha256"] != noted["text_sha256"]:
            if why := tag_fault(noted, text):
                self.add("written", f"edited: {why}", "cot_text", _TAGS_HINT)
            self._leave_out("cot_token_ids")
        elif ids is not None:
            if found["ids_sha256"] != noted["ids_sha256"]:
                what = "it was edited, but cot_text was not"
                hint = "edit cot_text, and leave the tokens unchanged"
                self.add("written", what, "cot_token_ids", hint)
            self._leave_out("cot_text")

    def _leave_out(self, name: str) -> None:
        self.fields.pop(name, None)
        self.given.discard(name)


def _parsed(text: str) -> dict[str, Any]:
    """Parse the line as a JSON object. Raises BadValue."""
    try:
        entry = json_of(text, object_pairs_hook=_object, parse_constant=refuse_constant)
        if "\\u" in text:
            # JSON can contain half of a surrogate pair, which no file can store.
            json.dumps(entry, ensure_ascii=False).encode()
    except BadValue:
        raise
    except UnicodeEncodeError:
        what, hint = "a text contains half of a surrogate pair", "write it as UTF-8"
        raise BadValue(what, hint, "bad-json") from None
    except json.JSONDecodeError as error:
        what, hint = explain(text, error)
        raise BadValue(what, hint, "bad-json") from None
    except ValueError as error:
        why = "a number has too many digits" if "digits" in str(error) else str(error)
        what, hint = f"not valid JSON: {why}", "remove the field to use its default"
        raise BadValue(what, hint, "bad-json") from None
    if not isinstance(entry, dict):
        what, hint = f"{shown(entry)} is not a JSON object", 'write an object: {"prompt": "…"}'
        hint = NO_LIST if isinstance(entry, list) else hint
        raise BadValue(what, hint, "not-an-object")
    return entry


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entry = dict(pairs)
    if len(entry) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = next(key for key, count in counts.items() if count > 1)
        raise BadValue(f"{shown(twice)} appears twice", "remove one of them", "duplicate-field")
    return entry


def plain_key(key: str) -> str:
    """Return a key for use in an error's place: unchanged if it is a word, else quoted and cut."""
    return key if key.isidentifier() and len(key) <= 40 else shown(key, 40)
