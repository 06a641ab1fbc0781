"""Clips denoised chunk by chunk: four passes move its latents, one leaves its clean K/V.

    step      0 1 2 3 | 4     | 5 6 7 8 | 9     | ...
    chunk     0       | 0     | 1       | 1     |
    pass      moves   | clean | moves   | clean |

The last chunk needs no clean pass. All random numbers are drawn before the first step, by each
clip's own generator, so a clip resumes from its latents: the clean passes of their chunks are
repeated.
"""

# Legend: B clips, C channel, F latent frames, Y X latent rows and columns, N text tokens, M width,
# K chunks, L noise levels
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hyimg_cli.diffusion.step_cache import VelocityCache
from hyimg_cli.models.latent import LatentDenoiser
from hyimg_cli.models.lingbot_world.network import Clip, Intrinsics, LingBotNetwork, plucker
from hyimg_cli.models.lingbot_world.schedule import NoiseLevel
from hyimg_cli.spec.job import Size

CLEAN = 0


def drawn(
    seed: int, shape: tuple[int, int, int, int], chunk: int, levels: int
) -> tuple[Tensor, Tensor]:
    """Draw a clip's random numbers on the CPU: `noise_CFYX` of the whole clip, `renoise_KLCFYX`.

    In this order; the second is for each chunk after each level but the last, in the order of use.
    """
    generator = torch.Generator().manual_seed(seed)
    channels, frames, rows, columns = shape
    noise_CFYX = torch.randn(shape, generator=generator)
    renoise_KLCFYX = torch.empty(frames // chunk, levels - 1, channels, chunk, rows, columns)
    for new_CFYX in renoise_KLCFYX.flatten(0, 1):
        new_CFYX.copy_(torch.randn(new_CFYX.shape, generator=generator))
    return noise_CFYX, renoise_KLCFYX


@dataclass(frozen=True)
class ClipInputs:
    """One clip's conditions: random numbers (see `drawn`), mask and picture, and camera poses.

    `poses_F44`: as `poses.CameraPath.at` returns them.
    """

    noise_CFYX: Tensor
    renoise_KLCFYX: Tensor
    condition_CFYX: Tensor
    text_NM: Tensor
    poses_F44: Tensor
    intrinsics: Intrinsics


class ChunkDenoiser(LatentDenoiser):
    """The denoiser of one or several clips of one size, made for them.

    The latents are enough to resume.
    """

    def __init__(
        self,
        network: LingBotNetwork,
        clips: Sequence[ClipInputs],
        levels: Sequence[NoiseLevel],
        size: Size,
    ) -> None:
        device, self._chunk = network.device, network.shape.num_frames_per_block
        self._network, self._levels, self._size = network, tuple(levels), size
        noise_BCFYX = torch.stack([one.noise_CFYX for one in clips]).to(device)
        # Four steps leave none to estimate.
        super().__init__(noise_BCFYX, VelocityCache(None, ()))
        self._renoise_BKLCFYX = torch.stack([one.renoise_KLCFYX for one in clips]).to(device)
        self._condition_BCFYX = torch.stack([one.condition_CFYX for one in clips]).to(device)
        self._cameras = [(one.poses_F44.to(device), one.intrinsics) for one in clips]
        frames, rows, columns = noise_BCFYX.shape[2:]
        self.chunks = frames // self._chunk
        self.clip: Clip = network.clip(
            torch.stack([one.text_NM for one in clips]),
            [*(level.timestep for level in levels), CLEAN],
            chunks=self.chunks,
            rows=rows,
            columns=columns,
        )
        # The chunks whose clean K/V are in the cache, and the chunk whose constants are computed.
        self._filled, self._begun = 0, -1

    @property
    def steps(self) -> int:
        return self.chunks * (len(self._levels) + 1) - 1

    def is_stop(self, step: int) -> bool:
        """Return True after a chunk's clean pass."""
        return step % (len(self._levels) + 1) == 0

    @torch.no_grad()
    def step(self, index: int, latents_BCFYX: Tensor) -> Tensor:
        chunk, number = divmod(index, len(self._levels) + 1)
        # Compute the clean K/V of all chunks before this one, if they are not in the cache.
        for earlier in range(self._filled, chunk):
            self._clean(earlier, latents_BCFYX)
        if number == len(self._levels):
            self._clean(chunk, latents_BCFYX)
            return latents_BCFYX
        frames = self._frames(chunk)
        own_BCFYX = latents_BCFYX[:, :, frames]
        velocity_BCFYX = self._velocity(chunk, number, own_BCFYX)
        level = self._levels[number]
        new_BCFYX = (own_BCFYX.double() - level.sigma * velocity_BCFYX.double()).float()
        if number + 1 < len(self._levels):
            after = self._levels[number + 1]
            renoise_BCFYX = self._renoise_BKLCFYX[:, chunk, number]
            new_BCFYX = after.keep * new_BCFYX + after.renoise * renoise_BCFYX
        moved_BCFYX = latents_BCFYX.clone()
        moved_BCFYX[:, :, frames] = new_BCFYX
        return moved_BCFYX

    def restore(self, done: int, latents: Tensor, state: Mapping[str, Tensor]) -> None:
        """Make the next step repeat the clean passes before it."""
        super().restore(done, latents, state)
        self._filled, self._begun = 0, -1

    def _clean(self, chunk: int, latents_BCFYX: Tensor) -> None:
        self._velocity(chunk, len(self._levels), latents_BCFYX[:, :, self._frames(chunk)])
        self._filled = chunk + 1

    def _velocity(self, chunk: int, number: int, own_BCFYX: Tensor) -> Tensor:
        frames = self._frames(chunk)
        if self._begun != chunk:
            seen = [
                plucker(poses_F44[frames], intrinsics, self._size)
                for poses_F44, intrinsics in self._cameras
            ]
            self._network.begin(self.clip, torch.stack(seen))
            self._begun = chunk
        taken_BCFYX = torch.cat([own_BCFYX, self._condition_BCFYX[:, :, frames]], dim=1)
        velocity_BCFYX: Tensor = self._network(self.clip, chunk, number, taken_BCFYX)
        return velocity_BCFYX

    def _frames(self, chunk: int) -> slice:
        return slice(chunk * self._chunk, (chunk + 1) * self._chunk)
