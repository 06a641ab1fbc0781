"""Headers of single files: what they hold, and false ones that are refused quickly."""

import struct
from pathlib import Path
from time import process_time

import model_files
import pytest
from model_files import key, text

from hyimg_cli.errors import CheckpointError
from hyimg_cli.loading.gguf_header import TYPES
from hyimg_cli.loading.single_file import read_single_file

COUNTS = b"GGUF" + struct.pack("<I", 3)


def refusal(path: Path, data: bytes | None = None) -> CheckpointError:
    if data is not None:
        path.write_bytes(data)
    start = process_time()
    with pytest.raises(CheckpointError) as raised:
        read_single_file(path)
    assert process_time() - start < 1
    assert raised.value.hint
    return raised.value


def test_types_are_those_of_the_package() -> None:
    gguf = pytest.importorskip("gguf")
    known = {int(one): (one.name, *gguf.GGML_QUANT_SIZES[one]) for one in gguf.GGMLQuantizationType}
    assert known == TYPES


def test_header_of_gguf_is_what_the_package_reads(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    path = model_files.gguf(
        tmp_path / "a.gguf",
        {"a.weight": ("Q4_K", (3, 512)), "b.bias": ("F32", (7,)), "c": ("BF16", (2, 3, 5))},
        [key("general.architecture", "qwen_image"), key("names", ["x"] * 20), key("n", 5)],
    )
    file = read_single_file(path)
    theirs = gguf.GGUFReader(path)
    assert {
        name: (one.shape, one.dtype, one.start, one.bytes) for name, one in file.tensors.items()
    } == {
        one.name: (
            tuple(map(int, one.shape[::-1])),
            one.tensor_type.name,
            one.data_offset,
            one.n_bytes,
        )
        for one in theirs.tensors
    }
    assert file.metadata == {"general.architecture": "qwen_image", "n": "5"}
    assert file.format == "gguf"


def test_header_of_safetensors(tmp_path: Path) -> None:
    path = model_files.safetensors(tmp_path / "a.safetensors", {"w": ("F8_E4M3", (2, 3))}, of="x")
    file = read_single_file(path)
    assert (file.format, file.metadata, file.path) == ("safetensors", {"of": "x"}, path)
    assert [(n, one.shape, one.dtype, one.bytes) for n, one in file.tensors.items()] == [
        ("w", (2, 3), "F8_E4M3", 6)
    ]


def test_shape_that_a_converter_changed_is_the_own_one(tmp_path: Path) -> None:
    kept = text("comfy.gguf.orig_shape.w") + struct.pack("<IIQ3i", 9, 5, 3, 4, 8, 16)
    path = model_files.gguf(tmp_path / "a.gguf", {"w": ("Q4_K", (2, 256))}, [kept])
    assert read_single_file(path).tensors["w"].shape == (4, 8, 16)


PICKLE = b"\x80\x02}q\x00(X\x05\x00\x00\x00state"
ZIP = b"PK\x03\x04\x14\x00\x00\x00"


@pytest.mark.parametrize(
    ("name", "data", "code", "said"),
    [
        ("a.safetensors", b"", "truncated", "is empty"),
        ("a.gguf", bytes(4096), "truncated", "begins with zeros"),
        ("a.safetensors", b"version https://git-lfs.github.com/spec/v1\noid", "pointer", "LFS"),
        ("a.gguf", b"version https://git-lfs.github.com/spec/v1\noid", "pointer", "LFS"),
        ("a.safetensors", b"<!DOCTYPE html><html>", "not-a-model", "web page"),
        ("a.gguf", b"\n<html lang=en>", "not-a-model", "web page"),
        ("a.safetensors", b'{"error": "Repository not found"}', "not-a-model", "JSON"),
        ("a.safetensors.index.json", b'{"weight_map": {}}', "not-a-model", "index of a model"),
        ("a.ckpt", PICKLE, "pickle", "pickle"),
        ("a.safetensors", ZIP + b"archive/data.pkl", "pickle", "pickle"),
        ("a.pth", b"(dp0\nS'state'", "pickle", "pickle"),
        ("a.safetensors", ZIP + b"a/model.safetensors", "not-a-model", "zip archive"),
        ("a.gguf", b"\x1f\x8b\x08\x00", "not-a-model", "gzip archive"),
        ("a.safetensors", b"\x89HDF\r\n\x1a\n", "not-a-model", "HDF5"),
        ("a.onnx", b"\x08\x08\x12\x07pytorch\x1a", "not-a-model", "ONNX"),
        ("a.gguf", b"tjgg\x03\x00\x00\x00", "not-a-model", "GGML"),
        ("a.png", b"\x89PNG\r\n\x1a\n", "not-a-model", "PNG"),
        ("a.safetensors", b"\xde\xad\xbe\xef" * 8, "not-a-model", "neither safetensors nor GGUF"),
        ("a.safetensors", b"ab", "not-a-model", "neither safetensors nor GGUF"),
        ("a.safetensors", (1 << 20).to_bytes(8, "little") + b'{"a"', "truncated", "damaged"),
        ("a.safetensors", b"\2\0\0\0\0\0\0\0{}", "no-weights", "no tensors"),
        ("a.safetensors", b"\3\0\0\0\0\0\0\0{,}", "header", "damaged"),
    ],
)
def test_other_files_are_named(
    tmp_path: Path, name: str, data: bytes, code: str, said: str
) -> None:
    error = refusal(tmp_path / name, data)
    assert error.code == f"checkpoint.{code}"
    assert said in error.what


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("flux-00001-of-00003.safetensors", "piece 1 of 3"),
        ("a-00002-of-00002.gguf", "piece 2 of 2"),
    ],
)
def test_pieces_are_named(tmp_path: Path, name: str, code: str) -> None:
    write = model_files.gguf if name.endswith("gguf") else model_files.safetensors
    error = refusal(write(tmp_path / name, ["w"]))
    assert (error.code, code in error.what) == ("checkpoint.not-a-model", True)


