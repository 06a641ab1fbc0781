"""Keys and values that depend on neither step nor noise, shared by jobs with equal inputs.

    pictures, then text    [ pictures ][ text ][ canvas ]    each sees itself and what is before it
    references             [ references ][ text, canvas ]    the references see nothing else

The part before the canvas is a job's prefix. Each of its segments is computed by its own forward,
whether it is kept for other jobs or not, so a job's bits do not depend on earlier jobs. After the
prefix, diffusers' transformer computes the rest at each step, as it does when it keeps the prefix
for one job. Without a tree, it does exactly that: the first step computes prefix and canvas
together. On a CPU, both ways have the same bits, because rows are filled up to a multiple
(`kernels.rows`).
"""

# Legend: S row, H head, D head width, N slot of the text encoder, W its width
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import accumulate
from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers import transformer_flux2 as flux2
from diffusers.models.transformers import transformer_qwenimage21 as qwen21
from torch import Tensor

from hyimg_cli.kernels.rows import group_multiple, pad_rows
from hyimg_cli.kv.segments import ImageSegment
from hyimg_cli.kv.slices import Slice
from hyimg_cli.kv.tree import KVTree
from hyimg_cli.spec import digest
from hyimg_cli.spec.events import BranchTokens

Inputs = dict[str, Any]
# Latent rows of a picture for each slot of the text encoder.
_ROWS_A_SLOT = 4


class Prefix(ABC):
    """One job's prefixes, one per guidance branch, before the other rows while `attached`.

    Each layer's K/V are [1, S, H, D]. `branches`: rows of each prefix that was computed or found.
    """

    def __init__(self, transformer: Any, tree: KVTree[Slice] | None, scope: str) -> None:
        """`scope`: everything else that K/V depend on, besides the transformer's inputs."""
        self._transformer, self._tree, self._scope = transformer, tree, scope
        self._held: list[Slice | None] = []
        self.branches: list[BranchTokens] = []

    @contextmanager
    def attached(self, step: int) -> Iterator[None]:
        """Use the prefixes within a step; its branches must come in the same order each time."""
        network, turns = self._transformer, iter(range(9))
        self._forward = network.forward

        @wraps(self._forward)
        def behind_prefix(**inputs: Any) -> Any:
            return self._evaluate(next(turns), step, inputs)

        network.forward = behind_prefix
        try:
            yield
        finally:
            network.forward = self._forward

    def release(self) -> None:
        """Free the K/V, which the library's blocks would keep with their last step."""
        self._held.clear()

    def _evaluate(self, turn: int, step: int, inputs: Inputs) -> Any:
        if turn == len(self._held):
            segments, per_step = self.segments(inputs)
            rows = sum(one.length for one in segments)
            held, computed, made = None, rows, None
            if segments and self._tree is None:
                made, held = self.extracted(inputs, rows)
            elif segments and self._tree is not None:
                held, computed = self._shared(self._tree, inputs, segments)
            self._held.append(held)
            self.branches.append(BranchTokens(0, rows - computed, computed, per_step))
            if made is not None and step == 0:
                return made
        kept = self._held[turn]
        if kept is None:
            return self._forward(**inputs)
        return self.evaluate(inputs, kept)

    def _shared(
        self, tree: KVTree[Slice], inputs: Inputs, segments: Sequence[ImageSegment]
    ) -> tuple[Slice, int]:
        """Return the prefix, and how many of its rows were computed."""
        with tree.pinned(tree.match(self._scope, segments)) as kept:
            parts = list(kept.payloads)
        for number in range(len(parts), len(segments)):
            parts.append(self.computed(inputs, number, parts))
        ends = list(accumulate(one.length for one in segments))
        tree.insert(self._scope, segments, lambda start, stop: parts[ends.index(stop)])
        return _joined(parts), ends[-1] - kept.length

    @abstractmethod
    def segments(self, inputs: Inputs) -> tuple[list[ImageSegment], int]:
        """Return segments named by content, and the rows that each step computes after them.

        Segments with equal content have equal K/V everywhere.
        """

    @abstractmethod
    def computed(self, inputs: Inputs, number: int, before: Sequence[Slice]) -> Slice:
        """Compute a segment's K/V."""

    @abstractmethod
    def extracted(self, inputs: Inputs, rows: int) -> tuple[Any, Slice]:
        """Return the result of the library's step over prefix and canvas, and the prefix's K/V."""

    @abstractmethod
    def evaluate(self, inputs: Inputs, held: Slice) -> Any:
        """Run a step's rows after the prefix."""


