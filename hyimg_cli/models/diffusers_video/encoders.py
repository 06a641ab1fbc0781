"""Embeddings: encoders that come when needed and go when told, keys, and bytes to keep."""

import gc
import json
from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from safetensors.torch import load, save

from hyimg_cli.errors import installed_version
from hyimg_cli.loading.checkpoint import metadata_of
from hyimg_cli.models.diffusers_video.layout import CheckpointLayout
from hyimg_cli.models.diffusers_video.weights import (
    LoadTarget,
    load_tokenizer,
    load_weights,
)
from hyimg_cli.models.latent_video import PromptEmbedding
from hyimg_cli.spec import digest

FORMAT = 1
_LIBRARIES = ("torch", "transformers", "diffusers", "tokenizers")
_KEY, _NOTES = "key", "notes"


class CheckpointEncoder:
    """Encoders of a checkpoint and their tokenizers or processors, loaded one by one at their first
    use: an `ConditionEncoder` once a family adds `key` and `encode`.

    `tensors` names an embedding's tensors, and says of each whether it must be there; `axes`: how
    many each has where they are not 2.
    """

    tensors: Mapping[str, bool]
    axes: Mapping[str, int] = {}

    def __init__(self, layout: CheckpointLayout, place: LoadTarget) -> None:
        self.layout = layout
        self.place = place
        self.encoder_runs: Counter[str] = Counter()
        self._networks: dict[str, Any] = {}
        self._tokenizers: dict[str, Any] = {}
        # Of each component's files, which are read once.
        self._identity = cache(lambda name: layout.components[name].identity())

    def network(self, name: str) -> Any:
        """An encoder about to run once; `encoder_runs` counts it."""
        if name not in self._networks:
            self._networks[name] = load_weights(self.layout.components[name], self.place)
        self.encoder_runs[name] += 1
        self.place.bring(self._networks[name])
        return self._networks[name]

    def tokenizer(self, name: str) -> Any:
        """A tokenizer whose encoder has a row for each of its tokens, or a pictures' processor."""
        if name not in self._tokenizers:
            components = self.layout.components
            is_of_text = name.startswith("tokenizer")
            encoder = components[name.replace("tokenizer", "text_encoder")] if is_of_text else None
            self._tokenizers[name] = load_tokenizer(components[name], encoder)
        return self._tokenizers[name]

    def identity(self, *names: str) -> list[str]:
        """Digests of components' files."""
        return [self._identity(name) for name in names]

    def release(self) -> None:
        """Free the networks' memory; tokenizers stay."""
        if self._networks:
            self.place.release()
        self._networks.clear()
        gc.collect()
        if self.place.device.type == "cuda":
            torch.cuda.empty_cache()

    def pack(self, embedding: PromptEmbedding) -> bytes:
        """safetensors: the tensors to the bit, key and notes in the header."""
        notes = json.dumps(list(embedding.notes))
        tensors = {name: tensor.contiguous() for name, tensor in embedding.tensors.items()}
        return save(tensors, metadata={_KEY: embedding.key, _NOTES: notes})

    def unpack(self, data: bytes, key: str) -> PromptEmbedding:
        """Undo `pack` of `key`. Raises ValueError for anything else."""
        try:
            header = metadata_of(data)
            stored, notes = header[_KEY], tuple(str(note) for note in json.loads(header[_NOTES]))
            tensors = load(data)
        except Exception as error:  # safetensors raises a type of its own, the rest KeyError, ...
            raise ValueError(f"not a packed prompt embedding: {error}") from error
        if stored != key:
            raise ValueError("a prompt embedding of another key")
        needed = {name for name, is_needed in self.tensors.items() if is_needed}
        axes = (tensor.ndim == self.axes.get(name, 2) for name, tensor in tensors.items())
        if not (needed <= tensors.keys() <= self.tensors.keys() and all(axes)):
            raise ValueError(f"not the tensors of a prompt embedding: {sorted(tensors)}")
        return PromptEmbedding(key, tensors, notes)

    def digest_of(self, **parts: Any) -> str:
        """A digest of `parts` and of what shapes every embedding: dtype, device, libraries."""
        return digest.of_json(
            {
                "format": FORMAT,
                "family": self.layout.family,
                "dtype": self.place.dtype_name,
                "device": device_class(self.place.device),
                "libraries": list(library_versions()),
                **parts,
            }
        )


@cache
def library_versions() -> tuple[str, ...]:
    """Versions of the libraries that turn text into an embedding."""
    return tuple(f"{name} {installed_version(name)}" for name in _LIBRARIES)


def device_class(device: torch.device) -> str:
    """The kind of device that decides a kernel's rounding: the CPU, or a GPU's name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def cut_note(count: int, limit: int, what: str) -> tuple[str, ...]:
    """A note where a text is longer than its encoder reads."""
    if count <= limit:
        return ()
    return (f"{what} is {count} tokens long and was cut: its encoder reads {limit}",)
