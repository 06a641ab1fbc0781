"""Zeros that a download left in a file of weights are found; zeros that belong there are not."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hyimg_cli.errors import CheckpointError
from hyimg_cli.loading.checkpoint import tensor_index
from hyimg_cli.loading.unfilled import refuse_unfilled
from hyimg_cli.models import registry

Tensors = dict[str, torch.Tensor]
NAME = "model.safetensors"


def network(width: int = 24, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    """Weights of some blocks as they are stored: in the order of their names."""
    made = torch.Generator().manual_seed(1)
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (50, width)}
    for block in range(4):
        shapes |= {
            f"layers.{block}.attn.q.bias": (width,),
            f"layers.{block}.attn.q.weight": (width, width),
            f"layers.{block}.mlp.weight": (3 * width, width),
            f"layers.{block}.norm.weight": (width,),
        }
    shapes |= {"modulation.weight": (6 * width, width), "proj_out.weight": (4, width)}
    return {name: torch.randn(shape, generator=made).to(dtype) for name, shape in shapes.items()}


def written(folder: Path, tensors: Tensors) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / NAME)
    return folder


def wipe(folder: Path, first: float, last: float = 1.0) -> None:
    """Zeros in a part of a file's numbers."""
    data = bytearray((folder / NAME).read_bytes())
    begin = 8 + int.from_bytes(data[:8], "little")
    start, stop = (begin + int(share * (len(data) - begin)) for share in (first, last))
    data[start:stop] = bytes(stop - start)
    (folder / NAME).write_bytes(data)


@pytest.mark.parametrize("width", [24, 200])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("part", [(0.1,), (0.5,), (0.77,), (0.3, 0.6), (0.45, 0.75)])
def test_a_part_of_zeros_is_named(
    tmp_path: Path, width: int, dtype: torch.dtype, part: tuple[float, ...]
) -> None:
    folder = written(tmp_path, network(width, dtype))
    refuse_unfilled(folder, tensor_index(folder))
    wipe(folder, *part)
    with pytest.raises(CheckpointError, match=rf"vae: {NAME} was not filled: ") as found:
        refuse_unfilled(folder, tensor_index(folder), "vae")
    assert found.value.code == "checkpoint.unfilled"


def test_whole_tensors_without_numbers_at_the_end_are_named(tmp_path: Path) -> None:
    tensors = network()
    for name in list(tensors)[-9:]:
        tensors[name].zero_()
    folder = written(tmp_path, tensors)
    with pytest.raises(CheckpointError, match="was not filled"):
        refuse_unfilled(folder, tensor_index(folder))


RIGHT: dict[str, Callable[[Tensors], object]] = {
    "biases": lambda t: [one.zero_() for name, one in t.items() if name.endswith("bias")],
    "new projections": lambda t: [t[name].zero_() for name in ("proj_out.weight",)],
    "modulation": lambda t: t["modulation.weight"].zero_(),
    "a block that adds nothing": lambda t: t["layers.3.mlp.weight"].zero_(),
    "rows without a token": lambda t: t["embed.weight"][40:].zero_(),
    "rows without a token before a new bias": lambda t: (
        t["embed.weight"][40:].zero_(), t["layers.0.attn.q.bias"].zero_(),
    ),
    "columns of new inputs": lambda t: t["proj_out.weight"][:, 8:].zero_(),
    "one number": lambda t: t["layers.1.mlp.weight"][-1, -1:].zero_(),
    "nothing but zeros": lambda t: [one.zero_() for one in t.values()],
}  # fmt: skip


@pytest.mark.parametrize("what", RIGHT)
@pytest.mark.parametrize("width", [24, 200])
def test_zeros_that_belong_there_are_no_fault(tmp_path: Path, what: str, width: int) -> None:
    tensors = network(width)
    RIGHT[what](tensors)
    folder = written(tmp_path, tensors)
    refuse_unfilled(folder, tensor_index(folder))


def test_embedded_checkpoints_are_filled() -> None:
    for model in (registry.EMBEDDED, registry.EMBEDDED_VIDEO):
        for file in registry.resolve_model(model).rglob("*.safetensors"):
            refuse_unfilled(file.parent, tensor_index(file.parent, file.stem))


@pytest.mark.parametrize(
    ("start", "stop", "is_torn"),
    [
        (1_000_000, 3_500_000, True),
        (1_000_000, 3_000_960, True),  # ends with a row
        (0, 2_500_000, True),
        (1_920 * 1000, 1_920 * 2000, False),  # rows that the author left zero
        (0, 1_920 * 1000, False),
        (1_920 * 3000, 1_920 * 4096, False),
        (0, 1_920 * 4096, False),
        (1_000_000, 1_300_000, False),  # small enough to be anything
        (5, 5, False),
    ],
)
def test_a_hole_inside_one_tensor_is_named(
    tmp_path: Path, start: int, stop: int, is_torn: bool
) -> None:
    """Of 4,096 rows of 1,920 bytes; the disk has not stored what lies between."""
    made = torch.Generator().manual_seed(1)
    matrix = torch.randn((4096, 480), generator=made)
    folder = written(tmp_path, {"a.weight": torch.ones(8, 8), "b.weight": matrix})
    data = (folder / NAME).read_bytes()
    at = len(data) - matrix.nbytes
    with (folder / NAME).open("wb") as file:
        file.write(data[: at + start])
        file.seek(at + stop)
        file.write(data[at + stop :])
        file.truncate(len(data))
    if stop - start > 1 << 20:
        with (folder / NAME).open("rb") as file:
            hole = os.lseek(file.fileno(), 0, os.SEEK_HOLE)
        if hole == len(data) and stop < matrix.nbytes:
            pytest.skip("this file system stores zeros")
    found = tensor_index(folder)
    if is_torn:
        with pytest.raises(CheckpointError, match="in place of b"):
            refuse_unfilled(folder, found)
    else:
        refuse_unfilled(folder, found)
