"""Let a model choose one of some given answers: nothing is decoded.

    prompt ▸ logits of the next token ─▶ log p of each answer's first token, and their mass
           ▸ one forward of an answer's tokens, withdrawn afterwards ─▶ log p of the others

An answer's probability is that of its tokens, not of an end after them. Of `yes` and `no`, the
spellings `Yes` and `No` count, too.
"""

# Legend: V vocabulary
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hyimg_cli.models.common.model import DecoderModel, buffer_of
from hyimg_cli.models.protocols import Context

# Below this probability of all first tokens together, the model answers with something else.
LEAST_MASS = 0.05
_PAIR = ("yes", "no")


@dataclass(frozen=True)
class Choice:
    """The probability of each answer among the answers, and what the first tokens have together.

    No probabilities if the mass is below `LEAST_MASS`: they would be a guess.
    """

    shares: Mapping[str, float]
    mass: float

    @property
    def best(self) -> str | None:
        """The most probable answer, the first of equal ones; None without probabilities."""
        return max(self.shares, key=lambda text: self.shares[text], default=None)


def choose_answer(model: DecoderModel, context: Context, choices: Sequence[str]) -> Choice:
    """Return how probable each answer is after a context, whose buffer is left as it was."""
    first_V = model.text_logits([context])[0].double().log_softmax(dim=-1)
    spelled = {text: [*map(model.prompter.choice, _spellings(text, choices))] for text in choices}
    known: dict[tuple[int, ...], float] = {}
    for ids in dict.fromkeys(ids for some in spelled.values() for ids in some):
        known[ids] = float(first_V[ids[0]]) + _following(model, context, ids)
    mass = sum(math.exp(float(first_V[id_])) for id_ in {ids[0] for ids in known})
    if mass < LEAST_MASS:
        return Choice({}, mass)
    sums = {text: _sum_of([known[ids] for ids in some]) for text, some in spelled.items()}
    total = _sum_of([*sums.values()])
    return Choice({text: math.exp(own - total) for text, own in sums.items()}, mass)


def _spellings(text: str, choices: Sequence[str]) -> tuple[str, ...]:
    is_pair = {one.lower() for one in choices} == {*_PAIR} and len(choices) == len(_PAIR)
    return tuple(dict.fromkeys((text.lower(), text.capitalize()))) if is_pair else (text,)


def _following(model: DecoderModel, context: Context, ids: Sequence[int]) -> float:
    """Return the log-probability of an answer's tokens after its first one."""
    if len(ids) == 1:
        return 0.0
    buffer = buffer_of(context)
    length = buffer.length
    # Runs of one buffer follow each other; each leaves its own last state.
    places = [Context([], buffer, None, context.layout) for _ in ids[:-1]]
    model.feed([(place, [id_]) for place, id_ in zip(places, ids, strict=False)])
    logprob_RV: Tensor = model.text_logits(places).double().log_softmax(dim=-1)
    buffer.truncate(length)
    rows = torch.arange(len(places))
    following = torch.tensor(ids[1:])
    return float(logprob_RV.cpu()[rows, following].sum())


def _sum_of(logs: Sequence[float]) -> float:
    """Return the logarithm of a sum of probabilities."""
    highest = max(logs)
    return highest + math.log(sum(math.exp(one - highest) for one in logs))
