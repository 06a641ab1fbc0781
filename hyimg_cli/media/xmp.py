"""XMP: where viewers and platforms look for how a picture or a video came about (IPTC), and where a
JPEG or WebP keeps hyimg's record.

Source: Adobe's XMP specification, parts 1 and 3 (ISO 16684); IPTC's NewsCodes, Digital Source Type.
"""

import hashlib
import uuid
from collections.abc import Iterable
from contextlib import suppress
from typing import Any
from xml.parsers import expat
from xml.sax.saxutils import escape

_CODES = "http://cv.iptc.org/newscodes/digitalsourcetype/"
MADE, EDITED = f"{_CODES}trainedAlgorithmicMedia", f"{_CODES}compositeWithTrainedAlgorithmicMedia"
# Where a PNG keeps its packet.
PNG_KEYWORD = "XML:com.adobe.xmp"
_NAMESPACES = {
    "rdf": "http://www.w3.org/1999/02/22-rdf-syntax-ns#",
    "Iptc4xmpExt": "http://iptc.org/std/Iptc4xmpExt/2008-02-29/",
    "xmpNote": "http://ns.adobe.com/xmp/note/",
    "hyimg": "urn:x-hyimg:1.0/",
}
_SOURCE_TYPE, _EXTENSION, _RECORD = (
    ("Iptc4xmpExt", "DigitalSourceType"),
    ("xmpNote", "HasExtendedXMP"),
    ("hyimg", "record"),
)
# A JPEG's segment holds 65,533 bytes, its own name among them.
_MOST_IN_SEGMENT = 65_533 - len(b"http://ns.adobe.com/xap/1.0/\0")
_EXTENDED = b"http://ns.adobe.com/xmp/extension/\0"
_MOST_IN_PIECE = 65_400
_GUID_LENGTH = 32
_BOX = uuid.UUID("be7acfcb-97a9-42e8-9c71-999491e3afac").bytes


def packet(source_type: str, record: str = "") -> bytes:
    """A packet that says how a file came about, and holds `record` (text that XML can hold)."""
    return _packet({_SOURCE_TYPE: source_type} | ({_RECORD: record} if record else {}))


def for_jpeg(source_type: str, record: str) -> tuple[bytes, bytes]:
    """The same for a JPEG: the packet, and the segments with what is too long for one (extended
    XMP), empty where all of it fits.
    """
    whole = packet(source_type, record)
    if len(whole) <= _MOST_IN_SEGMENT:
        return whole, b""
    extension = _meta({_RECORD: record})
    guid = hashlib.md5(extension, usedforsecurity=False).hexdigest().upper()
    pieces = (
        _EXTENDED + guid.encode() + len(extension).to_bytes(4) + start.to_bytes(4)
        + extension[start : start + _MOST_IN_PIECE]
        for start in range(0, len(extension), _MOST_IN_PIECE)
    )  # fmt: skip
    segments = b"".join(b"\xff\xe1" + (len(piece) + 2).to_bytes(2) + piece for piece in pieces)
    return _packet({_SOURCE_TYPE: source_type, _EXTENSION: guid}), segments


def mp4_box(source_type: str) -> bytes:
    """The box that holds the packet in an MP4, behind all others."""
    data = _BOX + packet(source_type)
    return (len(data) + 8).to_bytes(4) + b"uuid" + data


def source_type_in(data: bytes) -> str:
    """The DigitalSourceType of a packet; empty where it has none, or is damaged."""
    return _values(data).get(_SOURCE_TYPE, "")


def record_in(data: bytes, segments: Iterable[bytes] = ()) -> str:
    """The record of a packet, with those of a JPEG's APP1 segments that continue it; else empty."""
    values = _values(data)
    if _EXTENSION in values:
        values |= _values(_extension(values[_EXTENSION].encode(), segments))
    return values.get(_RECORD, "")


def _extension(guid: bytes, segments: Iterable[bytes]) -> bytes:
    """The pieces of an extension, put together; empty where one is missing or damaged."""
    start = len(_EXTENDED) + _GUID_LENGTH
    own = (segment for segment in segments if segment.startswith(_EXTENDED + guid))
    pieces = {int.from_bytes(piece[start + 4 : start + 8]): piece[start + 8 :] for piece in own}
    whole = b"".join(piece for _, piece in sorted(pieces.items()))
    found = hashlib.md5(whole, usedforsecurity=False).hexdigest().upper()
    return whole if found.encode() == guid else b""


def _packet(values: dict[tuple[str, str], str]) -> bytes:
    # The packet's mark is the same in every file, by the specification.
    begin = '<?xpacket begin="\ufeff" id="W5M0MpCehiHzreSzNTczkc9d"?>'.encode()
    return begin + _meta(values) + b'<?xpacket end="w"?>'


def _meta(values: dict[tuple[str, str], str]) -> bytes:
    spaces = dict.fromkeys(("rdf", *(space for space, _ in values)))
    declared = "".join(f' xmlns:{space}="{_NAMESPACES[space]}"' for space in spaces)
    fields = "".join(
        f"<{space}:{name}>{escape(value)}</{space}:{name}>"
        for (space, name), value in values.items()
    )
    return (
        f'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF{declared}>'
        f'<rdf:Description rdf:about="">{fields}</rdf:Description></rdf:RDF></x:xmpmeta>'
    ).encode()


def _values(data: bytes) -> dict[tuple[str, str], str]:
    """Values of the properties above in a packet, as elements or as attributes; of a damaged or
    hostile one what stands before the damage.
    """
    known = {f"{_NAMESPACES[space]} {name}": (space, name)
             for space, name in (_SOURCE_TYPE, _EXTENSION, _RECORD)}  # fmt: skip
    found: dict[tuple[str, str], list[str]] = {}
    within: list[str] = []

    def start(name: str, attributes: dict[str, str]) -> None:
        within.append(name)
        for key in attributes.keys() & known.keys():
            found[known[key]] = [attributes[key]]

    def text(piece: str) -> None:
        if within and within[-1] in known:
            found.setdefault(known[within[-1]], []).append(piece)

    def refuse(*_: Any) -> None:
        raise ValueError("XMP has no document type, and so no entities")

    parser = expat.ParserCreate(namespace_separator=" ")
    parser.buffer_text = True
    parser.StartElementHandler, parser.CharacterDataHandler = start, text
    parser.EndElementHandler = lambda _: within.pop()
    parser.StartDoctypeDeclHandler = refuse
    with suppress(expat.ExpatError, ValueError):
        parser.Parse(data, True)
    return {place: "".join(pieces) for place, pieces in found.items()}
