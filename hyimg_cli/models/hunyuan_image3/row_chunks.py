"""Process a tensor's rows chunk by chunk, so that intermediates are never whole at once.

    ┌────────────────┐
    │ chunk n - 1    │   A row of a 3x3 convolution needs the rows above and below it. So a chunk is
    │ ░░░░░░ halo ░░ │   computed together with its halo, whose results are dropped; outside the
    │ chunk n        │   picture is the convolution's own padding. Every row has the value that it
    │ ░░░░░░ halo ░░ │   has in the whole, up to rounding.
    │ chunk n + 1    │
    └────────────────┘

A group norm needs all rows: its statistics are taken first, without a copy of the tensor. If all
rows are one chunk, or gradients are on, torch's modules compute it in one piece.
"""

# Legend: B batch · C channels · G groups of them · T frames · Y X rows, columns · N all of a group
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from hyimg_cli.models.hunyuan_image3.config import VAE_CHUNK_BYTES

Compute = Callable[[Tensor], Tensor]
# Values per group that a CPU processes at a time, so that they stay in the cache and in reused
# memory.
_PIECE = 1 << 16


class RowChunks:
    """The rows of a tensor, and computations over a chunk of them at a time.

    `channels`: values held at each position of a chunk, which decide its height. `halo`: extra rows
    above and below; chunks begin at multiples of it.
    """

    def __init__(self, x_BCTYX: Tensor, channels: int, *, halo: int = 1) -> None:
        self._x_BCTYX, self._halo = x_BCTYX, halo
        batch, _, frames, self._rows, columns = x_BCTYX.shape
        row_bytes = channels * batch * frames * columns * x_BCTYX.element_size()
        most = VAE_CHUNK_BYTES // row_bytes
        self._is_one = most >= self._rows or torch.is_grad_enabled()
        self._height = max(1, most // halo - 2) * halo
        # Chunks of even size if there are three or more: for a chunk of few rows, torch's CPU
        # convolution is slower and takes 27 times the memory.
        if (count := math.ceil(self._rows / self._height)) >= 3:
            self._height = math.ceil(self._rows / count / halo) * halo

    def swished(self, norm: nn.GroupNorm) -> Compute:
        """Return norm and swish of a chunk, with the statistics of all rows."""
        if self._is_one:
            return lambda x_BCTYX: functional.silu(norm(x_BCTYX))
        # On a CPU, torch's own norm works value by value: three times as slow as two passes.
        moments = _moments_by_pieces if self._x_BCTYX.is_cpu else _moments_at_once
        variance_BC, mean_BC = (
            of_group.repeat_interleave(norm.num_channels // norm.num_groups, dim=1)
            for of_group in moments(self._x_BCTYX, norm.num_groups)
        )
        # The norm as a linear function of each channel.
        scale_BC = norm.weight * torch.rsqrt(variance_BC + norm.eps)
        shift_BC = norm.bias - mean_BC * scale_BC
        shift_BC111, scale_BC111 = (of[..., None, None, None] for of in (shift_BC, scale_BC))
        return lambda chunk_BCTYX: functional.silu(
            torch.addcmul(shift_BC111, chunk_BCTYX, scale_BC111), inplace=True
        )

    def joined(self, compute: Compute, onto_BCTYX: Tensor | None = None) -> Tensor:
        """Return `compute` of all rows, or `onto` plus it, as `plus`, in the memory of `onto`.

        The number of rows may change by a whole factor.
        """
        if self._is_one:
            made_BCTYX = compute(self._x_BCTYX)
            return made_BCTYX if onto_BCTYX is None else plus(onto_BCTYX, made_BCTYX)
        out_BCTYX = onto_BCTYX
        for start in range(0, self._rows, self._height):
            chunk_BCTYX = self._chunk(compute, start)
            *shape, rows, columns = chunk_BCTYX.shape
            if out_BCTYX is None:
                every = rows * self._rows // self._height
                out_BCTYX = chunk_BCTYX.new_empty(*shape, every, columns)
            first = start * out_BCTYX.shape[3] // self._rows
            place_BCTYX = out_BCTYX[:, :, :, first : first + rows]
            if onto_BCTYX is None:
                place_BCTYX.copy_(chunk_BCTYX)
            else:
                place_BCTYX.add_(chunk_BCTYX)
            del chunk_BCTYX  # free it before the next one is computed
        assert out_BCTYX is not None, "there is a row"
        return out_BCTYX

    def _chunk(self, compute: Compute, start: int) -> Tensor:
        """Return `compute` of the chunk that begins at row `start`, without its halo."""
        stop = min(start + self._height, self._rows)
        first, last = max(0, start - self._halo), min(self._rows, stop + self._halo)
        made_BCTYX = compute(self._x_BCTYX[:, :, :, first:last])
        top, bottom = (
            (row - first) * made_BCTYX.shape[3] // (last - first) for row in (start, stop)
        )
        return made_BCTYX[:, :, :, top:bottom]


def plus(given: Tensor, more: Tensor) -> Tensor:
    """Return the sum, in the memory of `given`, which must not be read again, without gradients."""
    return given + more if torch.is_grad_enabled() else given.add_(more)


def _moments_at_once(x_BCTYX: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Return variance and mean of each group, [B, G] each, in one pass over `x` without a copy."""
    of_groups = x_BCTYX.unflatten(1, (groups, -1))
    if x_BCTYX.dtype == torch.float16:  # the variance may exceed the largest number of this dtype
        wide = (one.float() for one in of_groups.unbind(1))
        each = [torch.var_mean(one, dim=(1, 2, 3, 4), correction=0) for one in wide]
        variances, means = zip(*each, strict=True)
        return torch.stack(variances, dim=1), torch.stack(means, dim=1)
    return torch.var_mean(of_groups, dim=(2, 3, 4, 5), correction=0)


def _moments_by_pieces(x_BCTYX: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Return the same in two passes, with the memory of a piece."""
    x_BGN = x_BCTYX.reshape(x_BCTYX.shape[0], groups, -1)
    # Sums in half precision would overflow.
    mean_BG = x_BGN.mean(2, dtype=torch.promote_types(x_BCTYX.dtype, torch.float32))
    variances = []
    for x_N, mean in zip(x_BGN.flatten(0, 1), mean_BG.flatten(), strict=True):
        squares = [(piece.to(mean.dtype) - mean).square_().sum() for piece in x_N.split(_PIECE)]
        variances.append(torch.stack(squares).sum() / x_N.numel())
    return torch.stack(variances).view_as(mean_BG), mean_BG
