"""Scorers without weights. Like all scorers, they run in their own processes, by `scoring`."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hyimg_cli.errors import SourceImageError
from hyimg_cli.measure.outside import outside_of
from hyimg_cli.spec.options import KeepOutside

SCORERS = {
    "outside": {
        "version": "3",
        "needs": ["source", "result"],
        "range": [0, 400],
        "higher_is_better": False,
    },
    "text": {"version": "1", "needs": ["prompt", "text"], "range": [0, 1]},
}
Cases = Sequence[Mapping[str, Any]]
_RECAPTION = re.compile(r"<recaption>(.*?)(</recaption>|$)", re.DOTALL)
# In scripts without spaces, each sign counts as a word.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W_]+")
_SAYS_LITTLE = frozenset(
    _WORD.findall(
        "a an and are as at be by for from in into is it its make of on or put so that the their "
        "them then this to turn with you your please change draw add picture image photo"
    )
)


def outside(cases: Cases, options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield how far a result is from its source outside the edit: the mean distance (CIE76).

    As `measure.outside` finds it. No value if no edit is found, or if the whole picture was edited,
    because nothing is outside then.
    """
    for case in cases:
        source = Path(case["sources"][case.get("kept_source", 1) - 1])
        try:
            found = outside_of(source, Path(case["result"]), KeepOutside())
        except SourceImageError as error:
            yield {"value": None, "fault": error.what}
            continue
        kind, reasons = found["kind"], ", ".join(found["reasons"])
        if kind in ("none", "global"):
            why = "no edit was found" if kind == "none" else reasons or "all of it was edited"
            yield {"value": None, "fault": f"{kind}: {why}"}
        else:
            yield {"value": found["change"]["mean_de"], "parts": {"area": found["area"]}}


def text(cases: Cases, options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the share of the prompt's words that the text before the picture repeats, 0 to 1.

    The text is its recaption, if it has one. Common words (a, the, of, make) do not count, nor does
    a plural's s. Meaning is not compared.
    """
    for case in cases:
        said = _RECAPTION.search(case["text"])
        asked, repeated = _words(case["prompt"]), _words(said[1] if said else case["text"])
        missing = sorted(asked - repeated)
        if not asked:
            yield {"value": None, "fault": "the prompt has no words to look for"}
        else:
            reason = f"not in the text: {', '.join(missing)}" if missing else ""
            yield {"value": 1 - len(missing) / len(asked), "reason": reason}


def _words(text: str) -> set[str]:
    found = {word for word in _WORD.findall(text.casefold()) if word not in _SAYS_LITTLE}
    return {word[:-1] if len(word) > 3 and word.endswith("s") else word for word in found}
