"""An encoded source image as bytes and back: safetensors, its shape in the metadata."""

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import device

from hyimg_cli.loading.checkpoint import metadata_of
from hyimg_cli.models.protocols import Encoded


def pack_source(encoded: Encoded) -> bytes:
    """`encoded` with every bit of its rows."""
    tensors = {name: rows.contiguous().cpu() for name, rows in vars(encoded.rows).items()}
    facts = {"shape": asdict(encoded.shape), "notes": encoded.notes, "digest": encoded.digest}
    return save(tensors, metadata={"source": json.dumps(facts)})


def unpack_source(
    data: bytes, digest: str, where: device, shape: type, rows: Callable[..., Any]
) -> Encoded:
    """Undo `pack_source`, on the device `where`; `shape` and `rows`: the family's own kinds. Raises
    ValueError for other bytes.
    """
    try:
        facts = json.loads(metadata_of(data)["source"])
        if facts["digest"] != digest:
            raise ValueError("the rows of another image")
        tensors = {name: stored.to(where) for name, stored in load(data).items()}
        found: Any = TypeAdapter(shape).validate_python(facts["shape"])
        return Encoded(digest, found, rows(**tensors), tuple(facts["notes"]))
    except (SafetensorError, KeyError, TypeError) as error:
        raise ValueError("not an encoded source image") from error
