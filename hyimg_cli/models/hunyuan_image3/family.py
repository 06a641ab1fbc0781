"""HunyuanImage-3 as the engine sees it: the network and its prompter."""

# Legend: C channel, Y X latent rows and columns, V vocabulary
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from hyimg_cli.diffusion.denoise import DenoisePlan
from hyimg_cli.diffusion.guidance import CFG
from hyimg_cli.diffusion.schedule import Schedule
from hyimg_cli.kernels.attention import warn_of_slow_kernel
from hyimg_cli.kernels.choice import has_triton
from hyimg_cli.kernels.offload import Offload
from hyimg_cli.kernels.ops import penalize
from hyimg_cli.kernels.rows import invariant_multiple
from hyimg_cli.kernels.transfer import sent, to_device
from hyimg_cli.kv.buffer import Buffer
from hyimg_cli.media.images import cut_off, fit_cover, stretch
from hyimg_cli.models.common.model import DecoderModel, buffer_of, rows_of, shapes_of
from hyimg_cli.models.hunyuan_image3.graphs import (
    DecodeGraphs,
    decode_graphs,
    is_one_gpu,
    refuse_without_gpu,
)
from hyimg_cli.models.hunyuan_image3.model import HunyuanImage3ForCausalMM, SourceRows
from hyimg_cli.models.hunyuan_image3.prompter import Prompter
from hyimg_cli.models.hunyuan_image3.ranked import load_ranked
from hyimg_cli.models.hunyuan_image3.sequence import SourceShape
from hyimg_cli.models.hunyuan_image3.vae import TiledPicture
from hyimg_cli.models.hunyuan_image3.vision import vision_inputs
from hyimg_cli.models.hunyuan_image3.weights import expected_shapes, load, offload_experts
from hyimg_cli.models.protocols import (
    BranchSequence,
    Canvas,
    Context,
    DenoiseInput,
    Encoded,
    GeneratedText,
    Prefill,
)
from hyimg_cli.parallel.devices import device_of
from hyimg_cli.parallel.ranks import RankPool
from hyimg_cli.settings.run import ModelChoice, VaeDtype
from hyimg_cli.spec.card import Bucket, ModelCard
from hyimg_cli.spec.digest import seed_from
from hyimg_cli.spec.job import ImageJob, Size


