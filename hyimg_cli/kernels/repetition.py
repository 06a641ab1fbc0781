"""Logits of tokens that a sequence already holds, changed as transformers' generation does."""

# Legend: V vocabulary, N token of a sequence
import torch
from torch import Tensor


def penalize(logits_V: Tensor, ids_N: Tensor, penalty: float) -> None:
    """Divide the logits above 0 of the tokens `ids_N` by `penalty`, and multiply those below, in
    place: each once, however often it stands there. 1 changes nothing.
    """
    held_N = logits_V.index_select(0, ids_N)
    # Equal ids write equal values, so their order does not matter.
    logits_V.index_copy_(0, ids_N, torch.where(held_N < 0, held_N * penalty, held_N / penalty))
