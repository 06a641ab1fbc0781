"""Memory of the engine, counted on a fake GPU, compared with `hyimg plan`."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from fake_gpu.device import FakeGpu
from random_network import build, quantization_of
from torch import Tensor
from workload import REAL, Workload, source, workload

from hyimg_cli.diffusion.schedule import Step
from hyimg_cli.kernels.choice import decode_attention
from hyimg_cli.kv.tree import KVTree
from hyimg_cli.memory.footprint import Needs, Together, needs, working
from hyimg_cli.models.hunyuan_image3.family import HunyuanImage3
from hyimg_cli.models.hunyuan_image3.graphs import DecodeGraphs
from hyimg_cli.models.hunyuan_image3.model import HunyuanImage3ForCausalMM, SourceRows
from hyimg_cli.models.hunyuan_image3.vae import TiledPicture
from hyimg_cli.models.hunyuan_image3.vision import VisionInputs
from hyimg_cli.models.protocols import DenoiseInput, Encoded, Prefill
from hyimg_cli.pipelines.clock import PhaseClock
from hyimg_cli.pipelines.image import stages
from hyimg_cli.pipelines.image.admission import WholeBatches
from hyimg_cli.pipelines.image.batch import ContinuousBatch
from hyimg_cli.pipelines.image.branches import Prefixes
from hyimg_cli.pipelines.image.sampling import Draw, choose
from hyimg_cli.pipelines.image.stages import ImageRequest, ImageStages
from hyimg_cli.pipelines.queue import Ticket
from hyimg_cli.settings.run import BatchConfig, ModelChoice, OutputConfig, ReuseConfig, RunConfig
from hyimg_cli.spec.job import ImageJob

DEVICE = torch.device("cuda:0")
# Few tokens are written: their number changes nothing in a step; the prefix keeps its length.
_SCALE, _STEPS = replace(REAL, think=5), 2
SIZE, CONTEXT = REAL.size, REAL.context


@dataclass(frozen=True)
class Counted:
    """Bytes: what the plan says, and the most that tensors took by count."""

    name: str
    planned: int
    counted: int

    @property
    def ratio(self) -> float:
        return self.planned / self.counted


class Bench:
    """A network on a fake GPU; made and used inside `fake_gpu`."""

    def __init__(self, gpu: FakeGpu, folder: Path, form: str, layers: int, **config: Any) -> None:
        self.gpu, self.form = gpu, form
        self.load = workload(folder, _SCALE, layers, **config)
        before = gpu.rebase()
        network = build(self.load.arch, form, DEVICE, torch.bfloat16)
        self.model = _Model(network, self.load.prompter)
        self.network = network
        self.held = gpu.live - before
        self.config = self._config()
        self.card = self.load.prompter.card

    def weights(self) -> Counted:
        choice = self.config.model
        planned = self.card.loaded_bytes(choice.dtype, choice.quantization)
        return Counted("weights", planned, self.held)

    def forwards(self) -> Iterator[Counted]:
        """Activations of one call each: denoise steps, prefill, decode steps, the VAE."""
        rows, live = working(self.card, self.config), self.load.live
        for count in (1, 2, 4):
            pictures = [self._picture() for _ in range(count)]
            planned = rows.fixed + 2 * count * live * rows.row
            call = partial(self.network.velocity, pictures)
            yield self._peak(f"denoise step, {count} drawing", planned, call)
            del pictures, call
        layout = self.load.layout
        buffer = self.network.new_buffer()
        one = Prefill(layout, layout.ids, [self._source()], buffer, layout.live_start)
        prefill = partial(self.network.prefill, [one])
        yield self._peak("prefill", rows.fixed + layout.live_start * rows.row, prefill)
        pixels = SIZE.height * SIZE.width
        whole, tile = (
            self.card.vae_bytes(pixels, "cuda", in_tiles=in_tiles) for in_tiles in (False, True)
        )
        vae, latents_1CYX = self.network.vae, self._latents()[None]
        yield self._peak("VAE decode", whole, partial(vae.decode, latents_1CYX))
        tiled = TiledPicture(vae)
        yield self._peak("VAE decode, tiled", tile, partial(tiled.decode, latents_1CYX))
        size = SIZE
        picture = torch.zeros(1, 3, size.height, size.width, device=DEVICE)
        yield self._peak("VAE encode", whole, partial(vae.encode_moments, picture))

    def decode_step(self, count: int, *, by_graphs: bool = False) -> int:
        """Bytes that a token of `count` texts takes: forward, logits and choice."""
        context = CONTEXT
        runs = []
        for _ in range(count):
            buffer = self.network.new_buffer()
            buffer.reserve(context + 1)
            buffer.commit(context)
            runs.append((torch.zeros(1, dtype=torch.int64, device=DEVICE), buffer))
        feed = uncaptured(self.network) if by_graphs else self.network.feed
        draws = [Draw(0.6, 1024, 0.95, uniform=0.3)] * count
        base = self.gpu.rebase()
        choose(self.network.text_logits(feed(runs)), draws)
        return self.gpu.peak - base

    def requests(self, count: int, together: Together, *, has_vae: bool = True) -> Counted:
        """Whole requests through the engine's own loop, with what shares nothing.

        Without the VAE its moments are left out: what is widest of the others shows.
        """
        jobs = [self.load.request(n, steps=_STEPS, guidance=2.5) for n in range(count)]
        found = self.needs(jobs) if has_vae else replace(self.needs(jobs), encode=0, decode=0)
        self.model.has_vae = has_vae
        planned = self.weights().planned + found.widest(together).total
        self.network.arena.shrink()
        self.gpu.rebase()
        ends = self._run(jobs, together)
        assert ends == {ImageRequest: count}, ends
        name = f"{count} requests, {together.thinking} thinking, {together.drawing} drawing"
        name += "" if has_vae else ", no VAE"
        return Counted(name, planned, self.gpu.peak)

    def needs(self, jobs: Sequence[ImageJob]) -> Needs:
        return needs(jobs, self.card, self.config, prefixes=0)

    def _run(self, jobs: list[ImageJob], together: Together) -> Counter[type]:
        studio = ImageStages(
            model=self.model,
            reuse=ReuseConfig(),
            prefixes=Prefixes(KVTree(0), "counted"),
            read_source=lambda view: (source(view.path, SIZE), 0.0),
            encode=lambda shown: (self.model.encoded(shown.digest, self.load), 0.0),
        )
        run = ContinuousBatch(
            WholeBatches(map(Ticket, jobs), studio, lambda since: PhaseClock(since, lambda: None)),
            together,
        )
        ends: Counter[type] = Counter()
        with patch.object(stages, "_pixels", _no_pixels):
            for event in run.run():
                if hasattr(event, "clock"):
                    if error := getattr(event, "error", None):
                        raise error
                    ends[type(event)] += 1
        return ends

    def _peak(self, name: str, planned: int, call: Callable[[], object]) -> Counted:
        base = self.gpu.rebase()
        call()
        return Counted(name, planned, self.gpu.peak - base)

    def _picture(self) -> DenoiseInput:
        layout = self.load.layout
        branches = []
        for _ in range(2):
            buffer = self.network.new_buffer()
            buffer.reserve(layout.live_start)
            buffer.commit(layout.live_start)
            branches.append(self.network.branch(layout, buffer))
        return DenoiseInput(self._latents(), Step(0, 0.5, 0.4, 500.0, 400.0, -0.1), 2.5, branches)

    def _latents(self) -> Tensor:
        rows, columns = self.card.latent_grid(SIZE)
        return torch.zeros(self.load.arch.vae.latent_channels, rows, columns, device=DEVICE)

    def _source(self) -> SourceRows:
        (block,) = self.load.layout.sources
        counts = (1, block.vae.stop - block.vae.start, block.vit.stop - block.vit.start)
        width = self.load.arch.hidden_size
        timestep, vae, vit = (
            torch.zeros(n, width, device=DEVICE, dtype=torch.bfloat16) for n in counts
        )
        return SourceRows(timestep[0], vae, vit)

    def _config(self) -> RunConfig:
        choice = ModelChoice(
            model=self.load.job.model,
            device="cuda",
            dtype="bfloat16",
            quantization=quantization_of(self.form),
            # What graphs keep is not counted here: see `decode_step`.
            decode_graphs="off",
        )
        batch = BatchConfig(prefix_cache_mb=0, prefetches_sources=False)
        return RunConfig(OutputConfig(self.load.prompter.folder), model=choice, batch=batch)


class _Model(HunyuanImage3):
    """The family, whose source images have no pixels; `has_vae` False leaves out the VAE."""

    has_vae = True

    def decode_latents(self, latents_CYX: Tensor) -> Tensor:
        return super().decode_latents(latents_CYX) if self.has_vae else torch.zeros(1, 1, 3)

    def encoded(self, name: str, load: Workload) -> Encoded:
        size, vision, vae = SIZE, load.arch.vision, self.network.vae
        rows, columns = load.prompter.card.latent_grid(size)
        latents_1CYX = torch.zeros(1, load.arch.vae.latent_channels, rows, columns, device=DEVICE)
        if self.has_vae:
            pixels = torch.zeros(1, 3, size.height, size.width, device=DEVICE)
            mean, logvar = vae.encode_moments(pixels)
            latents_1CYX = vae.posterior_sample(mean, logvar, torch.zeros_like(mean))
        slots = vision.max_num_patches
        width = vision.num_channels * vision.patch_size**2
        inputs = VisionInputs(
            torch.zeros(1, slots, width),
            torch.ones(1, slots, dtype=torch.int32),
            torch.ones(1, 2, dtype=torch.int64),
        )
        return Encoded(name, load.shape, self.network.encode_source(latents_1CYX, inputs))


def uncaptured(network: HunyuanImage3ForCausalMM) -> DecodeGraphs:
    """Decode steps as graphs have them, each computed: there is nothing to capture with."""
    return DecodeGraphs(network, decode_attention(DEVICE), None)


def _no_pixels(_levels: Tensor) -> np.ndarray[Any, Any]:
    return np.zeros((1, 1, 3), dtype=np.uint8)