class PicturesThenText(Prefix):
    """Qwen-Image-2.1, which modulates text and pictures at time 0.

    Two segments: up to the last picture, and the text after it up to the canvas.
    """

    def __init__(self, transformer: Any, tree: KVTree[Slice] | None, scope: str) -> None:
        super().__init__(transformer, tree, scope)
        self._made_places = dict[int, Tensor]()

    def segments(self, inputs: Inputs) -> tuple[list[ImageSegment], int]:
        found = []
        texts_NW, is_picture_N, latents = self._parts(inputs)
        for first, stop in self._spans(is_picture_N):
            mask = is_picture_N[first:stop]
            pictures = int(mask.sum())
            content = [mask, *([latents] if pictures else ())]
            if not pictures or texts_NW.device.type == "cpu":
                # The encoder reads words between pictures together with the text after them. On a
                # GPU their rounding depends on that text, so there they do not name the segment.
                content.append(texts_NW[first:stop][~mask])
            what = f"{inputs['img_shapes'][0][:-1] if pictures else ''} {_digest(*content)}"
            rows = len(mask) + (_ROWS_A_SLOT - 1) * pictures
            found.append(ImageSegment((0,) * rows, what, ()))
        _, height, width = inputs["img_shapes"][0][-1]
        return found, int(height * width)

    def computed(self, inputs: Inputs, number: int, before: Sequence[Slice]) -> Slice:
        network, shapes, slots_N = self._transformer, inputs["img_shapes"][0], inputs["img_mask"][0]
        texts_NW, is_picture_N, latents = self._parts(inputs)
        first, stop = self._spans(is_picture_N)[number]
        repeats_N = torch.where(slots_N, _ROWS_A_SLOT, 1)
        is_picture_S = slots_N.repeat_interleave(repeats_N)
        start, end = int(repeats_N[:first].sum()), int(repeats_N[:stop].sum())
        # The library's products have all rows; here, later ones must not change the bits.
        read_NW = texts_NW if stop == len(texts_NW) else _filled(texts_NW[:stop])
        rows = network.txt_in(read_NW[None])[:, first:stop]
        rows = rows.repeat_interleave(repeats_N[first:stop], dim=1)
        if is_picture_N[first:stop].any():
            rows[:, is_picture_S[start:end]] = network.img_in(latents)
        count, rows = rows.shape[1], _filled(rows[0])[None]
        rotary = network.pos_embed(shapes, is_picture_S, device=rows.device)[start:end]
        blocks, _ = network.build_token_metadata(is_picture_S, shapes)
        runs = qwen21._qwenimage21_prefix_segments(blocks, end)
        # Two rows, as in a step of one picture: a single one would round differently.
        times = network.time_text_embed(rows.new_zeros(2), rows)
        inputs = {
            "modulation": network.modulation(times)[-1:],
            "rotary_emb": _filled(rotary),
            "segments": [run for run in runs if run[0] >= start],
        }
        layers = qwen21.QwenImage21KVCache(len(network.transformer_blocks)).layer_caches
        if before:
            _store(_joined(before), layers)
        with _processor(network, _BehindProcessor(count)):
            for layer, block in zip(layers, network.transformer_blocks, strict=True):
                rows = block(hidden_states=rows, layer_cache=layer, **inputs)
        return _held_by(layers)

    def extracted(self, inputs: Inputs, rows: int) -> tuple[Any, Slice]:
        made = self._forward(**inputs | {"kv_cache_mode": "extract"})
        self._places(inputs, rows)
        return made, _held_by(inputs["kv_cache"].layer_caches)

    def evaluate(self, inputs: Inputs, held: Slice) -> Any:
        """Compute the canvas alone, to the library's bits.

        The library embeds the whole prefix at each step, and reads its places from the GPU.
        """
        cache = qwen21.QwenImage21KVCache(len(held.keys))
        _store(held, cache.layer_caches)
        network, rotary = self._transformer, self._places(inputs, held.length)
        # All rows, as in the library: a product of fewer may round differently.
        rows = network.img_in(inputs["hidden_states"])[:, -len(rotary) :]
        # With time 0, as in the library: a single row would round differently.
        both = torch.cat([inputs["timestep"].to(rows.dtype), rows.new_zeros(1)])
        times = network.time_text_embed(both, rows)
        given = {"modulation": network.modulation(times)[:1], "rotary_emb": rotary}
        for layer, block in zip(cache.layer_caches, network.transformer_blocks, strict=True):
            rows = block(hidden_states=rows, layer_cache=layer, kv_cache_mode="cached", **given)
        is_canvas_S = torch.ones(rows.shape[1], dtype=torch.bool, device=rows.device)
        return (network.proj_out(network.norm_out(rows, times, is_canvas_S)),)

    def _places(self, inputs: Inputs, length: int) -> Tensor:
        """Return the canvas's rotary embedding after a prefix of that length.

        It is made in a job's first step, since it is read from the GPU.
        """
        if length not in self._made_places:
            slots_N, device = inputs["img_mask"][0], inputs["hidden_states"].device
            is_picture_S = slots_N.repeat_interleave(torch.where(slots_N, _ROWS_A_SLOT, 1))
            every = self._transformer.pos_embed(inputs["img_shapes"][0], is_picture_S, device)
            self._made_places[length] = every[length:].clone()
        return self._made_places[length]

    @staticmethod
    def _parts(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """Return the texts' rows, which of their slots are pictures, and the pictures' latents."""
        (texts_NW,) = inputs["encoder_hidden_states"]
        is_picture_N = inputs["img_mask"][0, : len(texts_NW)]
        rows = _ROWS_A_SLOT * int(is_picture_N.sum())
        return texts_NW, is_picture_N, inputs["hidden_states"][:, :rows]

    @staticmethod
    def _spans(is_picture_N: Tensor) -> list[tuple[int, int]]:
        slots = is_picture_N.nonzero()
        last = int(slots[-1]) + 1 if len(slots) else 0
        return [span for span in ((0, last), (last, len(is_picture_N))) if span[0] < span[1]]


class _BehindProcessor:
    """Attention of new rows after those in a layer's cache, where it then stores the new ones.

    Only the first `count` rows are seen and stored; the others fill a product up.
    """

    def __init__(self, count: int) -> None:
        self._count = count

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        *,
        rotary_emb: Tensor,
        layer_cache: Any,
        segments: Sequence[tuple[int, int, bool]],
        **_: object,
    ) -> Tensor:
        past = segments[0][0]
        query, key, value, _count = qwen21._qwenimage21_prepare_qkv(
            attn, hidden_states, rotary_emb, layer_cache if past else None, "cached", None
        )
        end = past + self._count
        layer_cache.store(key[:, past:end].clone(), value[:, past:end].clone())
        made = []
        for start, stop, is_text in segments:
            seen = torch.ones(stop - start, stop, dtype=torch.bool, device=query.device)
            made.append(
                dispatch_attention_fn(
                    query[:, start - past : stop - past],
                    key[:, :stop],
                    value[:, :stop],
                    attn_mask=seen.tril(start)[None, None] if is_text else None,
                )
            )
        rows = _filled(torch.cat(made, dim=1).flatten(2, 3)[0].type_as(query))[None]
        return attn.to_out[1](attn.to_out[0](rows))


