"""Faults of checkpoint files are found from headers, named, and cost no weight reading."""

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from special import MAKE, NAMES, put, within

from hyimg_cli.errors import CheckpointError
from hyimg_cli.loading import checkpoint
from hyimg_cli.loading.checkpoint import (
    TensorInfo,
    check_tensors,
    fingerprint,
    refuse_special,
    tensor_index,
)

INDEX = "model.safetensors.index.json"
A = "model-00001-of-00002.safetensors"
B = "model-00002-of-00002.safetensors"
DIFFUSERS = "diffusion_pytorch_model"


def tensor(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


@pytest.fixture
def single(tmp_path: Path) -> Path:
    save_file({"w": tensor(2, 3), "b": tensor(3)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_file({"w": tensor(2, 3)}, tmp_path / A)
    save_file({"b": tensor(3)}, tmp_path / B)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": A, "b": B}}))
    return tmp_path


def rewrite_map(folder: Path, change: Callable[[dict[str, str]], None]) -> None:
    table = json.loads((folder / INDEX).read_text())
    change(table["weight_map"])
    (folder / INDEX).write_text(json.dumps(table))


def fault_of(folder: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        tensor_index(folder)
    assert caught.value.exit_code == 3
    return caught.value


def write_raw(path: Path, header: str | bytes, data: bytes = b"") -> None:
    raw = header if isinstance(header, bytes) else header.encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)


def test_one_file_is_indexed(single: Path) -> None:
    found = tensor_index(single)
    assert found == {
        "w": TensorInfo((2, 3), "F32", "model.safetensors"),
        "b": TensorInfo((3,), "F32", "model.safetensors"),
    }
    assert checkpoint.weight_bytes(found) == 9 * 4


def test_shards_are_joined(sharded: Path) -> None:
    found = tensor_index(sharded)
    assert {name: info.file for name, info in found.items()} == {"w": A, "b": B}


def test_a_scalar_and_an_empty_tensor_count_right(tmp_path: Path) -> None:
    scalar = np.array(1.0, dtype=np.float16)
    save_file({"s": scalar, "e": tensor(0, 4)}, tmp_path / "model.safetensors")
    assert checkpoint.weight_bytes(tensor_index(tmp_path)) == 2


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    error = fault_of(tmp_path / "nowhere")
    assert error.code == "checkpoint.missing"
    assert error.where.endswith("nowhere")


def test_an_empty_folder_has_no_weights(tmp_path: Path) -> None:
    assert fault_of(tmp_path).code == "checkpoint.no-weights"


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt"])
def test_weights_only_as_pickle_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x04.")
    error = fault_of(tmp_path)
    assert error.code == "checkpoint.pickle"
    assert name in error.what
    assert "safetensors" in error.hint


def test_a_pickle_beside_safetensors_is_ignored(single: Path) -> None:
    (single / "pytorch_model.bin").write_bytes(b"not opened")
    assert set(tensor_index(single)) == {"w", "b"}


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / B).unlink()
    error = fault_of(sharded)
    assert error.code == "checkpoint.missing-shard"
    assert B in error.what
    assert "1 of 2" in error.what


def test_of_one_file_and_shards_the_librarys_choice_is_read(sharded: Path) -> None:
    """A stray file next to the shards, as from another tool."""
    save_file({"stray": tensor(1, 2)}, sharded / "model.safetensors")
    assert set(tensor_index(sharded)) == {"stray"}
    for path in sharded.glob("model*"):
        path.rename(path.with_name(path.name.replace("model", DIFFUSERS, 1)))
    index = sharded / f"{DIFFUSERS}.safetensors.index.json"
    index.write_text(index.read_text().replace("model", DIFFUSERS))
    assert set(tensor_index(sharded, DIFFUSERS)) == {"w", "b"}
    for name in (A, B):
        (sharded / name.replace("model", DIFFUSERS)).unlink()
    assert set(tensor_index(sharded, DIFFUSERS)) == {"stray"}


@pytest.mark.parametrize("name", ["model.safetensors", A, "model.safetensors.index.json"])
def test_a_link_to_what_is_gone_is_named(sharded: Path, name: str) -> None:
    path = sharded / name
    path.unlink(missing_ok=True)
    if name == "model.safetensors":
        (sharded / "model.safetensors.index.json").unlink()
    path.symlink_to("../../blobs/0a1b")
    error = fault_of(sharded)
    assert f"{name} is a link to a file or folder that is gone: ../../blobs/0a1b" in error.what


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "model.diffusion_model."])
def test_what_stands_before_every_name_is_said(prefix: str) -> None:
    found = {f"{prefix}{name}": TensorInfo((2,), "F32", A) for name in ("w", "b.w")}
    with pytest.raises(CheckpointError, match=re.escape(f"begin with {prefix}")):
        check_tensors(found, {"w": (2,), "b.w": (2,)}, "here")
    with pytest.raises(CheckpointError, match=re.escape("1 missing: b.w; 1 unexpected: b.w0")):
        check_tensors(
            {"w": TensorInfo((2,), "F32", A), "b.w0": TensorInfo((2,), "F32", A)},
            {"w": (2,), "b.w": (2,)},
            "here",
        )


