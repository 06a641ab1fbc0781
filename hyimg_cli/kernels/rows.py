"""Find row counts at which the rows of a matrix product do not depend on each other.

CPU libraries use another kernel, with another order of additions, for one, two or three left-over
rows. In MKL with one and two threads, products whose row count is a multiple of four were equal to
the bit for every count; other machines are measured when a model is loaded.
"""

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from hyimg_cli.errors import MachineError

CANDIDATES = (4, 8, 16, 32, 64)
_WIDTHS = ((192, 576), (96, 192), (1024, 256))
_MOST_ROWS = 96


@lru_cache(maxsize=1)
def invariant_multiple() -> int:
    """Return the smallest row multiple at which this machine's float32 products are invariant.

    Raises MachineError if none of the candidates is.
    """
    for multiple in CANDIDATES:
        if all(_is_invariant(multiple, *widths) for widths in _WIDTHS):
            return multiple
    raise MachineError(
        f"the pixels of a job depend on its batch on this CPU (tried up to {CANDIDATES[-1]} rows)",
        hint="run with --no-batch-invariant; the last bits of a job then depend on its batch",
        code="machine.not-invariant",
    )


@lru_cache
def group_multiple(device: torch.device) -> int:
    """Return the rows to pad a group to, so that bits do not depend on other rows.

    On a GPU they may depend on them.
    """
    try:
        return invariant_multiple() if device.type == "cpu" else CANDIDATES[0]
    except MachineError:
        return CANDIDATES[0]


def pad_rows(x: Tensor, multiple: int) -> Tensor:
    """Return `x` with zeros after its first axis, up to the next multiple."""
    missing = padding(len(x), multiple)
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing)) if missing else x


def padding(rows: int, multiple: int) -> int:
    """Return the number of rows to add to reach the next multiple."""
    return -rows % multiple


def _is_invariant(multiple: int, width_in: int, width_out: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(_MOST_ROWS, width_in, generator=generator)
    weight = torch.randn(width_out, width_in, generator=generator)
    whole = F.linear(rows, weight)
    counts = range(multiple, _MOST_ROWS + 1, multiple)
    return all(torch.equal(F.linear(rows[:n], weight), whole[:n]) for n in counts)
