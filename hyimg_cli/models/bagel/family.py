"""BAGEL as the engine sees it: networks and prompter."""

# Legend: C channel, Y X latent rows and columns, H W pixels, N token, P values of a token,
# V vocabulary
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hyimg_cli.diffusion.denoise import DenoisePlan
from hyimg_cli.diffusion.schedule import Schedule
from hyimg_cli.kernels.rows import invariant_multiple
from hyimg_cli.kernels.transfer import sent
from hyimg_cli.media.images import bicubic
from hyimg_cli.models.bagel.guidance import Guidance, unpacked
from hyimg_cli.models.bagel.network import BagelNetwork, ImageRows
from hyimg_cli.models.bagel.prompter import BagelPrompter
from hyimg_cli.models.bagel.sequence import SourcePlace, picture_grid, source_shape
from hyimg_cli.models.bagel.weights import load
from hyimg_cli.models.common.model import DecoderModel, shapes_of
from hyimg_cli.models.common.spans import Grid
from hyimg_cli.models.protocols import (
    BranchSequence,
    Canvas,
    Context,
    DenoiseInput,
    Encoded,
    GeneratedText,
)
from hyimg_cli.parallel.devices import device_of
from hyimg_cli.settings.run import ModelChoice
from hyimg_cli.spec.digest import seed_from
from hyimg_cli.spec.job import ImageJob, Size

_RETOKENISED = (
    "the text has different tokens when it is read again; those are prefilled, as published"
)


def load_family(
    prompter: BagelPrompter, choice: ModelChoice, *, is_batch_invariant: bool
) -> "Bagel":
    """Load the weights on the chosen device: float32 on the CPU, bfloat16 on a GPU by default."""
    device = device_of(choice)
    dtype = getattr(torch, choice.dtype_on(device.partition(":")[0]))
    network, vae = load(
        prompter.folder, dtype=dtype, device=torch.device(device), quantization=choice.quantization
    )
    if is_batch_invariant and device == "cpu":
        network.decoder.row_multiple = invariant_multiple()
    return Bagel(network, PictureCodec(vae, in_tiles=bool(choice.vae_use_tiling)), prompter)


class PictureCodec:
    """Converts pictures to scaled latents and back."""

    def __init__(self, vae: Any, *, in_tiles: bool) -> None:
        """Use this VAE; `in_tiles`: large pictures are decoded tile by tile, in limited memory."""
        self.vae = vae
        vae.use_tiling = in_tiles

    @torch.no_grad()
    def encode(self, levels_CHW: Tensor, noise_CYX: Tensor) -> Tensor:
        """Return a posterior draw, [C, Y, X]; the log-variance is not clamped, as published."""
        weight = self.vae.encoder.conv_in.weight
        moments = self.vae.encoder(sent(levels_CHW[None], weight.device).to(weight.dtype))[0]
        mean_CYX, logvar_CYX = moments.chunk(2)
        noise_CYX = sent(noise_CYX, weight.device).to(weight.dtype)
        drawn_CYX = mean_CYX + (0.5 * logvar_CYX).exp() * noise_CYX
        return (drawn_CYX - self.vae.config.shift_factor) * self.vae.config.scaling_factor

    @torch.no_grad()
    def decode(self, latents_CYX: Tensor) -> Tensor:
        """Return pixels [C, H, W], -1 to 1."""
        weight = self.vae.decoder.conv_in.weight
        wide = latents_CYX[None].to(weight.device, weight.dtype)
        wide = wide / self.vae.config.scaling_factor + self.vae.config.shift_factor
        return self.vae.decode(wide, return_dict=False)[0][0]


