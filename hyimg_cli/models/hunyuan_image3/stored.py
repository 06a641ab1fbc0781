"""An encoded source image as bytes and back: safetensors, its shape in the metadata."""

import json
from dataclasses import asdict

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import device

from hyimg_cli.loading.checkpoint import metadata_of
from hyimg_cli.models.common.grid import Grid
from hyimg_cli.models.hunyuan_image3.model import SourceRows
from hyimg_cli.models.hunyuan_image3.sequence import SourceShape
from hyimg_cli.models.protocols import Encoded


def pack(encoded: Encoded) -> bytes:
    """`encoded` with every bit of its rows."""
    tensors = {name: rows.contiguous().cpu() for name, rows in vars(encoded.rows).items()}
    facts = {"shape": asdict(encoded.shape), "notes": encoded.notes, "digest": encoded.digest}
    return save(tensors, metadata={"source": json.dumps(facts)})


def unpack(data: bytes, digest: str, where: device) -> Encoded:
    """Undo `pack`, on the device `where`. Raises ValueError for other bytes."""
    try:
        facts = json.loads(metadata_of(data)["source"])
        if facts["digest"] != digest:
            raise ValueError("the rows of another image")
        rows = SourceRows(**{name: t.to(where) for name, t in load(data).items()})
        return Encoded(digest, _shape(**facts["shape"]), rows, tuple(facts["notes"]))
    except (SafetensorError, KeyError, TypeError) as error:
        raise ValueError("not an encoded source image") from error


def _shape(
    *, ratio_index: int, vae_grid: dict[str, int], vit_grid: dict[str, int], vit_slots: int
) -> SourceShape:
    return SourceShape(ratio_index, Grid(**vae_grid), Grid(**vit_grid), vit_slots)
