"""A loaded checkpoint that writes text and draws with the same weights and one KV cache.

A family implements these methods, and `pipelines/image/stages.py` runs a job with them. What all
families share is implemented here.
"""

# Legend: C channel, Y X latent rows and columns, V vocabulary, M model width, G branch, R row
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, ClassVar, Protocol, cast

import numpy as np
import torch
from pydantic import TypeAdapter
from torch import Tensor

from hyimg_cli.diffusion.denoise import DenoisePlan
from hyimg_cli.kv.arena import Arena
from hyimg_cli.kv.buffer import Buffer
from hyimg_cli.kv.segments import Segment
from hyimg_cli.models.common.packing import pack, unpack
from hyimg_cli.models.protocols import (
    Answer,
    Canvas,
    Context,
    DenoiseInput,
    Encoded,
    GeneratedText,
    Prefill,
    TextPrompt,
    TextScript,
)
from hyimg_cli.spec.card import ModelCard
from hyimg_cli.spec.job import ImageJob


class DecoderModel(Protocol):
    """An AR + diffusion model with one sequence; families derive from it.

    Has `network` and `prompter`; `source_shape` and `source_rows` describe a source image. Methods
    raise JobError for a faulty job.
    """

    source_shape: ClassVar[type]
    source_rows: ClassVar[Callable[..., Any]]
    network: Any
    prompter: Any
    card: ModelCard
    # Decodes text with CUDA graphs, or computes the same steps; None without graphs.
    graphs: Any = None

    # The device of each layer, and of its K/V.
    layer_devices: Any
    parameter_count: Any
    # Token rows that have entered the transformer since it was loaded.
    rows_seen: Any

    @property
    def device_name(self) -> str:
        return ",".join(sorted({str(device) for device in self.layer_devices}))

    @property
    def dtype_name(self) -> str:
        return str(self.network.weight.dtype).removeprefix("torch.")

    @property
    def branch_sets(self) -> int:
        """Return the number of rank sets with all layers, one per guidance branch."""
        return 1

    def memo_counts(self) -> dict[str, dict[str, int]]:
        """Return hits and misses of each in-memory cache since the model was loaded."""
        return self.prompter.memo_counts()

    # --- source images as rows, latents as pixels

    def encode_source(self, pixels: np.ndarray, digest: str) -> Encoded:
        """Return the rows of a source image, RGB uint8 [H, W, 3]."""

    def encode_stretched(self, pixels: np.ndarray, digest: str) -> Encoded:
        """Encode a source image resized to the model's size without cutting."""

    def pack_source(self, encoded: Encoded) -> bytes:
        """Return an encoded source image as bytes, every bit of its rows."""
        shape, notes = asdict(encoded.shape), encoded.notes
        return pack(encoded.digest, vars(encoded.rows), shape=shape, notes=notes)

    def unpack_source(self, data: bytes, digest: str) -> Encoded:
        """Undo `pack_source`. Raises ValueError for other bytes."""
        tensors, facts = unpack(data, digest)
        where = self.network.weight.device
        shape: Any = TypeAdapter(self.source_shape).validate_python(facts["shape"])
        rows = type(self).source_rows(**{name: rows.to(where) for name, rows in tensors.items()})
        return Encoded(digest, shape, rows, tuple(facts["notes"]))

    def decode_latents(self, latents_CYX: Tensor) -> Tensor:
        """Return pixels in [0, 1], float32 on the CPU, [H, W, 3]."""

    def round_trip(self, pixels: np.ndarray, digest: str) -> np.ndarray:
        """Return a picture, uint8 [H, W, 3], encoded and decoded: what the codec alone loses."""
        return pixels

    # --- the AR stage: a prompt, then the text token by token

    def opening(self, job: ImageJob, sources: Sequence[Encoded]) -> TextPrompt | None:
        """Return the prompt of the AR stage; None if it has nothing to write or decide."""
        prompt: TextPrompt | None = self.prompter.opening(job, shapes_of(sources))
        return prompt

    def script(self, job: ImageJob) -> TextScript:
        """Return the rules for what the job's AR stage may write."""
        script: TextScript = self.prompter.script(job)
        return script

    def text_budget(self, job: ImageJob, context: Context) -> int:
        """Return the maximum number of tokens that the job may write."""
        return job.text.max_new_tokens

    def feed(self, runs: Sequence[tuple[Context, Sequence[int] | Tensor]]) -> None:
        """Append tokens to each context's buffer, in one forward; ids may be on the device [T].

        Runs of one context follow each other. The caller updates `context.ids`.
        """

    @torch.no_grad()
    def text_logits(self, contexts: Sequence[Context]) -> Tensor:
        """Return logits after each context's last token, float32 [R, V], free to be changed."""
        hidden = [context.hidden_M for context in contexts if context.hidden_M is not None]
        assert len(hidden) == len(contexts), "logits stand behind a token"
        return self.network.text_logits(torch.stack(hidden))

    def decode_text(self, ids: Sequence[int]) -> str:
        """Return the text of some ids, with tags spelled out."""
        return self.prompter.vocabulary.decode(ids)

    def answer(self, job: ImageJob, text: GeneratedText) -> Answer:
        """Return the answer in the text of a job that asks for one."""
        answer: Answer = self.prompter.answer(job, text)
        return answer

    def ending(self, context: Context) -> tuple[int, ...]:
        """Return the ids decided after the prompt of a job without text; waits for the device."""
        return ()

    # --- the diffusion stage: branches on a shared prefix, and their velocities

    def canvas(self, job: ImageJob, sources: Sequence[Encoded], text: GeneratedText) -> Canvas:
        """Return the picture to draw, after the text is complete."""

    # `layout` comes from the family's own `canvas` or `opening`.
    def segments(
        self, layout: Any, ids: Sequence[int], sources: Sequence[Encoded], stop: int
    ) -> list[Segment]:
        """Return `ids[:stop]` of a layout as segments, the units in which prefixes are shared."""
        digests = [source.digest for source in sources]
        return self.prompter.segments(layout, ids, digests, stop)

    @property
    def arena(self) -> Arena:
        """The K/V of all sequences."""
        return cast(Arena, self.network.arena)

    def new_buffer(self) -> Buffer:
        return Buffer(self.arena)

    def new_branch_buffer(self, number: int) -> Buffer:
        """Return an empty buffer in the branch set that has the branch of that number."""
        return self.new_buffer()

    @torch.no_grad()
    def prefill(self, prefills: Sequence[Prefill]) -> list[Tensor]:
        """Complete the buffers' prefixes in one forward; return each last row's state [M]."""
        states: list[Tensor] = self.network.prefill([rows_of(one) for one in prefills])
        return states

    @torch.no_grad()
    def prefill_branches(self, prefills: Sequence[Prefill]) -> None:
        """Complete the prefixes of branches, on the ranks that have the buffers."""
        self.prefill([one for one in prefills if one.rows])

    def branch(self, layout: Any, buffer: Buffer) -> Any:
        """Return a branch ready to denoise."""
        return self.network.branch(layout, buffer)

    def denoise_plan(self, job: ImageJob, canvas: Canvas, branches: int) -> DenoisePlan:
        """Return the job's noise, its steps, and how its branches' velocities are combined."""

    def velocities(self, pictures: Sequence[DenoiseInput]) -> list[Tensor]:
        """Return every picture's branch velocities, [G, C, Y, X] each, in one forward."""


def buffer_of(context: Context) -> Buffer:
    """Return the K/V of a context that has tokens."""
    assert context.buffer is not None, "an empty context has no text stage"
    return context.buffer


def rows_of(prefill: Prefill) -> Prefill:
    """Return the same with the rows of its sources, as a network takes it."""
    return prefill._replace(sources=[source.rows for source in prefill.sources])


def shapes_of(sources: Sequence[Encoded]) -> list[Any]:
    return [source.shape for source in sources]
