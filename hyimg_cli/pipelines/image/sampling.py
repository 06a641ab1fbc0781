"""Choose tokens for many rows at once on the model's device, each row by its own rules.

A draw needs one uniform number. Every job has a sequence of them, made on the CPU from its own
seed. A draw therefore depends on that seed and on the number of earlier draws, not on the batch or
the machine.
"""

# Legend: V vocabulary (sorted by logit where noted), R row (a job that writes)
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hyimg_cli.kernels.transfer import to_device

# Sums of this over a vocabulary fit in 64 bits, and one unit is too small to matter in float32.
_WHOLE = 2**40


@dataclass(frozen=True)
class Draw:
    """The rules for choosing one row's next token.

    `top_k` 0 and `top_p` 1 exclude nothing; `temperature` 0 takes the best token. `uniform` is in
    [0, 1). `allowed`: take the best of these ids, whatever the other rules are.
    """

    temperature: float
    top_k: int
    top_p: float
    uniform: float = 0.0
    allowed: tuple[int, ...] | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0 or self.allowed is not None


def uniform_numbers(seed: int, count: int) -> list[float]:
    """Return one job's uniform numbers, in the order of its draws."""
    generator = torch.Generator().manual_seed(seed)
    numbers: list[float] = torch.rand(count, generator=generator).tolist()
    return numbers


def choose(logits_RV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Return every row's token, int64 [R], on the logits' device, without reading on the host.

    Applies temperature, then top-k, then top-p, then one draw from the rest, in the order and with
    the meaning of transformers' warpers. Masks `logits_RV` (float32) in place for restricted rows.
    """
    for row, draw in enumerate(draws):
        if draw.allowed is not None:
            ids = to_device(draw.allowed, logits_RV.device)
            kept = logits_RV[row].index_select(0, ids)
            logits_RV[row].fill_(-torch.inf).index_copy_(0, ids, kept)
    if all(draw.is_greedy for draw in draws):
        return logits_RV.argmax(dim=-1)
    # Stable: equal logits keep their order, whatever else is in the batch.
    sorted_RV, id_RV = logits_RV.sort(dim=-1, descending=True, stable=True)
    return id_RV.gather(1, _ranks(sorted_RV, draws)[:, None])[:, 0]


def _ranks(sorted_RV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Return the chosen rank in each row's sorted logits, [R].

    The logits must be in descending order, and are overwritten.
    """
    temperature_R1, top_k_R1, top_p_R1, uniform_R1 = _settings(sorted_RV, draws)
    rank_V = torch.arange(sorted_RV.shape[1], device=sorted_RV.device)
    weight_RV = sorted_RV.sub_(sorted_RV[:, :1].clone()).div_(temperature_R1).exp_()
    weight_RV.masked_fill_(rank_V >= top_k_R1, 0)
    # Only running sums from the front, which do not depend on what is cut off after them.
    sum_RV = _running_sums(weight_RV)
    kept_RV = sum_RV - weight_RV < top_p_R1 * sum_RV[:, -1:]
    last_R1 = (kept_RV.sum(dim=-1, keepdim=True) - 1).clamp_min(0)
    target_R1 = uniform_R1 * sum_RV.gather(1, last_R1)
    rank_R1 = (sum_RV <= target_R1).sum(dim=-1, keepdim=True)
    return torch.minimum(rank_R1, last_R1)[:, 0]


def _running_sums(weight_RV: Tensor) -> Tensor:
    """Return running sums from the front of weights of at most 1, [R, V].

    On a GPU the order of a sum depends on the number of rows, and torch refuses float sums with
    `--deterministic`. Integers are summed there instead, which gives the same result in any order.
    """
    return weight_RV.cumsum(dim=-1) if weight_RV.is_cpu else _whole_sums(weight_RV)


def _whole_sums(weight_RV: Tensor) -> Tensor:
    """Return float32 sums, rounded once; parts of a weight below 1 / `_WHOLE` are dropped."""
    return (weight_RV * _WHOLE).long().cumsum_(dim=-1) / _WHOLE


def _settings(logits_RV: Tensor, draws: Sequence[Draw]) -> Sequence[Tensor]:
    """Return each row's temperature, top-k, top-p and uniform number, [R, 1], in one transfer."""
    words = logits_RV.shape[1]
    rows = [
        (1.0, 1.0, 1.0, 0.0)
        if draw.is_greedy
        else (draw.temperature, float(draw.top_k or words), draw.top_p, draw.uniform)
        for draw in draws
    ]
    flat = [value for row in rows for value in row]
    columns: Sequence[Tensor] = to_device(flat, logits_RV.device).view(len(rows), 4).split(1, 1)
    return columns