class Bagel(DecoderModel):
    """One loaded checkpoint."""

    source_shape, source_rows = SourcePlace, ImageRows
    network: BagelNetwork
    prompter: BagelPrompter

    def __init__(self, network: BagelNetwork, codec: PictureCodec, prompter: BagelPrompter) -> None:
        self.network, self.codec, self.prompter = network, codec, prompter
        self.card = prompter.card

    @property
    def rows_seen(self) -> int:
        return self.network.decoder.rows_seen

    @property
    def layer_devices(self) -> list[torch.device]:
        return [self.network.weight.device] * len(self.network.decoder.layers)

    @property
    def parameter_count(self) -> int:
        counts = self.card.weights
        assert counts is not None, "a checkpoint's weights are counted by kind"
        return counts.experts + counts.rest + counts.wide

    @torch.no_grad()
    def encode_source(self, pixels: np.ndarray, digest: str) -> Encoded:
        """Return both views of a source image, resized by the published rule.

        The posterior is sampled with a seed made from the image's own bytes: every context of every
        job with this source sees the same latents.
        """
        shape = source_shape(Size(*pixels.shape[:2]), self.prompter.arch)
        resized = bicubic(pixels, shape.size)
        vae, vit = (_levels(bicubic(resized, size)) for size in (shape.vae_size, shape.vit_size))
        latents_CYX = self.codec.encode(vae, self.posterior_noise(shape.vae_size, digest))
        patches_NP = sent(_patches(vit, shape.vit), self.network.weight.device)
        return Encoded(
            digest, shape, self.network.encode_source(latents_CYX, patches_NP, shape.vit)
        )

    encode_stretched = encode_source

    def posterior_noise(self, size: Size, digest: str) -> Tensor:
        """Return the noise of a source image's latents, [C, Y, X], float32 on the CPU."""
        generator = torch.Generator().manual_seed(seed_from(digest))
        shape = (self.prompter.arch.vae.z_channels, *self.card.latent_grid(size))
        return torch.randn(shape, generator=generator)

    def text_budget(self, job: ImageJob, context: Context) -> int:
        return self.prompter.text_budget(job, context.layout)

    @torch.no_grad()
    def feed(self, runs: Sequence[tuple[Context, Sequence[int] | Tensor]]) -> None:
        for (context, _), hidden_M in zip(runs, self.network.feed(runs), strict=True):
            context.hidden_M = hidden_M

    def canvas(self, job: ImageJob, sources: Sequence[Encoded], text: GeneratedText) -> Canvas:
        """Return the branches that guidance needs; the engine merges those with equal contexts."""
        shapes, prompter = shapes_of(sources), self.prompter
        found, bucket = prompter.contexts(job, shapes, text.ids), prompter.bucket(job, shapes)
        grid, written = picture_grid(bucket.size), []
        for context in prompter.branches(job, found):
            layout = context.noise(grid)
            written.append(BranchSequence(layout.ids, context.length, layout.length, layout))
        words = prompter.vocabulary
        read_again = text.ids is not None and words.encode(words.decode(text.ids))
        is_other = text.ids is not None and read_again != words.inner(text.ids)
        return Canvas(bucket, tuple(written), notes=(_RETOKENISED,) if is_other else ())

    def denoise_plan(self, job: ImageJob, canvas: Canvas, branches: int) -> DenoisePlan:
        """Return the plan of denoising: N noise levels, of which the last is an end point."""
        # Of equal branches, the engine keeps the first.
        places = {own: place for place, own in enumerate(dict.fromkeys(canvas.branches))}
        number = [places[own] for own in canvas.branches]
        guidance = Guidance(
            text_scale=job.guidance_scale,
            image_scale=job.image_guidance_scale or 0.0,
            renorm=job.guidance_renorm or "none",
            interval=job.guidance_interval or (0.0, 1.0),
            text=number[1] if len(number) > 1 else 0,
            image=number[2] if len(number) > 2 else None,
            least=job.guidance_renorm_min or 0.0,
        )
        return DenoisePlan(
            sent(self.initial_latents(canvas.bucket.size, job.seed), self.network.weight.device),
            # The last of the job's noise levels begins no step.
            Schedule(max(0, job.num_inference_steps - 1), job.flow_shift),
            guidance,
            guidance.is_active,
        )

    def initial_latents(self, size: Size, seed: int) -> Tensor:
        """Return noise [C, Y, X], drawn token by token in float32 on the CPU, as published."""
        grid = picture_grid(size)
        generator = torch.Generator().manual_seed(seed)
        rows_NP = torch.randn(grid.cells, self.prompter.arch.patch_values, generator=generator)
        return unpacked(rows_NP, grid.rows, grid.columns)

    @torch.no_grad()
    def velocities(self, pictures: Sequence[DenoiseInput]) -> list[Tensor]:
        markers = self.prompter.markers
        return self.network.velocities(pictures, (markers.start, markers.end))

    def decode_latents(self, latents_CYX: Tensor) -> Tensor:
        levels_CHW = (self.codec.decode(latents_CYX) / 2 + 0.5).clamp(0, 1).float()
        # Levels of 255 are truncated, as published, not rounded.
        return ((levels_CHW * 255).floor() / 255).permute(1, 2, 0).cpu()

    def round_trip(self, pixels: np.ndarray, digest: str) -> np.ndarray:
        noise_CYX = self.posterior_noise(Size(*pixels.shape[:2]), digest)
        levels_HWC = self.decode_latents(self.codec.encode(_levels(pixels), noise_CYX))
        return np.asarray((levels_HWC * 255).round().to(torch.uint8).numpy())


def _levels(pixels: np.ndarray) -> Tensor:
    """Return a picture as the networks read it, [C, H, W], -1 to 1."""
    return (torch.from_numpy(pixels).permute(2, 0, 1).float() / 255 - 0.5) / 0.5


def _patches(levels_CHW: Tensor, grid: Grid) -> Tensor:
    """Return the ViT's patches, [N, P]: row and column in the patch, then channel, the fastest."""
    side = levels_CHW.shape[-1] // grid.columns
    cells = levels_CHW.reshape(3, grid.rows, side, grid.columns, side)
    return cells.permute(1, 3, 2, 4, 0).reshape(grid.cells, -1)
