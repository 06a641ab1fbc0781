"""Guidance by three contexts: with everything, without the text, without the images."""

# Legend: G branch, N token, C channel, Y X latent rows and columns, P values of a token
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hyimg_cli.diffusion.schedule import Step
from hyimg_cli.models.bagel.config import PATCH
from hyimg_cli.spec.options import Renorm


@dataclass(frozen=True)
class Guidance:
    """A job's guidance: its scales, and its branches.

    `text`, `image`: numbers of the branches without text and without images, which may be the full
    branch. `image` None: no step away from the images. `least`: the minimum length that a velocity
    keeps, 0 to 1.
    """

    text_scale: float
    image_scale: float
    renorm: Renorm
    interval: tuple[float, float]
    text: int
    image: int | None
    least: float = 0.0

    def is_active(self, step: Step) -> bool:
        """Return True if the step's noise level is within the interval, without its lower end."""
        low, high = np.asarray(self.interval, np.float32).tolist()  # like the noise level
        return bool(low < step.sigma <= high)

    def __call__(self, velocity_GCYX: Tensor, step: Step) -> Tensor:
        if len(velocity_GCYX) == 1:
            return velocity_GCYX[0].float()
        rows_GNP = torch.stack([packed(one) for one in velocity_GCYX.float()])
        grid = velocity_GCYX.shape[-2] // PATCH, velocity_GCYX.shape[-1] // PATCH
        return unpacked(self.followed(rows_GNP), *grid)

    def followed(self, rows_GNP: Tensor) -> Tensor:
        """Return the velocity to follow, [N, P]: c pushed away from u, then both away from i.

        Renormed, it is at most as long as c: as a whole, or token by token. `text_channel` does so
        before the step away from the images.
        """
        full_NP, text_NP = rows_GNP[0], rows_GNP[self.text]
        found_NP = text_NP + self.text_scale * (full_NP - text_NP)
        if self.renorm == "text_channel":
            found_NP = self._shortened(found_NP, full_NP, by_token=True)
        if self.image is not None:
            image_NP = rows_GNP[self.image]
            found_NP = image_NP + self.image_scale * (found_NP - image_NP)
        if self.renorm in ("global", "channel"):
            found_NP = self._shortened(found_NP, full_NP, by_token=self.renorm == "channel")
        return found_NP

    def _shortened(self, rows_NP: Tensor, full_NP: Tensor, *, by_token: bool) -> Tensor:
        axes = (-1,) if by_token else (-2, -1)
        long = torch.linalg.vector_norm(full_NP, dim=axes, keepdim=True)
        own = torch.linalg.vector_norm(rows_NP, dim=axes, keepdim=True)
        factor: Tensor = (long / (own + 1e-8)).clamp(self.least, 1.0)
        return rows_NP * factor


def packed(latents_CYX: Tensor) -> Tensor:
    """Return latent tokens [N, P] of 2 x 2 cells: row, column, channel, the channel fastest."""
    channels, height, width = latents_CYX.shape
    cells = latents_CYX.reshape(channels, height // PATCH, PATCH, width // PATCH, PATCH)
    return cells.permute(1, 3, 2, 4, 0).reshape(-1, channels * PATCH**2)


def unpacked(rows_NP: Tensor, rows: int, columns: int) -> Tensor:
    """Undo `packed`, for a grid of tokens."""
    cells = rows_NP.reshape(rows, columns, PATCH, PATCH, -1)
    return cells.permute(4, 0, 2, 1, 3).reshape(-1, rows * PATCH, columns * PATCH)
