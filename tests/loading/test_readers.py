"""Tensors read in pieces by several threads: every value in its place, whatever the pieces."""

import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hyimg_cli.errors import CheckpointError
from hyimg_cli.loading import readers
from hyimg_cli.loading.packed import stored_index
from hyimg_cli.loading.readers import StoredTensor, read_all

CPU = torch.device("cpu")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {
        "matrix": (300, 70),
        "kernel": (130, 3, 2, 2),
        "norm": (129,),
        "one": (),
        "none": (0, 8),
        "row": (1, 5000),
    }
    return {
        f"{name}.{n}": torch.randn(shape, generator=generator).to(dtype)
        for name, shape in shapes.items()
        for n, dtype in enumerate(DTYPES)
    }


def _saved(folder: Path, tensors: dict[str, torch.Tensor]) -> list[Path]:
    """One file of all; two shards would need an index."""
    save_file(tensors, folder / "model.safetensors")
    return [folder / "model.safetensors"]


@pytest.mark.parametrize("piece", [1, 20_000, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rooms_hold_what_the_file_has(
    tmp_path: Path, dtype: torch.dtype, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "PIECE_BYTES", piece)
    expected = _tensors()
    files = _saved(tmp_path, expected)
    found: dict[str, torch.Tensor] = {}

    def put(stored: StoredTensor) -> None:
        room = torch.full(stored.info.shape, torch.nan, dtype=dtype)
        stored.into(room)
        found[stored.name] = room

    read_all(files, stored_index(tmp_path), put)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor.to(dtype)), name


def test_several_threads_have_pieces_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waits with a piece in its hands until all others have one, too."""
    monkeypatch.setattr(readers, "PIECE_BYTES", 1)
    expected = {f"t{n}": torch.full((256, 4), float(n)) for n in range(readers.READERS)}
    all_have_one = threading.Barrier(readers.READERS, timeout=60)

    def put(stored: StoredTensor) -> None:
        for _, rows in stored.rows(CPU):
            all_have_one.wait()
            assert torch.equal(rows, expected[stored.name][:16])

    read_all(_saved(tmp_path, expected), stored_index(tmp_path), put)


def test_no_tensor_is_begun_behind_a_fault(tmp_path: Path) -> None:
    begun: list[str] = []

    def put(stored: StoredTensor) -> None:
        begun.append(stored.name)
        raise OSError("gone")

    files = _saved(tmp_path, {f"t{n:03}": torch.zeros(2) for n in range(200)})
    with pytest.raises(CheckpointError, match="cannot be read: gone"):
        read_all(files, stored_index(tmp_path), put)
    assert len(begun) < 100


def test_a_file_that_was_cut_short_meanwhile_is_an_error(tmp_path: Path) -> None:
    """Its header was read in full before."""
    files = _saved(tmp_path, {"a": torch.zeros(500), "b": torch.zeros(500)})
    index = stored_index(tmp_path)

    def put(stored: StoredTensor) -> None:
        os.truncate(files[0], 2500)
        stored.into(torch.empty(500))

    with pytest.raises(CheckpointError, match="ends early"):
        read_all(files, index, put)
