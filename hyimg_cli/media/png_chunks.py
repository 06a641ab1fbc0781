"""PNGs without the chunks that Pillow refuses although no pixel depends on them.

Metadata that is damaged, or larger than Pillow accepts, makes it refuse the whole picture. Every
browser shows such pictures.
"""

import io
import zlib
from collections.abc import Iterator
from typing import IO

from PIL import PngImagePlugin

SIGNATURE = b"\x89PNG\r\n\x1a\n"
# A chunk's metadata, unpacked: ComfyUI's workflows and monitors' profiles have several megabytes.
# Pillow reads it from this module, and would accept 1 MB.
PngImagePlugin.MAX_TEXT_CHUNK = 16 << 20
# All metadata of a file, packed or not.
_MOST = PngImagePlugin.MAX_TEXT_MEMORY
# Pixels depend on these, too, though their names have the form of metadata.
_OF_PIXELS = {b"tRNS", b"acTL", b"fcTL", b"fdAT"}
_PACKED = {b"iCCP", b"zTXt", b"iTXt"}


def without_faulty(file: IO[bytes]) -> tuple[IO[bytes], tuple[str, ...]]:
    """Return a PNG, and the names of the chunks that were left out; the same file if none was."""
    left_out = _faulty(file)
    file.seek(0)
    if not left_out:
        return file, ()
    kept = io.BytesIO()
    for at, length, _ in left_out:
        kept.write(file.read(at - file.tell()))
        file.seek(length, io.SEEK_CUR)
    kept.write(file.read())
    kept.seek(0)
    return kept, tuple(dict.fromkeys(name for _, _, name in left_out))


def chunks_of(file: IO[bytes]) -> Iterator[tuple[int, int, bytes]]:
    """Yield each chunk's place, the length of its data and its name, up to IEND or damage.

    The file is then at the chunk's data.
    """
    at = len(SIGNATURE)
    while True:
        file.seek(at)
        head = file.read(8)
        length, name = int.from_bytes(head[:4]), head[4:]
        if name == b"IEND" or not (name.isalpha() and name.isascii()):
            return
        yield at, length, name
        at += length + 12


def _faulty(file: IO[bytes]) -> list[tuple[int, int, str]]:
    """Return the place, the length and the name of each chunk to leave out."""
    found, unpacked = list[tuple[int, int, str]](), 0
    stream = PngImagePlugin.PngStream(io.BytesIO())
    for at, length, name in chunks_of(file):
        if name[:1].islower() and name not in _OF_PIXELS:
            is_too_much = length > _MOST or (unpacked > _MOST and name in _PACKED)
            data = b"" if is_too_much else file.read(length + 4)
            cost = None if is_too_much else _cost(stream, name, data)
            if cost is None:
                found.append((at, length + 12, name.decode()))
                cost = 0 if is_too_much else PngImagePlugin.MAX_TEXT_CHUNK
            unpacked += cost
    return found


def _cost(stream: PngImagePlugin.PngStream, name: bytes, data: bytes) -> int | None:
    """Return the unpacked bytes of a chunk with its checksum; None if Pillow would refuse it."""
    body, before = data[:-4], stream.text_memory
    if zlib.crc32(name + body) != int.from_bytes(data[-4:]):
        return None
    # A chunk that Pillow does not know is not read.
    read = getattr(stream, f"chunk_{name.decode()}", None)
    stream.fp = io.BytesIO(data)
    try:
        if read is not None:
            read(0, len(body))
    except Exception:  # as the decoders: almost anything
        return None
    profile = stream.im_info.pop("icc_profile", b"") or b""
    return stream.text_memory - before + len(profile)
