"""The rows of the table: one piece of the engine's work each, run through the product's modules.

per layer    denoise step ▸ AR decode ▸ prefill ▸ first step without reuse
whole        a step with what stands around the layers
apart        the VAE, attention over new lengths, a token's choice, a source image
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from random_network import quantization_of
from torch import Tensor
from workload import Workload, source

from hyimg_cli.diffusion.schedule import Schedule
from hyimg_cli.kernels.decode_attention import plain_decode
from hyimg_cli.kv.buffer import Buffer
from hyimg_cli.models.common.spans import QuerySpan, query_spans
from hyimg_cli.models.hunyuan_image3.family import HunyuanImage3
from hyimg_cli.models.hunyuan_image3.graphs import DecodeGraphs, bucket_of, decode_graphs
from hyimg_cli.models.hunyuan_image3.model import Branch, HunyuanImage3ForCausalMM, SourceRows
from hyimg_cli.models.protocols import DenoiseInput, Prefill
from hyimg_cli.pipelines.image.sampling import Draw, choose
from hyimg_cli.pipelines.image.stages import encoded_by
from shapes import lengths, pictures
from shapes.cases import Case, Group, Subject
from shapes.floors import work
from shapes.network import routing

# Size of a row's own numbers; if shared ones are twice as large, most tokens choose the same few
# experts.
_COMMON = 2.0


def groups(load: Workload) -> list[Group]:
    """Return the groups, most important first, because a run may be cut.

    Each frees its memory.
    """
    one, many = (f"{n} row{'s' * (n > 1)}" for n in (1, load.scale.together))
    decodes = [(f"AR decode, {rows}", f"AR decode, {rows}, graph") for rows in (one, many)]
    return [
        Group(("denoise step, 2 rows", "whole denoise step, 2 rows"), Bench.denoise),
        Group(decodes[0], partial(Bench.decode, count=1)),
        Group(decodes[1], partial(Bench.decode, count=load.scale.together)),
        Group(("prefill",), Bench.prefill),
        Group(pictures.NAMES, pictures.vae_cases, is_apart=True),
        Group(lengths.names(load), lengths.attention_cases, is_apart=True),
        Group(("first step without reuse",), Bench.without_reuse),
        Group(("denoise step, 2 rows, skewed routing",), Bench.skewed),
        Group(tuple(f"a token's choice, {n}" for n in (one, many)), Bench.choice, is_apart=True),
        Group(("source image encoded",), Bench.encoding, is_apart=True),
        Group(pictures.CONVOLUTIONS, pictures.convolution_cases, is_apart=True),
    ]


class Bench:
    """One network, and the cases that run on it."""

    def __init__(self, model: HunyuanImage3, load: Workload, subject: Subject) -> None:
        self.model, self.network, self.load = model, model.network, load
        self.subject = subject
        self.device = self.network.layer_devices[0]
        self.dtype = self.network.lm_head.weight.dtype
        self._sources = [self._source_rows()]

    def denoise(self) -> Iterator[Case]:
        branches = self._branches()
        layers = self._layers_of(branches, "denoise step, 2 rows")
        kernel = partial(lengths.attention_kernel, layers.call, self.device)
        yield replace(layers, kernel=kernel)
        yield Case(
            "whole denoise step, 2 rows",
            partial(self.model.velocities, [self._picture(branches)]),
            note="the layers, and the picture's embedding and unembedding",
        )

    def skewed(self) -> Iterator[Case]:
        """Yield the case of tokens that have much in common and so choose the same experts."""
        name = "denoise step, 2 rows, skewed routing"
        yield self._layers_of(self._branches(), name, common=_COMMON)

    def _layers_of(self, branches: Sequence[Branch], name: str, *, common: float = 0.0) -> Case:
        """Run only a denoise step's layers; `common`: the size of what all rows share."""
        live, slots = self.load.live, self.load.layout.live_stop
        rows = len(branches) * live
        width = self.network.arch.hidden_size
        x_TM = torch.randn(rows, width, device=self.device, dtype=self.dtype)
        x_TM += common * torch.randn(width, device=self.device, dtype=self.dtype)
        rope_2TD = torch.cat([branch.live_rope_2TD for branch in branches], dim=1)
        query_blocks = [branch.query_block for branch in branches]

        def call() -> Tensor:
            with torch.no_grad():
                hidden: Tensor = self.network.model(x_TM, rope_2TD, query_blocks)
            return hidden

        pairs = sum(_pairs(branch.query_block.spans) for branch in branches)
        return self._counted(name, call, rows=rows, pairs=pairs, kv_slots=len(branches) * slots)

    def decode(self, count: int) -> Iterator[Case]:
        scale = self.load.scale
        length = scale.context
        buffers = [self._filled(length) for _ in range(count)]
        ids = torch.arange(count, device=self.device)
        runs = [(ids[row : row + 1], buffer) for row, buffer in enumerate(buffers)]
        name = f"AR decode, {count} row{'s' * (count > 1)}"

        def step(feed: Callable[..., Tensor]) -> Tensor:
            for buffer in buffers:
                buffer.truncate(length)
            with torch.no_grad():
                return feed(runs)

        slots = count * (length + 1)
        plain = partial(step, self.network.feed)
        counted = self._counted(name, plain, rows=count, pairs=slots, kv_slots=slots)
        yield counted
        graphs = graphs_of(self.network, self.subject.form)
        step(graphs)
        is_replayed = bucket_of(count) in graphs.captured
        note = "CUDA graph: what the CLI does by default" if is_replayed else "no CUDA graph here"
        by_graphs = partial(step, graphs)
        yield Case(f"{name}, graph", by_graphs, counted.work, note=note, fault=graphs.failure)

    def prefill(self) -> Iterator[Case]:
        layout, rows = self.load.layout, self.load.layout.live_start
        buffer = self.network.new_buffer()
        yield self._counted(
            "prefill",
            partial(self._prefilled, buffer),
            rows=rows,
            pairs=_pairs(query_spans(0, rows, layout.full_spans)),
            kv_slots=rows,
        )

    def without_reuse(self) -> Iterator[Case]:
        layout, live = self.load.layout, self.load.live
        slots, prefix = layout.live_stop, layout.live_start

        def call() -> object:
            buffers = [self.network.new_buffer() for _ in range(2)]
            for buffer in buffers:
                self._prefilled(buffer)
            branches = [self.network.branch(layout, buffer) for buffer in buffers]
            return self.model.velocities([self._picture(branches)])

        yield self._counted(
            "first step without reuse",
            call,
            rows=2 * slots,
            pairs=2 * _pairs(query_spans(0, slots, layout.full_spans)),
            kv_slots=2 * slots,
            note=f"two prefills of {prefix} and a whole step of 2 x {live} rows",
        )

    def choice(self) -> Iterator[Case]:
        width = self.network.arch.hidden_size
        for count in (1, self.load.scale.together):
            hidden_RM = torch.randn(count, width, device=self.device, dtype=self.dtype)
            draws = [Draw(0.6, 1024, 0.95, uniform=0.3)] * count

            def call(hidden_RM: Tensor = hidden_RM, draws: list[Draw] = draws) -> Tensor:
                with torch.no_grad():
                    return choose(self.network.text_logits(hidden_RM), draws)

            yield Case(f"a token's choice, {count} row{'s' * (count > 1)}", call)

    def encoding(self) -> Iterator[Case]:
        image = source("source", self.load.scale.size)
        yield Case("source image encoded", partial(encoded_by, self.model, image))

    def _counted(
        self,
        name: str,
        call: Callable[[], object],
        *,
        rows: int,
        pairs: int,
        kv_slots: int,
        note: str = "",
    ) -> Case:
        read, busiest = routing(self.network, call)
        found = work(
            self.network.arch,
            self.subject.form,
            rows=rows,
            pairs=pairs,
            kv_slots=kv_slots,
            experts_read=read,
            width_bytes=self.dtype.itemsize,
        )
        said = f"{read:.1f} experts read, busiest quarter has {100 * busiest:.0f} % of the choices"
        return Case(name, call, found, note="; ".join(filter(None, (note, said))))

    def _branches(self) -> list[Branch]:
        buffers = [self._filled(self.load.layout.live_start) for _ in range(2)]
        return [self.network.branch(self.load.layout, buffer) for buffer in buffers]

    def _filled(self, length: int) -> Buffer:
        """Return a buffer of noise; keys have the size of the model's normed keys."""
        buffer, storage = self.network.new_buffer(), self.network.arena.storage
        buffer.reserve(length)
        for start, stop in buffer.span(0, length).runs:
            for rows_SKD in (*storage.keys_SKD, *storage.values_SKD):
                rows_SKD[start:stop].normal_()
        buffer.commit(length)
        return buffer

    def _prefilled(self, buffer: Buffer) -> Tensor:
        layout = self.load.layout
        buffer.truncate(0)
        with torch.no_grad():
            return self.network.prefill(
                [Prefill(layout, layout.ids, self._sources, buffer, layout.live_start)]
            )[0]

    def _source_rows(self) -> SourceRows:
        (block,) = self.load.layout.sources
        counts = (1, block.vae.stop - block.vae.start, block.vit.stop - block.vit.start)
        width = self.network.arch.hidden_size
        timestep, vae, vit = (
            torch.ones(count, width, device=self.device, dtype=self.dtype) for count in counts
        )
        return SourceRows(timestep[0], vae, vit)

    def _picture(self, branches: Sequence[Branch]) -> DenoiseInput:
        step = next(iter(Schedule(self.load.scale.steps, 3.0).steps()))
        return DenoiseInput(self.latents(), step, 2.5, branches)

    def latents(self) -> Tensor:
        rows, columns = self.load.prompter.card.latent_grid(self.load.scale.size)
        channels = self.network.arch.vae.latent_channels
        return torch.randn(channels, rows, columns, device=self.device)


def _pairs(parts: Sequence[QuerySpan]) -> int:
    """Return the number of keys that all queries attend to together."""
    full = sum((part.stop - part.start) * part.stop for part in parts)
    unseen = (part.stop - part.start for part in parts if part.is_causal)
    return full - sum(count * (count - 1) // 2 for count in unseen)


def graphs_of(network: HunyuanImage3ForCausalMM, form: str) -> DecodeGraphs:
    """Return decode steps by graphs; on a CPU they only have that form, and are computed."""
    if network.layer_devices[0].type == "cuda":
        return decode_graphs(network, quantization_of(form))
    return DecodeGraphs(network, plain_decode, None)