@pytest.mark.parametrize("kept", [0, 4, 20, -1])
def test_a_truncated_file_is_named(single: Path, kept: int) -> None:
    path = single / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    error = fault_of(single)
    assert error.code == "checkpoint.truncated"
    assert error.where.endswith("model.safetensors")


def test_bytes_behind_the_data_are_a_fault(single: Path) -> None:
    path = single / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"\0")
    assert fault_of(single).code == "checkpoint.truncated"


def test_a_tensor_named_but_absent_is_a_fault(sharded: Path) -> None:
    rewrite_map(sharded, lambda table: table.update(c=A))
    error = fault_of(sharded)
    assert error.code == "checkpoint.index"
    assert f"c ({A})" in error.what


def test_a_tensor_in_another_shard_than_named_is_a_fault(sharded: Path) -> None:
    rewrite_map(sharded, lambda table: table.update(w=B, b=A))
    assert fault_of(sharded).code == "checkpoint.index"


def test_a_tensor_stored_but_not_named_is_a_fault(sharded: Path) -> None:
    save_file({"w": tensor(2, 3), "x": tensor(1)}, sharded / A)
    error = fault_of(sharded)
    assert error.code == "checkpoint.index"
    assert f"x ({A})" in error.what


def test_a_tensor_in_two_shards_is_a_fault(sharded: Path) -> None:
    save_file({"w": tensor(2, 3), "b": tensor(3)}, sharded / B)
    error = fault_of(sharded)
    assert error.code == "checkpoint.index"
    assert f"1 stored but not named: w ({B})" in error.what


def test_a_name_twice_in_one_header_is_a_fault(tmp_path: Path) -> None:
    one, other = (
        f'"w": {{"dtype": "U8", "shape": [1], "data_offsets": [{start}, {start + 1}]}}'
        for start in (0, 1)
    )
    write_raw(tmp_path / "model.safetensors", f"{{{one}, {other}}}", b"\0\0")
    assert fault_of(tmp_path).code == "checkpoint.header"


@pytest.mark.parametrize("name", ["../outside.safetensors", "sub/model.safetensors"])
def test_an_index_may_not_leave_the_folder(sharded: Path, name: str) -> None:
    rewrite_map(sharded, lambda table: table.update(w=name))
    error = fault_of(sharded)
    assert error.code == "checkpoint.index"
    assert name in error.what


@pytest.mark.parametrize("text", ["", "[]", "{", '{"weight_map": {}}', '{"weight_map": {"w": 3}}'])
def test_a_broken_index_is_a_fault(sharded: Path, text: str) -> None:
    (sharded / INDEX).write_text(text)
    assert fault_of(sharded).code == "checkpoint.index"


