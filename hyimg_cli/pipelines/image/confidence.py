"""What a model found of its own text: log-probabilities, summed over freely chosen tokens."""

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from hyimg_cli.spec.events import TextConfidence

_READER = TypeAdapter(TextConfidence)
# A sum of float32 numbers has no more digits.
_DIGITS = 6


def confidence_of(logprobs: Mapping[int, float], recaption: int | None) -> TextConfidence | None:
    """Return the confidence of a text; None if none of its tokens was chosen freely.

    `logprobs`: by the places of its tokens. `recaption`: where the description begins, if it does.
    """
    if not logprobs:
        return None
    total = round(sum(logprobs.values()), _DIGITS)
    if recaption is None:
        return TextConfidence(total, len(logprobs))
    part = [logprob for place, logprob in logprobs.items() if place > recaption]
    return TextConfidence(total, len(logprobs), round(sum(part), _DIGITS), len(part))


def read_confidence(record: Any) -> TextConfidence | None:
    """Return the confidence in a record of it; None for anything else, which people may edit."""
    try:
        return None if record is None else _READER.validate_python(record)
    except ValidationError:
        return None
