"""Pack tensors and facts about them as bytes that any process can keep, under a key."""

import json
from collections.abc import Mapping
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from hyimg_cli.loading.checkpoint import metadata_of

_KEY = "key"


def pack(key: str, tensors: Mapping[str, Tensor], **facts: Any) -> bytes:
    """Return safetensors bytes with the tensors, and the key and facts as JSON in the header."""
    whole = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    return save(whole, {_KEY: key, **{name: json.dumps(fact) for name, fact in facts.items()}})


def unpack(data: bytes, key: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Undo `pack` of `key`, on the CPU. Raises ValueError for anything else."""
    try:
        header, tensors = metadata_of(data), load(data)
        stored = header.pop(_KEY)
        facts = {name: json.loads(fact) for name, fact in header.items()}
    except Exception as error:  # safetensors raises its own type, other code KeyError, ...
        raise ValueError(f"not packed tensors: {error}") from error
    if stored != key:
        raise ValueError("tensors packed under another key")
    return tensors, facts
