"""Read the header of a GGUF file: its keys, and names, shapes and types of its tensors.

    "GGUF", version, number of tensors, number of keys
    each key: name, type, value           texts and lists begin with their length
    each tensor: name, number of sides, sides (innermost first), type, offset
    padding, then the data

Everything is little-endian. Lengths are compared with the file before anything of that length is
read, so a file with false ones is refused quickly.
"""

import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from hyimg_cli.errors import CheckpointError
from hyimg_cli.files import opened
from hyimg_cli.loading.checkpoint import MAX_HEADER_BYTES, TensorInfo, fault

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# Of ggml's types by number: the name, numbers in a block, and a block's bytes.
TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}
# Of types that ggml has given up, the names; their blocks are not known here.
_GIVEN_UP = {4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8"}
_GIVEN_UP |= {36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8"}
# Of keys' types by number, how struct reads them. 8 is a text, 9 a list.
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?"}
_SCALARS |= {10: "<Q", 11: "<q", 12: "<d"}
_TEXT, _LIST = 8, 9
_MOST_SIDES = 8
# Far above honest files: a model has some thousand tensors and some dozen keys, a vocabulary and
# its merges less than a million texts.
_MOST_TENSORS, _MOST_KEYS, _MOST_TEXTS = 100_000, 10_000, 3_000_000
_MOST_NAME_BYTES = 4096
# Lists of at most this many values are kept.
_SHORT = 8
_ALIGNMENT = "general.alignment"
# Of a tensor that was stored in another shape, the one that it has.
_OWN_SHAPE = "comfy.gguf.orig_shape."
_AGAIN = "download the file again"
_OTHER_FILE = "download another file of the model, such as Q4_K_M or Q8_0"


def read_gguf(path: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Return a file's tensors and keys. Raises CheckpointError."""
    with opened(path) as file:
        header = _Header(path, file)
        try:
            return header.read()
        except (_Short, UnicodeDecodeError) as error:
            what = f"{path.name} is damaged: {error}"
            if isinstance(error, _Short):
                raise fault("truncated", what, path, _AGAIN) from None
            raise header.fault("a name in its header is not UTF-8") from None


class _Short(Exception):
    """The file ends before what its header promises."""


class _Header:
    """A GGUF file, read from its beginning."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self._size, self._texts = path.stat().st_size, 0

    def fault(self, what: str, hint: str = _AGAIN) -> CheckpointError:
        return fault("header", f"{self._path.name} is damaged: {what}", self._path, hint)

    def read(self) -> tuple[dict[str, TensorInfo], dict[str, str]]:
        self._take(len(MAGIC))
        self._check_version(self._number("<I"))
        tensor_count, key_count = self._number("<Q"), self._number("<Q")
        for count, most, kind in (
            (tensor_count, _MOST_TENSORS, "tensors"),
            (key_count, _MOST_KEYS, "keys"),
        ):
            if count > most:
                raise self.fault(f"its header counts {count:,} {kind}")
        keys = dict[str, str]()
        for _ in range(key_count):
            name = self._text()
            if (value := self._value(self._number("<I"))) is not None:
                keys[name] = value
        listed = [self._tensor() for _ in range(tensor_count)]
        alignment = int(keys.get(_ALIGNMENT, "32")) if keys.get(_ALIGNMENT, "1").isdecimal() else 0
        if not alignment or alignment % 8:
            raise self.fault(f"its {_ALIGNMENT} is {keys[_ALIGNMENT]}")
        data = math.ceil(self._file.tell() / alignment) * alignment
        return self._placed(listed, data, alignment, keys), keys

    def _check_version(self, version: int) -> None:
        if version in _VERSIONS:
            return
        if version & 0xFFFF == 0:
            what, hint = "is a big-endian GGUF file", "download the little-endian one"
        else:
            what = f"is GGUF of version {version}; versions 2 and 3 are read"
            hint = "download a file that was made by a current converter"
        raise fault("quantized", f"{self._path.name} {what}", self._path, hint)

    def _placed(
        self,
        listed: Sequence[tuple[str, tuple[int, ...], int, int]],
        data: int,
        alignment: int,
        keys: dict[str, str],
    ) -> dict[str, TensorInfo]:
        """Return the tensors with their places in the file, each checked."""
        found = dict[str, TensorInfo]()
        for name, shape, number, offset in listed:
            if number not in TYPES:
                kind = _GIVEN_UP.get(number, f"type {number}")
                what = f"{self._path.name} is GGUF with tensors of {kind}, which is not read"
                raise fault("quantized", f"{what}: {name}", self._path, _OTHER_FILE)
            dtype, block, block_bytes = TYPES[number]
            if name in found:
                raise self.fault(f"{name} is in it twice")
            if shape[-1:] and shape[-1] % block:
                raise self.fault(f"{name} is {list(shape)} in {dtype}, whose blocks have {block}")
            if offset % alignment:
                raise self.fault(f"{name} begins at {offset}, no multiple of {alignment}")
            size = math.prod(shape) // block * block_bytes
            if data + offset + size > self._size:
                raise _Short(f"{name} ends at byte {data + offset + size:,} of {self._size:,}")
            own = tuple(map(int, filter(str.isdecimal, keys.get(_OWN_SHAPE + name, "").split(","))))
            shape = own if own and math.prod(own) == math.prod(shape) else shape
            found[name] = TensorInfo(shape, dtype, self._path.name, data + offset, size)
        ends = 0
        for name, one in sorted(found.items(), key=lambda pair: pair[1].start):
            if one.start < ends:
                raise self.fault(f"{name} overlaps the tensor before it")
            ends = one.start + one.bytes
        return found

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Return a tensor's name, shape (outermost first), type and offset in the data."""
        name, sides = self._text(), self._number("<I")
        if sides > _MOST_SIDES:
            raise self.fault(f"{name} has {sides:,} sides")
        shape = tuple(self._number("<Q") for _ in range(sides))[::-1]
        if not all(shape):
            raise self.fault(f"{name} is {list(shape)}")
        return name, shape, self._number("<I"), self._number("<Q")

    def _value(self, kind: int, depth: int = 0) -> str | None:
        """Return a key's value as a text; None for a long list."""
        if kind in _SCALARS:
            return str(self._number(_SCALARS[kind]))
        if kind == _TEXT:
            return self._text(MAX_HEADER_BYTES)
        if kind != _LIST or depth:
            raise self.fault(f"a key is of type {kind}" if not depth else "a list is in a list")
        inner, count = self._number("<I"), self._number("<Q")
        if count > _SHORT and inner in _SCALARS:
            self._skip(count * struct.calcsize(_SCALARS[inner]))
            return None
        if inner == _TEXT and self._texts + count > _MOST_TEXTS:
            raise self.fault(f"a list has {count:,} texts")
        self._texts += count
        values = list[str]()
        for _ in range(count):
            value = self._value(inner, depth + 1)
            if count <= _SHORT:
                values.append(value or "")
        return ",".join(values) if count <= _SHORT else None

    def _text(self, most: int = _MOST_NAME_BYTES) -> str:
        length = self._number("<Q")
        if length > most and length <= self._size:
            raise self.fault(f"a text of {length:,} bytes is in its header")
        return self._take(length).decode()

    def _number(self, how: str) -> int:
        value: int = struct.unpack(how, self._take(struct.calcsize(how)))[0]
        return value

    def _take(self, count: int) -> bytes:
        if count > self._size:
            raise _Short(f"its header has a text of {count:,} bytes, the file {self._size:,}")
        found = self._file.read(count)
        if len(found) < count:
            raise _Short(f"it ends in its header, at byte {self._size:,}")
        return found

    def _skip(self, count: int) -> None:
        if self._file.tell() + count > self._size:
            raise _Short(f"it ends in its header, at byte {self._size:,}")
        self._file.seek(count, 1)
