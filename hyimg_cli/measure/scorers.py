"""Scorers without weights. They run as all others do: in a process of their own, by `scoring`."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hyimg_cli.errors import SourceImageError
from hyimg_cli.measure.outside import outside_of
from hyimg_cli.spec.options import KeepOutside

SCORERS = {
    "outside": {
        "version": "2",
        "needs": ["source", "result"],
        "range": [0, 400],
        "higher_is_better": False,
    },
    "text": {"version": "1", "needs": ["prompt", "text"], "range": [0, 1]},
}
Cases = Sequence[Mapping[str, Any]]
_RECAPTION = re.compile(r"<recaption>(.*?)(</recaption>|$)", re.DOTALL)
# Where no space is between words each sign counts as one.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W_]+")
_SAYS_LITTLE = frozenset(
    _WORD.findall(
        "a an and are as at be by for from in into is it its make of on or put so that the their "
        "them then this to turn with you your please change draw add picture image photo"
    )
)


def outside(cases: Cases, options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """How far a result is from its source outside the edit, as `measure.outside` finds it: the mean
    distance (CIE76). No value where no edit is found, or all of the picture was edited: nothing is
    outside then.
    """
    for case in cases:
        source = Path(case["sources"][case.get("kept_source", 1) - 1])
        try:
            found = outside_of(source, Path(case["result"]), KeepOutside())
        except SourceImageError as error:
            yield {"value": None, "fault": error.what}
            continue
        kind, reasons = found["kind"], ", ".join(found["reasons"])
        if kind != "local":
            why = "no edit was found" if kind == "none" else reasons or "all of it was edited"
            yield {"value": None, "fault": f"{kind}: {why}"}
        else:
            yield {"value": found["change"]["mean_de"], "parts": {"area": found["area"]}}


def text(cases: Cases, options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The share of the prompt's words that the text before the picture repeats, 0 to 1: of its
    recaption where it has one. Words that say little (a, the, of, make) do not count, nor does a
    plural's s. No meaning is compared.
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
