"""The rows of the table: one piece of the engine's work each, run through the product's modules.

per layer    denoise step ▸ AR decode ▸ prefill ▸ first step without reuse
whole        a step with what stands around the layers, a token's choice, a picture in the VAE
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hyimg_cli.diffusion.schedule import Schedule
from hyimg_cli.kernels.attention import row_attention
from hyimg_cli.kernels.decode_attention import plain_decode
from hyimg_cli.kv.buffer import Buffer
from hyimg_cli.models.hunyuan_image3.attention import Piece, pieces
from hyimg_cli.models.hunyuan_image3.family import HunyuanImage3
from hyimg_cli.models.hunyuan_image3.graphs import DecodeGraphs, bucket_of, decode_graphs
from hyimg_cli.models.hunyuan_image3.model import Branch, HunyuanImage3ForCausalMM, SourceRows
from hyimg_cli.models.hunyuan_image3.rope import joined
from hyimg_cli.models.hunyuan_image3.tiled import TiledPicture
from hyimg_cli.models.protocols import LivePicture
from hyimg_cli.pipelines.image.sampling import Draw, choose
from hyimg_cli.pipelines.image.stages import encoded_by
from shapes.floors import Floors, Work, work
from shapes.network import quantization_of, routing
from shapes.scale import Workload, source
from shapes.timing import Timed

# More than a row's runs: each has a length of its own.
_LENGTHS = 64
# Of a row's own numbers; at twice their size most tokens like the same few experts.
_COMMON = 2.0
# Milliseconds of a layer that are wanted, by row and by how the experts are held.
GOALS = {
    "denoise step, 2 rows": {"dense": 12.5, "fp8": 9.5},
    "AR decode, 1 row": {"dense": 0.26, "fp8": 0.26},
    "AR decode, 1 row, graph": {"dense": 0.26, "fp8": 0.26},
    "AR decode, 16 rows": {"dense": 1.5, "fp8": 1.5},
    "AR decode, 16 rows, graph": {"dense": 1.5, "fp8": 1.5},
    "prefill": {"dense": 11.0, "fp8": 11.0},
    "first step without reuse": {"dense": 36.0, "fp8": 36.0},
}


@dataclass(frozen=True)
class Row:
    """One measurement. Milliseconds of a call, and, where layers do the work, of one layer.

    `of_32_layers`: a layer's time times 32; `is_whole`: the network measured has all its layers,
    so that nothing is extrapolated. `of_floor`: a layer's time over the least that is possible.
    """

    name: str
    form: str
    layers: int
    timed: Timed
    per_layer: float | None = None
    of_32_layers: float | None = None
    is_whole: bool = False
    floor: float | None = None
    of_floor: float | None = None
    goal: float | None = None
    note: str = ""

    @property
    def misses_goal(self) -> bool:
        """Whether a goal was set and not reached."""
        return self.goal is not None and self.per_layer is not None and self.per_layer > self.goal


@dataclass(frozen=True)
class Case:
    """What a row runs, and what one layer of it must do; None where layers are not the point."""

    name: str
    call: Callable[[], object]
    work: Work | None = None
    note: str = ""


class Bench:
    """One network, and the cases that are run on it."""

    def __init__(
        self, model: HunyuanImage3, load: Workload, form: str, floors: Floors, *, is_whole: bool
    ) -> None:
        self.model, self.network, self.load, self.form = model, model.network, load, form
        self._floors, self._is_whole = floors, is_whole
        self.device = self.network.layer_devices[0]
        self._dtype = self.network.lm_head.weight.dtype
        self._sources = [self._source_rows()]

    def cases(self) -> Iterator[Callable[[], Iterator[Case]]]:
        """In the order of what matters most: a run may be cut. Each lets go of its memory."""
        many = self.load.scale.together
        yield self._denoise
        yield partial(self._decode, 1)
        yield partial(self._decode, many)
        yield self._prefill
        yield self._without_reuse
        yield self._skewed
        yield self._lengths
        yield self._around
        yield self._pictures

    def row(self, case: Case, took: Timed) -> Row:
        """What a case's time means."""
        layers = self.network.arch.num_hidden_layers
        if case.work is None:
            return Row(case.name, self.form, layers, took, note=case.note)
        per_layer = took.median / layers
        floor = self._floors.milliseconds(case.work, self.form)
        return Row(
            case.name,
            self.form,
            layers,
            took,
            per_layer=per_layer,
            of_32_layers=32 * per_layer,
            is_whole=self._is_whole,
            floor=floor,
            of_floor=per_layer / floor,
            # Goals are of the released shapes.
            goal=GOALS.get(case.name, {}).get(self.form)
            if self.load.scale.name == "real"
            else None,
            note=case.note,
        )

    def _denoise(self) -> Iterator[Case]:
        branches = self._branches()
        yield self._layers_of(branches, "denoise step, 2 rows")
        yield Case(
            "whole denoise step, 2 rows",
            partial(self.model.velocities, [self._picture(branches)]),
            note="the layers, and the picture's embedding and unembedding",
        )

    def _skewed(self) -> Iterator[Case]:
        """Tokens that have much in common like the same experts."""
        name = "denoise step, 2 rows, skewed routing"
        yield self._layers_of(self._branches(), name, common=_COMMON)

    def _layers_of(self, branches: Sequence[Branch], name: str, *, common: float = 0.0) -> Case:
        """A denoise step's layers alone; `common`: how large what all rows share is."""
        live, slots = self.load.live, self.load.layout.live_stop
        rows = len(branches) * live
        width = self.network.arch.hidden_size
        x_TM = torch.randn(rows, width, device=self.device, dtype=self._dtype)
        x_TM += common * torch.randn(width, device=self.device, dtype=self._dtype)
        rope = joined([branch.live_rope for branch in branches])
        stretches = [branch.stretch for branch in branches]

        def call() -> Tensor:
            with torch.no_grad():
                hidden: Tensor = self.network.model(x_TM, rope, stretches)
            return hidden

        pairs = sum(_pairs(branch.stretch.pieces) for branch in branches)
        return self._counted(name, call, rows=rows, pairs=pairs, kv_slots=len(branches) * slots)

    def _decode(self, count: int) -> Iterator[Case]:
        scale = self.load.scale
        length = scale.context
        buffers = [self._filled(length, length + 4) for _ in range(count)]
        ids = torch.arange(count, device=self.device)
        runs = [(ids[row : row + 1], buffer) for row, buffer in enumerate(buffers)]
        name = f"AR decode, {count} row{'s' * (count > 1)}"

        def step(feed: Callable[..., Tensor]) -> Tensor:
            for buffer in buffers:
                buffer.withdraw(length)
            with torch.no_grad():
                return feed(runs)

        slots = count * (length + 1)
        plain = partial(step, self.network.feed)
        counted = self._counted(name, plain, rows=count, pairs=slots, kv_slots=slots)
        yield counted
        graphs = graphs_of(self.network, self.form)
        step(graphs)
        is_replayed = bucket_of(count) in graphs.captured
        note = "CUDA graph: what the CLI does by default" if is_replayed else "no CUDA graph here"
        told = "; ".join(filter(None, (note, graphs.failure)))
        yield Case(f"{name}, graph", partial(step, graphs), counted.work, told)
        hidden_RM = torch.randn(
            count, self.network.arch.hidden_size, device=self.device, dtype=self._dtype
        )
        draws = [Draw(0.6, 1024, 0.95, uniform=0.3)] * count

        def choice() -> Tensor:
            with torch.no_grad():
                return choose(self.network.text_logits(hidden_RM), draws)

        yield Case(f"a token's choice, {count} row{'s' * (count > 1)}", choice)

    def _prefill(self) -> Iterator[Case]:
        layout, rows = self.load.layout, self.load.layout.live_start
        buffer = self.network.new_buffer(layout.live_stop)
        yield self._counted(
            "prefill",
            partial(self._prefilled, buffer),
            rows=rows,
            pairs=_pairs(pieces(0, rows, layout.full_spans)),
            kv_slots=rows,
        )

    def _without_reuse(self) -> Iterator[Case]:
        layout, live = self.load.layout, self.load.live
        slots, prefix = layout.live_stop, layout.live_start

        def call() -> object:
            buffers = [self.network.new_buffer(slots) for _ in range(2)]
            for buffer in buffers:
                self._prefilled(buffer)
            branches = [self.network.branch(layout, buffer) for buffer in buffers]
            return self.model.velocities([self._picture(branches)])

        yield self._counted(
            "first step without reuse",
            call,
            rows=2 * slots,
            pairs=2 * _pairs(pieces(0, slots, layout.full_spans)),
            kv_slots=2 * slots,
            note=f"two prefills of {prefix} and a whole step of 2 x {live} rows",
        )

    def _lengths(self) -> Iterator[Case]:
        """Attention of one row over keys of a length seen before, and of one never seen: cuDNN
        makes a plan for each.
        """
        arch, slots = self.network.arch, self.load.layout.live_stop
        shape = (2, arch.num_key_value_heads, slots + _LENGTHS, arch.head_dim)
        keys, values = torch.randn(shape, device=self.device, dtype=self._dtype)
        attend = row_attention(self.device)
        for rows in (1, self.load.live):
            size = rows, arch.num_attention_heads, arch.head_dim
            q_THD = torch.randn(size, device=self.device, dtype=self._dtype)
            for name, step in (("seen", 0), ("new", 1)):
                lengths = itertools.count(slots, step)

                def call(q: Tensor = q_THD, lengths: Iterator[int] = lengths) -> Tensor:
                    stop = next(lengths)
                    with torch.no_grad():
                        return attend(q, keys[:, :stop], values[:, :stop], False)

                plural = "s" * (rows > 1)
                yield Case(f"attention, {rows} row{plural}, length {name}", call)

    def _around(self) -> Iterator[Case]:
        image = source("source", self.load.scale.size)
        yield Case("source image encoded", partial(encoded_by, self.model, image))

    def _pictures(self) -> Iterator[Case]:
        latents_1CYX = self._latents()[None]
        for uses_tiles in (False, True):
            vae = self.network.vae
            decode = TiledPicture(vae).decode if uses_tiles else vae.decode

            def call(decode: Callable[[Tensor], Tensor] = decode) -> Tensor:
                with torch.no_grad():
                    return decode(latents_1CYX)

            card = self.load.prompter.card
            pixels = self.load.scale.size.height * self.load.scale.size.width
            planned = card.vae_bytes(pixels, latents_1CYX.device.type, in_tiles=uses_tiles) / 1e9
            name = f"VAE decode, {'tiled' if uses_tiles else 'untiled'}"
            yield Case(name, call, note=f"the plan says {planned:.2f} GB of activations")

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
            self.form,
            rows=rows,
            pairs=pairs,
            kv_slots=kv_slots,
            experts_read=read,
            width_bytes=self._dtype.itemsize,
        )
        said = f"{read:.1f} experts read, busiest quarter has {100 * busiest:.0f} % of the choices"
        return Case(name, call, found, "; ".join(filter(None, (note, said))))

    def _branches(self) -> list[Branch]:
        prefix, slots = self.load.layout.live_start, self.load.layout.live_stop
        buffers = [self._filled(prefix, slots) for _ in range(2)]
        return [self.network.branch(self.load.layout, buffer) for buffer in buffers]

    def _filled(self, length: int, capacity: int) -> Buffer:
        """A buffer of noise; keys are normed in the model, so that is their size."""
        buffer = self.network.new_buffer(capacity)
        for rows in (*buffer.keys_HSD, *buffer.values_HSD):
            rows.normal_()
        buffer.commit(length)
        return buffer

    def _prefilled(self, buffer: Buffer) -> Tensor:
        layout = self.load.layout
        buffer.withdraw(0)
        with torch.no_grad():
            return self.network.prefill(
                layout, layout.ids, self._sources, buffer, layout.live_start
            )

    def _source_rows(self) -> SourceRows:
        (block,) = self.load.layout.sources
        counts = (1, block.vae.stop - block.vae.start, block.vit.stop - block.vit.start)
        width = self.network.arch.hidden_size
        timestep, vae, vit = (
            torch.ones(count, width, device=self.device, dtype=self._dtype) for count in counts
        )
        return SourceRows(timestep[0], vae, vit)

    def _picture(self, branches: Sequence[Branch]) -> LivePicture:
        step = next(iter(Schedule(self.load.scale.steps, 3.0).steps()))
        return LivePicture(self._latents(), step, 2.5, branches)

    def _latents(self) -> Tensor:
        rows, columns = self.load.prompter.card.latent_grid(self.load.scale.size)
        channels = self.network.arch.vae.latent_channels
        return torch.randn(channels, rows, columns, device=self.device)


def _pairs(parts: Sequence[Piece]) -> int:
    """How many keys all queries look at together."""
    full = sum((part.stop - part.start) * part.stop for part in parts)
    unseen = (part.stop - part.start for part in parts if part.is_causal)
    return full - sum(count * (count - 1) // 2 for count in unseen)


def graphs_of(network: HunyuanImage3ForCausalMM, form: str) -> DecodeGraphs:
    """Decode steps by graphs; on a CPU in their shape alone, computed each time."""
    if network.layer_devices[0].type == "cuda":
        return decode_graphs(network, quantization_of(form))
    return DecodeGraphs(network, plain_decode, None)
