"""Read the header of a model that is one file, safetensors or GGUF; no torch.

What else people give in a model's place (a pickle, a pointer, half a download, a web page) is
found by its first bytes and refused by its name.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hyimg_cli.errors import CheckpointError
from hyimg_cli.files import opened
from hyimg_cli.loading.checkpoint import (
    MAX_HEADER_BYTES,
    PICKLE_SUFFIXES,
    TensorInfo,
    fault,
    file_metadata,
    file_tensors,
    parts_index,
    readable,
    refuse_pointer,
)
from hyimg_cli.loading.gguf_header import MAGIC, read_gguf

SUFFIXES = (".safetensors", ".gguf")
_FIRST_BYTES = 512
_INDEX = ".safetensors.index.json"
# The number of a piece, and how many there are: model-00001-of-00003.safetensors.
_PIECE = re.compile(r"-0*(\d+)-of-0*(\d+)\.(safetensors|gguf)$", re.IGNORECASE)
# First bytes of other files, and what they are.
_STARTS = (
    (b"\x1f\x8b", "a gzip archive"),
    (b"7z\xbc\xaf", "a 7-Zip archive"),
    (b"Rar!", "a RAR archive"),
    (b"\x28\xb5\x2f\xfd", "a Zstandard archive"),
    (b"\x89HDF", "an HDF5 file (Keras)"),
    (b"\x89PNG", "a PNG picture"),
    (b"\xff\xd8\xff", "a JPEG picture"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"ftrt", "a TensorRT engine"),
    (b"tjgg", "a GGML file, which came before GGUF"),
    (b"lmgg", "a GGML file, which came before GGUF"),
    (b"fmgg", "a GGML file, which came before GGUF"),
)
_WHOLE = "hyimg reads .safetensors and .gguf files: download one of those"
_AGAIN = "download the file again"


@dataclass(frozen=True)
class SingleFile:
    """A file's header: its tensors by the names that it stores, and its metadata as texts.

    `shape` of a tensor is the logical one, outermost first; `dtype` is named as safetensors or ggml
    do ("BF16", "F8_E4M3", "Q4_K"). Metadata that are long lists are left out.
    """

    path: Path
    format: Literal["safetensors", "gguf"]
    tensors: dict[str, TensorInfo] = field(hash=False)
    metadata: dict[str, str] = field(hash=False)


def read_single_file(path: Path) -> SingleFile:
    """Return a file's header. Raises CheckpointError, with what the file is if it is no model."""
    with readable(path):
        refuse_pointer(path)
        _refuse_other(path)
        is_gguf = _start_of(path).startswith(MAGIC)
        if is_gguf:
            tensors, metadata = read_gguf(path)
        else:
            tensors, metadata = file_tensors(path), file_metadata(path)
    file = SingleFile(path, "gguf" if is_gguf else "safetensors", tensors, metadata)
    _refuse_piece(file)
    if not tensors:
        raise fault("no-weights", f"{path.name} has no tensors", path, _AGAIN)
    return file


def _start_of(path: Path) -> bytes:
    with opened(path) as file:
        return file.read(_FIRST_BYTES)


def _refuse_other(path: Path) -> None:
    """Raise CheckpointError for a file that is neither safetensors nor GGUF, by its first bytes."""
    name, size, start = path.name, path.stat().st_size, _start_of(path)
    if not start.strip(b"\0"):
        what = "is empty" if not size else "begins with zeros: its download has not come that far"
        raise fault("truncated", f"{name} {what}", path, _AGAIN)
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        hint = "use the address of the file itself, or download it with the hub's client"
        raise _not_a_model(path, f"{name} is a web page, not the file itself", hint)
    if name.lower().endswith(_INDEX):
        what = f"{name} is the index of a model in pieces, not the model"
        hint = f"give the checkpoint's folder in diffusers' layout, here {_folder_of(path)}"
        raise _not_a_model(path, what, hint)
    if start.startswith(MAGIC) or _is_safetensors(start):
        return
    is_zip = start.startswith(b"PK\x03\x04")
    is_pickle = start[:1] == b"\x80" and 2 <= start[1] <= 5 if len(start) > 1 else False
    if is_pickle or (is_zip and b"data.pkl" in start) or name.lower().endswith(PICKLE_SUFFIXES):
        hint = "convert it to safetensors, or download a copy that is safetensors or GGUF"
        what = f"{name} is a pickle, which can run code when it is opened"
        raise fault("pickle", what, path, hint)
    kind = "a zip archive" if is_zip else ""
    kind = kind or next((kind for first, kind in _STARTS if start.startswith(first)), "")
    if not kind and (name.lower().endswith(".onnx") or b"pytorch" in start[:64]):
        kind = "an ONNX model"
    if not kind and text.startswith((b"{", b"[")):
        kind = "a JSON text"
    kind = kind or f"neither safetensors nor GGUF: it begins with {start[:8].hex(' ')}"
    raise _not_a_model(path, f"{name} is {kind}", _WHOLE)


def _is_safetensors(start: bytes) -> bool:
    """Return True for a length, then a JSON object."""
    return start[8:9] == b"{" and int.from_bytes(start[:8], "little") <= MAX_HEADER_BYTES


def _refuse_piece(file: SingleFile) -> None:
    """Raise CheckpointError for one of several files that a model was cut into."""
    piece, hint = _PIECE.search(file.path.name), ""
    count = int(piece[2]) if piece else 1
    if file.format == "gguf":
        split = file.metadata.get("split.count", "1")
        count = max(count, int(split) if split.isdecimal() else 1)
        hint = "join them with llama-gguf-split --merge, and give the file that it writes"
    if count < 2:
        return
    number = f"piece {piece[1]}" if piece else "a piece"
    what = f"{file.path.name} is {number} of {count} that a model was cut into"
    hint = (
        hint or f"give the checkpoint's folder in diffusers' layout, here {_folder_of(file.path)}"
    )
    raise _not_a_model(file.path, what, hint)


def _folder_of(path: Path) -> Path:
    """Return the folder of the checkpoint that a file of a part belongs to."""
    part = path.absolute().parent
    return part.parent if parts_index(part.parent).is_file() else part


def _not_a_model(path: Path, what: str, hint: str) -> CheckpointError:
    return fault("not-a-model", what, path, hint)
