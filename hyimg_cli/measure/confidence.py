"""Score a picture by how probable its model found the text that it wrote before it.

The log-probability was recorded with the text, so nothing is computed here. It says nothing about
the picture: a text that the model was sure of may be drawn badly.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

SCORERS = {"confidence": {"version": "1", "needs": ["confidence"]}}


def confidence(
    cases: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield the natural logarithm of a text's probability: 0 for a certain text, or less.

    Parts: `mean`, per token; `recaption`, of the description alone, if the text has one.
    """
    for case in cases:
        found = case["confidence"]
        parts = {"mean": found["logprob"] / found["tokens"]}
        if found.get("recaption_logprob") is not None:
            parts["recaption"] = found["recaption_logprob"]
        yield {"value": found["logprob"], "parts": parts}
