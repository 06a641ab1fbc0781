"""Clips denoised chunk by chunk: four passes that move a chunk's latents, and one that leaves its
clean K/V for those to come. The last chunk's clean pass is left out: nobody would read it.

    step      0 1 2 3 | 4     | 5 6 7 8 | 9     | ...
    chunk     0       | 0     | 1       | 1     |
    pass      moves   | clean | moves   | clean |

All that chance decides is drawn before the first step, by each clip's own generator, so a clip that
goes on from kept latents needs nothing else than these: the clean passes of the chunks that they
hold are made again.
"""

# Legend: B clips, C channel, F latent frames, Y X latent rows and columns, N text tokens, M width,
# K chunks, L noise levels
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hyimg_cli.diffusion.step_cache import VelocityCache
from hyimg_cli.models.lingbot_world.network import Clip, LingBotNetwork
from hyimg_cli.models.lingbot_world.plucker import plucker
from hyimg_cli.models.lingbot_world.schedule import NoiseLevel
from hyimg_cli.spec.job import Size

CLEAN = 0
Intrinsics = tuple[float, float, float, float]


@dataclass(frozen=True)
class Drawn:
    """A clip's random numbers: `noise_CFYX` of all of it, `renoise_KLCFYX` of each chunk behind
    each level but the last.
    """

    noise_CFYX: Tensor
    renoise_KLCFYX: Tensor


def drawn(seed: int, shape: tuple[int, int, int, int], chunk: int, levels: int) -> Drawn:
    """The numbers of a seed, on the CPU: the whole clip's first, then in the order of use."""
    generator = torch.Generator().manual_seed(seed)
    channels, frames, rows, columns = shape
    noise = torch.randn(shape, generator=generator)
    new = [
        torch.randn(channels, chunk, rows, columns, generator=generator)
        for _ in range(frames // chunk * (levels - 1))
    ]
    room = torch.empty(frames // chunk, levels - 1, channels, chunk, rows, columns)
    return Drawn(noise, torch.stack(new).view_as(room) if new else room)


@dataclass(frozen=True)
class ClipInputs:
    """One clip's conditions: `condition_CFYX` the mask's channels and the picture's, `poses_F44`
    as `poses.CameraPath.at` gives them.
    """

    drawn: Drawn
    condition_CFYX: Tensor
    text_NM: Tensor
    poses_F44: Tensor
    intrinsics: Intrinsics


class ChunkDenoiser:
    """The `VideoDenoiser` of clips of one size, one or several together. Made for them; nothing of
    it outlives them.
    """

    def __init__(
        self,
        network: LingBotNetwork,
        clips: Sequence[ClipInputs],
        levels: Sequence[NoiseLevel],
        size: Size,
        *,
        hoists_camera: bool = True,
    ) -> None:
        """`hoists_camera` off computes a chunk's camera anew for each of its passes: its twin."""
        device, self._chunk = network.device, network.shape.num_frames_per_block
        self._network, self._levels, self._size = network, tuple(levels), size
        self._hoists = hoists_camera
        self._noise_BCFYX = torch.stack([one.drawn.noise_CFYX for one in clips]).to(device)
        self._renoise_BKLCFYX = torch.stack([one.drawn.renoise_KLCFYX for one in clips]).to(device)
        self._condition_BCFYX = torch.stack([one.condition_CFYX for one in clips]).to(device)
        self._poses = [one.poses_F44.to(device) for one in clips]
        self._intrinsics = [one.intrinsics for one in clips]
        frames, rows, columns = self._noise_BCFYX.shape[2:]
        self.chunks = frames // self._chunk
        self.clip: Clip = network.clip(
            torch.stack([one.text_NM for one in clips]),
            [*(level.timestep for level in levels), CLEAN],
            chunks=self.chunks,
            rows=rows,
            columns=columns,
        )
        # Chunks whose clean K/V are in the cache, and the one whose constants are.
        self._filled, self._begun = 0, -1
        # Four steps leave none to estimate.
        self.velocities = VelocityCache(None, ())

    @property
    def steps(self) -> int:
        return self.chunks * (len(self._levels) + 1) - 1

    def is_stop(self, step: int) -> bool:
        """True behind a chunk's clean pass."""
        return step % (len(self._levels) + 1) == 0

    def initial_latents(self) -> Tensor:
        return self._noise_BCFYX.clone()

    @torch.no_grad()
    def step(self, index: int, latents_BCFYX: Tensor) -> Tensor:
        chunk, number = divmod(index, len(self._levels) + 1)
        self._fill(chunk, latents_BCFYX)
        if number == len(self._levels):
            self._clean(chunk, latents_BCFYX)
            return latents_BCFYX
        self._begin(chunk)
        own_BCFYX = latents_BCFYX[:, :, self._frames(chunk)]
        velocity_BCFYX = self._velocity(chunk, number, own_BCFYX)
        level = self._levels[number]
        clean_BCFYX = (own_BCFYX.double() - level.sigma * velocity_BCFYX.double()).float()
        moved_BCFYX = latents_BCFYX.clone()
        moved_BCFYX[:, :, self._frames(chunk)] = self._renoised(chunk, number, clean_BCFYX)
        return moved_BCFYX

    def state(self) -> Mapping[str, Tensor]:
        """Nothing: latents are enough to go on from."""
        return {}

    def restore(self, index: int, state: Mapping[str, Tensor]) -> None:
        """The next step makes the clean passes before it again."""
        self._filled, self._begun = 0, -1

    def _fill(self, chunk: int, latents_BCFYX: Tensor) -> None:
        """Have the clean K/V of all chunks before this one in the cache."""
        for earlier in range(self._filled, chunk):
            self._clean(earlier, latents_BCFYX)

    def _clean(self, chunk: int, latents_BCFYX: Tensor) -> None:
        self._begin(chunk)
        self._velocity(chunk, len(self._levels), latents_BCFYX[:, :, self._frames(chunk)])
        self._filled = chunk + 1

    def _begin(self, chunk: int) -> None:
        if self._begun == chunk and self._hoists:
            return
        frames = self._frames(chunk)
        seen = [
            plucker(poses_F44[frames], intrinsics, self._size)
            for poses_F44, intrinsics in zip(self._poses, self._intrinsics, strict=True)
        ]
        self._network.begin(self.clip, torch.stack(seen))
        self._begun = chunk

    def _velocity(self, chunk: int, number: int, own_BCFYX: Tensor) -> Tensor:
        condition_BCFYX = self._condition_BCFYX[:, :, self._frames(chunk)]
        taken_BCFYX = torch.cat([own_BCFYX, condition_BCFYX], dim=1)
        velocity_BCFYX: Tensor = self._network(self.clip, chunk, number, taken_BCFYX)
        return velocity_BCFYX

    def _renoised(self, chunk: int, number: int, clean_BCFYX: Tensor) -> Tensor:
        if number + 1 == len(self._levels):
            return clean_BCFYX
        level, new_BCFYX = self._levels[number + 1], self._renoise_BKLCFYX[:, chunk, number]
        return level.keep * clean_BCFYX + level.renoise * new_BCFYX

    def _frames(self, chunk: int) -> slice:
        return slice(chunk * self._chunk, (chunk + 1) * self._chunk)