@contextmanager
def _processor(network: Any, processor: Any) -> Iterator[None]:
    """Make every block use `processor` within the context."""
    own = [block.attn.processor for block in network.transformer_blocks]
    for block in network.transformer_blocks:
        block.attn.processor = processor
    try:
        yield
    finally:
        for block, one in zip(network.transformer_blocks, own, strict=True):
            block.attn.processor = one


class References(Prefix):
    """FLUX.2 klein KV. All references are one segment, because they attend to each other."""

    def __init__(self, transformer: Any, tree: KVTree[Slice] | None, scope: str) -> None:
        super().__init__(transformer, tree, scope)
        for block in transformer.transformer_blocks:
            block.attn.set_processor(flux2.Flux2KVAttnProcessor())
        for block in transformer.single_transformer_blocks:
            block.attn.set_processor(flux2.Flux2KVParallelSelfAttnProcessor())

    def segments(self, inputs: Inputs) -> tuple[list[ImageSegment], int]:
        # The canvas has time 0, references have later times.
        count = int((inputs["img_ids"][0, :, 0] != 0).sum())
        texts, pictures = inputs["encoder_hidden_states"], inputs["hidden_states"]
        per_step = int(texts.shape[1] + pictures.shape[1] - count)
        if not count:
            return [], per_step
        references = self._cut(inputs, slice(-count, None))
        return [ImageSegment((0,) * count, _digest(*references.values()), ())], per_step

    def computed(self, inputs: Inputs, number: int, before: Sequence[Slice]) -> Slice:
        (segment,), _ = self.segments(inputs)
        nothing = {
            "encoder_hidden_states": inputs["encoder_hidden_states"][:, :0],
            "txt_ids": inputs["txt_ids"][..., :0, :],
        }
        alone = self._cut(inputs, slice(-segment.length, None)) | nothing
        return self._extracted(inputs | alone, segment.length)[1]

    def extracted(self, inputs: Inputs, rows: int) -> tuple[Any, Slice]:
        own, canvas = self._cut(inputs, slice(-rows, None)), self._cut(inputs, slice(-rows))
        # The blocks put references after the canvas.
        together = {name: torch.cat([own[name], canvas[name]], dim=1) for name in own}
        return self._extracted(inputs | together, rows)

    def evaluate(self, inputs: Inputs, held: Slice) -> Any:
        network = self._transformer
        blocks = len(network.transformer_blocks), len(network.single_transformer_blocks)
        cache = flux2.Flux2KVCache(*blocks)
        cache.num_ref_tokens = held.length
        _store(held, _layers(cache))
        canvas = self._cut(inputs, slice(-held.length))
        return self._forward(**inputs | canvas | {"kv_cache": cache, "kv_cache_mode": "cached"})

    def _extracted(self, inputs: Inputs, rows: int) -> tuple[Any, Slice]:
        *made, cache = self._forward(**inputs, kv_cache_mode="extract", num_ref_tokens=rows)
        return made, _held_by(_layers(cache))

    @staticmethod
    def _cut(inputs: Inputs, rows: slice) -> Inputs:
        """Select rows of the pictures: first the canvas, then the references."""
        return {name: inputs[name][:, rows] for name in ("hidden_states", "img_ids")}


