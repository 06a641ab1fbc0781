"""A loaded checkpoint that writes text and draws with one decoder: what all families do alike."""

# Legend: V vocabulary, R row
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from hyimg_cli.kv.buffer import Buffer
from hyimg_cli.kv.segments import Segment
from hyimg_cli.loading.checkpoint import metadata_of
from hyimg_cli.models.protocols import Context, Encoded, TextGraphs
from hyimg_cli.spec.card import ModelCard
from hyimg_cli.spec.job import ImageJob


class DecoderModel:
    """Parts of `MixedModel`. A family has its `network` and `prompter`; `source_shape` and
    `source_rows` are what it knows a source image by.
    """

    source_shape: ClassVar[type]
    source_rows: ClassVar[Callable[..., Any]]
    network: Any
    prompter: Any
    card: ModelCard
    layer_devices: Any
    graphs: TextGraphs | None = None
    # Branches may lie in one another's buffers; see `Buffer.lend`.
    lends_prefixes = False

    @property
    def device_name(self) -> str:
        return ",".join(sorted({str(device) for device in self.layer_devices}))

    @property
    def dtype_name(self) -> str:
        return str(self.network.weight.dtype).removeprefix("torch.")

    def memo_counts(self) -> dict[str, dict[str, int]]:
        return self.prompter.memo_counts()

    def pack_source(self, encoded: Encoded) -> bytes:
        """`encoded` as safetensors with every bit of its rows, its shape in the metadata."""
        tensors = {name: rows.contiguous().cpu() for name, rows in vars(encoded.rows).items()}
        facts = {"shape": asdict(encoded.shape), "notes": encoded.notes, "digest": encoded.digest}
        return save(tensors, metadata={"source": json.dumps(facts)})

    def unpack_source(self, data: bytes, digest: str) -> Encoded:
        """Undo `pack_source`, where tokens enter. Raises ValueError for other bytes."""
        where = self.network.weight.device
        try:
            facts = json.loads(metadata_of(data)["source"])
            if facts["digest"] != digest:
                raise ValueError("the rows of another image")
            tensors = {name: stored.to(where) for name, stored in load(data).items()}
            shape: Any = TypeAdapter(self.source_shape).validate_python(facts["shape"])
            rows = type(self).source_rows(**tensors)
            return Encoded(digest, shape, rows, tuple(facts["notes"]))
        except (SafetensorError, KeyError, TypeError) as error:
            raise ValueError("not an encoded source image") from error

    @torch.no_grad()
    def text_logits(self, contexts: Sequence[Context]) -> Tensor:
        hidden = [context.hidden_M for context in contexts if context.hidden_M is not None]
        assert len(hidden) == len(contexts), "logits stand behind a token"
        return self.network.text_logits(torch.stack(hidden))

    def text_budget(self, job: ImageJob, context: Context) -> int:
        return job.text.max_new_tokens

    def segments(
        self, layout: Any, ids: Sequence[int], sources: Sequence[Encoded], stop: int
    ) -> list[Segment]:
        digests = [source.digest for source in sources]
        return self.prompter.segments(layout, ids, digests, stop)

    def decode_text(self, ids: Sequence[int]) -> str:
        return self.prompter.vocabulary.decode(ids)

    def new_buffer(self, capacity: int) -> Buffer:
        return self.network.new_buffer(capacity)

    def branch(self, layout: Any, buffer: Buffer) -> Any:
        return self.network.branch(layout, buffer)


def buffer_of(context: Context) -> Buffer:
    """The K/V of a context that has any."""
    assert context.buffer is not None, "an empty context has no text stage"
    return context.buffer


def shapes_of(sources: Sequence[Encoded]) -> list[Any]:
    return [source.shape for source in sources]


@dataclass(frozen=True)
class FreeScript:
    """A `TextScript` that allows anything, up to the token that ends a text."""

    opening: tuple[int, ...]
    end: int

    def allowed(self, last: int) -> tuple[int, ...] | None:
        return None

    def is_done(self, last: int) -> bool:
        return last == self.end

    def early_end(self, id_: int) -> str:
        return ""

    def is_open(self, written: list[int]) -> bool:
        return written[-1] != self.end

    def forced_ending(self, written: list[int], before: int | None = None) -> list[int]:
        return [*written, self.end]

    def text_of(self, written: list[int]) -> list[int]:
        return written