def test_piece_of_gguf_is_known_by_its_keys(tmp_path: Path) -> None:
    error = refusal(model_files.gguf(tmp_path / "a.gguf", ["w"], [key("split.count", 3)]))
    assert "a piece of 3" in error.what
    assert "--merge" in error.hint


def test_pieces_are_not_a_rename(tmp_path: Path) -> None:
    path = model_files.safetensors(tmp_path / "a-00001-of-00001.safetensors", ["w"])
    assert [*read_single_file(path).tensors] == ["w"]


ONE_KEY = COUNTS + struct.pack("<QQ", 0, 1) + text("k")
ONE = COUNTS + struct.pack("<QQ", 1, 0) + text("w")
FALSE = {
    "tensors": (COUNTS + struct.pack("<QQ", 1 << 60, 0), "counts"),
    "keys": (COUNTS + struct.pack("<QQ", 1, 1 << 60), "counts"),
    "name": (COUNTS + struct.pack("<QQQ", 1, 1, 1 << 62), "a text of"),
    "text": (ONE_KEY + struct.pack("<IQ", 8, 1 << 50), "a text"),
    "list": (ONE_KEY + struct.pack("<IIQ", 9, 4, 1 << 61), "ends"),
    "texts": (ONE_KEY + struct.pack("<IIQ", 9, 8, 1 << 61), "texts"),
    "lists": (
        ONE_KEY + struct.pack("<IIQIQ", 9, 9, 1 << 40, 9, 1),
        "a list is in a list",
    ),
    "kind": (ONE_KEY + struct.pack("<I", 77), "type 77"),
    "sides": (ONE + struct.pack("<I", 1 << 31), "sides"),
    "zero": (ONE + struct.pack("<IQIQ", 1, 0, 0, 0), "[0]"),
    "huge": (
        ONE + struct.pack("<I4QIQ", 4, *[1 << 63] * 4, 0, 0),
        "ends at byte",
    ),
    "block": (
        ONE + struct.pack("<IQIQ", 1, 100, 12, 0),
        "blocks have 256",
    ),
    "offset": (
        ONE + struct.pack("<IQIQ", 1, 8, 0, 3),
        "no multiple",
    ),
    "alignment": (
        COUNTS + struct.pack("<QQ", 0, 1) + key("general.alignment", 0),
        "general.alignment is 0",
    ),
    "letters": (COUNTS + struct.pack("<QQQ", 0, 1, 2) + b"\xff\xfe" + bytes(4), "UTF-8"),
    "cut": (COUNTS + struct.pack("<QQ", 3, 1) + text("k"), "ends in its header"),
    "magic": (b"GGUF", "ends in its header"),
}


@pytest.mark.parametrize("case", FALSE)
def test_false_headers_are_refused_quickly(tmp_path: Path, case: str) -> None:
    data, said = FALSE[case]
    error = refusal(tmp_path / "a.gguf", data)
    assert error.code in ("checkpoint.header", "checkpoint.truncated")
    assert said in error.what


def test_tensors_that_overlap_or_come_twice_are_refused(tmp_path: Path) -> None:
    place = struct.pack("<IQIQ", 1, 8, 0, 0)
    for second, said in ((text("b"), "overlaps"), (text("a"), "twice")):
        data = COUNTS + struct.pack("<QQ", 2, 0) + text("a") + place + second + place
        assert said in refusal(tmp_path / "a.gguf", data + bytes(128)).what


@pytest.mark.parametrize(
    ("version", "said"),
    [(1, "version 1"), (4, "version 4"), (3 << 24, "big-endian"), (2 << 24, "big-endian")],
)
def test_other_versions_are_named(tmp_path: Path, version: int, said: str) -> None:
    error = refusal(model_files.gguf(tmp_path / "a.gguf", ["w"], version=version))
    assert (error.code, said in error.what) == ("checkpoint.quantized", True)


def test_version_2_is_read(tmp_path: Path) -> None:
    path = model_files.gguf(tmp_path / "a.gguf", ["w"], version=2)
    assert read_single_file(path).tensors["w"].dtype == "Q4_K"


@pytest.mark.parametrize("number", [4, 31, 36, 57])
def test_types_without_blocks_are_named(tmp_path: Path, number: int) -> None:
    path = model_files.gguf(tmp_path / "a.gguf", {"w": (str(number), (32,))})
    error = refusal(path)
    assert error.code == "checkpoint.quantized"
    assert ("type 57" if number == 57 else "Q4") in error.what


def test_half_a_download_is_named(tmp_path: Path) -> None:
    path = model_files.gguf(tmp_path / "a.gguf", ["w", "v"], missing=40)
    error = refusal(path)
    assert (error.code, "ends at byte" in error.what) == ("checkpoint.truncated", True)


def test_special_files_do_not_hang(tmp_path: Path) -> None:
    assert refusal(Path("/dev/zero")).code == "checkpoint.unreadable"