def load_family(
    prompter: Prompter,
    choice: ModelChoice,
    *,
    is_batch_invariant: bool,
    pool: RankPool | None = None,
) -> "HunyuanImage3":
    """Load the weights on the chosen device: float32 on CPU, bfloat16 on GPU by default.

    With a `pool`, each rank loads its share of the layers on its device, and `branch_sets` share
    out the guidance branches.
    """
    device = device_of(choice) if pool is None else pool.here.device.type
    device_map = None if device == "cpu" else device
    if choice.decode_graphs == "on":
        refuse_without_gpu(device_map)
    name, form, card = choice.dtype_on(device), choice.quantization, prompter.card
    graphs, dtype = None, getattr(torch, name)
    share_of = partial(
        load,
        prompter.folder,
        dtype=dtype,
        quantization=form,
        cache=choice.weights_cache,
    )
    if pool is None:
        network = share_of(device_map=device_map, offloads_experts=choice.offloads_experts)
        if choice.offloads_experts:
            offload_experts(network, choice.expert_room)
        if choice.wants_graphs(on_one_gpu=is_one_gpu(device_map), has_triton=has_triton()):
            graphs = decode_graphs(network, form)
    else:
        sets = pool.branch_sets
        network = load_ranked(share_of, pool, branch_sets=sets)
        # Ranks on the CPU share main memory; on GPUs each has its own.
        together = pool.size if device == "cpu" else 1
        share = prompter.rank_bytes(pool.size // sets, name, form).kv_share
        kv_bytes = round(card.kv_bytes_per_token * share * together)
        card = replace(card, kv_bytes_per_token=kv_bytes)
    if is_batch_invariant and device == "cpu":
        network.make_batch_invariant(invariant_multiple())
    if is_one_gpu(device_map):
        warn_of_slow_kernel(network.device, dtype)
    tiled = TiledPicture(network.vae) if choice.vae_use_tiling else None
    return HunyuanImage3(
        network,
        prompter,
        tiled,
        graphs,
        card=card,
        decodes_in_half=decodes_in_half(choice.vae_dtype, device),
        vae_waits=choice.offloads_experts,
    )


def decodes_in_half(asked: VaeDtype, device: str) -> bool:
    """Return True if the VAE decodes under float16 autocast: as asked, or as upstream on a GPU."""
    return asked == "float16" or (asked == "auto" and device != "cpu")


class HunyuanImage3(DecoderModel):
    """One loaded checkpoint."""

    source_shape, source_rows = SourceShape, SourceRows
    network: HunyuanImage3ForCausalMM
    prompter: Prompter

    def __init__(
        self,
        network: HunyuanImage3ForCausalMM,
        prompter: Prompter,
        tiled: TiledPicture | None = None,
        graphs: DecodeGraphs | None = None,
        *,
        card: ModelCard | None = None,
        decodes_in_half: bool = False,
        vae_waits: bool = False,
    ) -> None:
        """`tiled`: decodes tile by tile; `graphs`: text is decoded by CUDA graphs.

        `decodes_in_half`: the VAE decodes under float16 autocast, as upstream; `vae_waits`: it is
        in main memory between its turns. `card`: the checkpoint's, with the bytes of this rank's
        part.
        """
        self.network, self.prompter, self.card = network, prompter, card or prompter.card
        self.graphs: DecodeGraphs | None = graphs
        self._tiled, self._decodes_in_half, self._vae_waits = tiled, decodes_in_half, vae_waits
        # Turns of their own: a half may encode pictures while the other one decodes.
        self._encoding, self._decoding = (
            partial(Offload(network.device).turn, half) if vae_waits else nullcontext
            for half in (network.vae.encoder, network.vae.decoder)
        )

    @property
    def rows_seen(self) -> int:
        return self.network.model.rows_seen

    def memo_counts(self) -> dict[str, dict[str, int]]:
        return {**super().memo_counts(), "rope_tables": self.network.angles.counts()}

    @property
    def device_name(self) -> str:
        parts = self.network.named_parameters()
        devices = {
            str(p.device) for name, p in parts if not (self._vae_waits and name.startswith("vae."))
        }
        return ",".join(sorted(devices))

    @property
    def layer_devices(self) -> list[torch.device]:
        return self.network.layer_devices

    @property
    def parameter_count(self) -> int:
        """Count the whole network's parameters, whatever this rank holds."""
        return sum(math.prod(shape) for shape in expected_shapes(self.network.arch).values())

    def encode_source(self, pixels: np.ndarray, digest: str) -> Encoded:
        """Return both views of a source image: VAE latents of its bucket, ViT features of the
        whole.

        The posterior is sampled with a seed made from the image's own bytes, not from the job's:
        every job with this source, and both stages of each, sees the same latents.
        """
        return self._encoded(pixels, digest, fit_cover)

    def encode_stretched(self, pixels: np.ndarray, digest: str) -> Encoded:
        """Encode the whole image, resized, for the VAE, and as usual for the ViT."""
        return self._encoded(pixels, digest, stretch)

    @torch.no_grad()
    def _encoded(
        self, pixels: np.ndarray, digest: str, fit: Callable[[np.ndarray, Size], np.ndarray]
    ) -> Encoded:
        height, width = pixels.shape[:2]
        bucket, note = self.prompter.fit(height, width)
        if note and fit is fit_cover:
            note += cut_off(Size(height, width), bucket.size)
        inputs = vision_inputs(pixels, self.network.arch.vision)
        latents_1CYX = self._latents(fit(pixels, bucket.size), seed_from(digest))
        return Encoded(
            digest=digest,
            shape=self.prompter.source_shape(bucket, inputs.grid),
            rows=self.network.encode_source(latents_1CYX, inputs),
            notes=(note,) if note else (),
        )

    def text_budget(self, job: ImageJob, context: Context) -> int:
        return self.prompter.text_budget(job, len(context.ids))

    @torch.no_grad()
    def feed(self, runs: Sequence[tuple[Context, Sequence[int] | Tensor]]) -> None:
        rows = [(ids, buffer_of(context)) for context, ids in runs]
        hidden_RM = (self.graphs or self.network.feed)(rows)
        for (context, _), hidden_M in zip(runs, hidden_RM, strict=True):
            context.hidden_M = hidden_M

    def ending(self, context: Context) -> tuple[int, ...]:
        """Return the most likely of the ratio tokens that the checkpoint may choose."""
        logits_V, ratios = self.text_logits([context])[0], self.prompter.allowed_ratios
        held_N = to_device(context.ids, logits_V.device)
        penalize(logits_V, held_N, self.card.defaults.repetition_penalty)
        # The first of equals, as in `choose`.
        return (ratios[int(logits_V[list(ratios)].argmax())],)

    def canvas(self, job: ImageJob, sources: Sequence[Encoded], text: GeneratedText) -> Canvas:
        """Return the canvas in the size of the text's last ratio token, or of the job."""
        if job.size.is_auto:
            index = self.prompter.vocabulary.ratios.index(text.ending[-1])
            known = self.card.buckets
            bucket, note = next(one for one in known if one.ratio_index == index), ""
        else:
            size = job.size
            bucket, note = self.prompter.fit(size.height, size.width, is_ratio=size.is_ratio)
        layout = self.prompter.picture(job, shapes_of(sources), text.ids, bucket)
        start, stop, most = layout.live_start, layout.live_stop, self.card.max_positions
        rows = (layout.ids, layout.unconditional_ids)[: self.prompter.branch_count(job)]
        warnings = []
        if stop > most:
            what = f"the sequence is longer than in training ({stop} positions, limit {most})"
            warnings.append(what)
        branches = tuple(BranchSequence(ids, start, stop, layout) for ids in rows)
        notes = (note,) if note else ()
        return Canvas(bucket, branches, notes, tuple(warnings))

    @property
    def branch_sets(self) -> int:
        return self.network.branch_sets

    def new_branch_buffer(self, number: int) -> Buffer:
        return self.network.new_buffer(number % self.branch_sets)

    @torch.no_grad()
    def prefill_branches(self, prefills: Sequence[Prefill]) -> None:
        self.network.prefill_branches([rows_of(one) for one in prefills if one.rows])

    def denoise_plan(self, job: ImageJob, canvas: Canvas, branches: int) -> DenoisePlan:
        return DenoisePlan(
            self.initial_latents(canvas.bucket, job.seed),
            Schedule(job.num_inference_steps, job.flow_shift),
            CFG([job.guidance_scale] * (branches - 1)),
        )

    def initial_latents(self, bucket: Bucket, seed: int) -> Tensor:
        """Draw noise in bfloat16, as upstream; float32 would give another picture.

        Always on the CPU, so that a seed means the same noise on every machine.
        """
        rows, columns = self.card.latent_grid(bucket.size)
        shape = (self.network.arch.vae.latent_channels, rows, columns)
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(shape, generator=generator, dtype=torch.bfloat16)
        return sent(noise.float(), self.network.device)

    @torch.no_grad()
    def velocities(self, pictures: Sequence[DenoiseInput]) -> list[Tensor]:
        return self.network.velocity(pictures)

    @torch.no_grad()
    def decode_latents(self, latents_CYX: Tensor) -> Tensor:
        vae = self._tiled or self.network.vae
        with self._decoding():
            weight = self.network.vae.decoder.conv_in.weight
            latents_1CYX = latents_CYX[None].to(weight.device, weight.dtype)
            with torch.autocast(weight.device.type, torch.float16, enabled=self._decodes_in_half):
                pixels_CYX = vae.decode(latents_1CYX)[0].float()
        return (pixels_CYX / 2 + 0.5).clamp(0, 1).permute(1, 2, 0).cpu()

    @torch.no_grad()
    def round_trip(self, pixels: np.ndarray, digest: str) -> np.ndarray:
        latents_1CYX = self._latents(pixels, seed_from(digest))
        levels = self.decode_latents(latents_1CYX[0])
        return np.asarray((levels * 255).round().to(torch.uint8).numpy())

    def _latents(self, pixels: np.ndarray, seed: int) -> Tensor:
        vae = self.network.vae
        with self._encoding():
            weight = vae.encoder.conv_in.weight
            bytes_HWC = sent(torch.from_numpy(pixels), weight.device)
            levels = bytes_HWC.permute(2, 0, 1)[None].to(weight.dtype)
            mean, logvar = vae.encode_moments((levels / 255 - 0.5) / 0.5)
        generator = torch.Generator().manual_seed(seed)
        noise = sent(torch.randn(mean.shape, generator=generator), mean.device).to(mean.dtype)
        return vae.posterior_sample(mean, logvar, noise)