@pytest.mark.parametrize(
    "header",
    [
        "not json",
        b"\xff\xfe{}",
        "[]",
        '{"w": {}}',
        '{"w": 7}',
        '{"w": {"dtype": "U8", "shape": [2], "data_offsets": [0, 1]}}',
        '{"w": {"dtype": "U8", "shape": [1], "data_offsets": [-1, 0]}}',
    ],
)
def test_a_broken_header_is_a_fault(tmp_path: Path, header: str | bytes) -> None:
    write_raw(tmp_path / "model.safetensors", header, b"\0")
    assert fault_of(tmp_path).code == "checkpoint.header"


def test_an_unknown_dtype_is_named(tmp_path: Path) -> None:
    """The library knows none of the first, nothing here computes with the second."""
    for dtype, code in (("Q3", "checkpoint.header"), ("F4", "checkpoint.quantized")):
        header = f'{{"w": {{"dtype": "{dtype}", "shape": [2], "data_offsets": [0, 1]}}}}'
        write_raw(tmp_path / "model.safetensors", header, b"\0")
        with pytest.raises(CheckpointError, match=dtype) as caught:
            check_tensors(tensor_index(tmp_path), {"w": (2,)}, tmp_path)
        assert caught.value.code == code


def test_a_match_passes(single: Path) -> None:
    check_tensors(tensor_index(single), {"w": (2, 3), "b": (3,)}, single)


def test_a_mismatch_names_every_kind_with_counts(single: Path) -> None:
    found = tensor_index(single)
    expected: dict[str, tuple[int, ...]] = {f"m{i}": (1,) for i in range(7)} | {"w": (3, 2)}
    with pytest.raises(CheckpointError) as caught:
        check_tensors(found, expected, single)
    text = caught.value.what
    assert "7 missing: m0, m1, m2, m3, m4 and 2 more" in text
    assert "1 unexpected: b" in text
    assert "w is [2, 3], expected [3, 2]" in text
    assert caught.value.code == "checkpoint.mismatch"


def test_the_fingerprint_follows_content_not_place(single: Path, tmp_path: Path) -> None:
    before = fingerprint(single)
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("model.safetensors", "config.json"):
        (copy / name).write_bytes((single / name).read_bytes())
    (copy / "README.md").write_text("not part of it")
    assert fingerprint(copy) == before
    (copy / "config.json").write_text('{"a": 1}')
    assert fingerprint(copy) != before


@pytest.mark.parametrize("full_below", [0, 1_000_000_000])
def test_the_fingerprint_follows_weights(
    single: Path, monkeypatch: pytest.MonkeyPatch, full_below: int
) -> None:
    monkeypatch.setattr(checkpoint, "FULL_DIGEST_BELOW_BYTES", full_below)
    before = fingerprint(single)
    save_file({"w": tensor(2, 3, seed=1), "b": tensor(3)}, single / "model.safetensors")
    assert fingerprint(single) != before


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("name", [A, INDEX])
def test_a_part_that_is_no_regular_file_is_named(sharded: Path, name: str, kind: str) -> None:
    put(sharded / name, kind)
    with within(20):
        error = fault_of(sharded)
        with pytest.raises(CheckpointError):
            fingerprint(sharded)
    assert error.what == f"{name} cannot be read: this is {NAMES[kind]}, not a regular file"
    assert (error.where, error.code) == (str(sharded), "checkpoint.unreadable")


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("name", ["a.json", "a.txt", "vocab.model", "templates/a.jinja", A])
def test_a_folder_in_which_libraries_open_files_has_regular_ones(
    single: Path, name: str, kind: str
) -> None:
    (single / "gone.json").symlink_to("nowhere")
    put(single / "editor.sock", kind)
    (single / "folder.json").mkdir()
    refuse_special(single)
    path = put(single / name, kind)
    with pytest.raises(CheckpointError, match=f"{path.name} cannot be read: this is"):
        refuse_special(single)


def test_a_small_file_that_is_huge_is_refused_unread(single: Path) -> None:
    with open(single / "huge.json", "wb") as file:
        file.truncate(1 << 40)
    for refuse in (refuse_special, fingerprint):
        with pytest.raises(CheckpointError, match="1,099,511,627,776 bytes, limit"):
            refuse(single)