def _layers(cache: Any) -> list[Any]:
    return [*cache.double_block_caches, *cache.single_block_caches]


def _held_by(layers: Sequence[Any]) -> Slice:
    """Return what the library's layer caches hold."""
    return Slice(*zip(*(layer.get() for layer in layers), strict=True))


def _store(held: Slice, layers: Sequence[Any]) -> None:
    for layer, keys, values in zip(layers, held.keys, held.values, strict=True):
        layer.store(keys, values)


def _joined(parts: Sequence[Slice]) -> Slice:
    """Join segments in order."""
    if len(parts) == 1:
        return parts[0]
    keys = zip(*(part.keys for part in parts), strict=True)
    values = zip(*(part.values for part in parts), strict=True)
    return Slice(
        tuple(torch.cat(one, dim=1) for one in keys), tuple(torch.cat(one, dim=1) for one in values)
    )


def _filled(rows: Tensor) -> Tensor:
    """Return rows, [S, ..], with zeros after them, so that a CPU's products do not depend on S."""
    return pad_rows(rows, group_multiple(rows.device)) if rows.device.type == "cpu" else rows


def _digest(*tensors: Tensor) -> str:
    """Return the digest of the tensors' bytes."""
    data = (one.detach().contiguous().view(-1).view(torch.uint8) for one in tensors)
    return digest.of_bytes(b"".join(one.cpu().numpy().tobytes() for one in data))


PREFIXES: dict[str, type[Prefix]] = {
    "pictures, then text": PicturesThenText, "references": References,
}  # fmt: skip
