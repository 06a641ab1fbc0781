"""Candidates of a line in a finished run, and their scores by what a scorer was shown."""

import os
from collections.abc import Iterable, Mapping
from typing import Any

from hyimg_cli.journal.journal import RunFolder, files_of_edit
from hyimg_cli.journal.keys import file_digest
from hyimg_cli.journal.past_run import PastJob
from hyimg_cli.journal.resume import is_intact
from hyimg_cli.manifest.written import digests_of
from hyimg_cli.spec import digest

Values = dict[str, float]
Scores = Mapping[str, Mapping[str, Any]]
# What a scorer is shown only if it needs it.
_OPTIONAL = ("mask", "text", "confidence", "model", "expect")


class Candidate(PastJob):
    """One of a line's results, drawn or only written; a text has no result line."""

    @property
    def of(self) -> str:
        """The id of the line that it is a candidate of; its own id if that line asks for one
        result.
        """
        return str(self.line.get("candidate_of", self.custom_id))

    @property
    def number(self) -> int:
        return int(self.line.get("candidate", 0))

    @property
    def output(self) -> Mapping[str, Any]:
        """The picture; empty for a failed job, and for a text."""
        return self.outputs[0] if self.outputs else {}

    @property
    def content(self) -> str:
        """A digest of its pixels, or of its text if nothing was drawn."""
        if self.result:
            return str(self.output.get("pixel_sha256", ""))
        return digest.of_bytes(str(self.line.get("cot_text", "")).encode())

    @property
    def has(self) -> set[str]:
        """What can be shown to a scorer, by the words of `scorers.NEEDS`."""
        shown = self.case(_OPTIONAL)
        return {"prompt", *(name for name in ("result", *_OPTIONAL) if shown[name])} | (
            {"source"} if shown["sources"] else set()
        )

    @property
    def is_intact(self) -> bool:
        """True if its picture is as its run wrote it."""
        return not self.result or is_intact(RunFolder(self.folder), self.result)

    def key(self, identity: str, needs: Iterable[str]) -> str:
        """Return the key of its score: a digest of the scorer's identity and of all that it is
        shown.
        """
        shown = self.case(needs)
        sources = self.result.get("source_sha256") or [*map(file_digest, shown["sources"])]
        facts = [identity, self.content, [*sources], self.line["prompt"]]
        facts += [shown["kept_source"]] if "source" in needs else []
        facts += [shown["text"]] if "text" in needs else []
        facts += [shown["confidence"]] if "confidence" in needs else []
        if "model" in needs:
            facts += [self.result.get("model_sha256"), shown["expect"]]
        facts += [files_of_edit(self.result).get("mask")] if "mask" in needs else []
        return digest.of_json(facts)

    def case(self, needs: Iterable[str]) -> dict[str, Any]:
        """Return what a scorer with these needs is shown, with absolute paths."""
        folder = self.folder.absolute()
        path, matte = self.output.get("path"), files_of_edit(self.result).get("mask")
        text = str((self.result or self.line).get("cot_text") or "")
        return {
            "id": self.custom_id,
            "prompt": self.line["prompt"],
            "sources": [os.path.join(folder, path) for path in self.line.get("images", ())],
            "kept_source": self.line.get("kept_source", 1),
            "result": path and str(folder / path),
            "mask": str(folder / matte["path"]) if matte and "mask" in needs else None,
            "text": text if "text" in needs else None,
            "confidence": self._confidence if "confidence" in needs else None,
            "model": self._model if "model" in needs and self.result else None,
            "expect": self._expect if {"model", "expect"} & {*needs} else None,
        }

    @property
    def _model(self) -> str:
        """The model that drew it: a name, or the path of its files."""
        model = str(self.line.get("model") or "")
        path = os.path.join(self.folder.absolute(), model)
        return os.path.realpath(path) if model and os.path.exists(path) else model

    @property
    def _expect(self) -> str | None:
        """What the result should show, as the author of its line says."""
        metadata = self.line.get("metadata")
        found = metadata.get("expect") if isinstance(metadata, dict) else None
        return found if isinstance(found, str) and found.strip() else None

    @property
    def _confidence(self) -> Any:
        """What the model found of the text that it wrote; None for a text that was given or edited.

        Of a text without a picture, its note has it.
        """
        if self.result:
            return self.result.get("confidence")
        note, line = self.line.get("written"), self.line
        if not isinstance(note, dict) or "confidence" not in note:
            return None
        found = digests_of(line.get("cot_text"), line.get("cot_token_ids"))
        return note["confidence"] if found.items() <= note.items() else None


def scores_of(
    one: Candidate, scores: Scores, declared: Mapping[str, Mapping[str, Any]]
) -> dict[str, Mapping[str, Any] | None]:
    """Return a candidate's score by each scorer that can be shown it; None if it has none yet.

    `scores`: by key. `declared`: each scorer's `identity` and `declared`, by name.
    """
    found = dict[str, Mapping[str, Any] | None]()
    for name, scorer in declared.items():
        needs = scorer["declared"].get("needs", ())
        if one.has.issuperset(needs):
            found[name] = scores.get(one.key(scorer["identity"], needs))
    return found


def values_of(one: Candidate, scores: Scores, declared: Mapping[str, Mapping[str, Any]]) -> Values:
    """Return a candidate's values by scorer and SCORER.PART; arguments as for `scores_of`."""
    values: Values = {}
    for name, score in scores_of(one, scores, declared).items():
        values |= values_in(name, score or {})
    return values


def values_in(name: str, score: Mapping[str, Any]) -> Values:
    """Return a score's value and those of its parts; empty if it has none."""
    if score.get("value") is None:
        return {}
    return {name: score["value"]} | {f"{name}.{part}": v for part, v in score["parts"].items()}
