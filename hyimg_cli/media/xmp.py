"""XMP packets: the source type (IPTC) of a file, and the record in JPEG and WebP.

Source: Adobe's XMP specification, parts 1 and 3 (ISO 16684); IPTC's NewsCodes, Digital Source Type.
"""

import re
import uuid
from html import unescape
from xml.sax.saxutils import escape

_CODES = "http://cv.iptc.org/newscodes/digitalsourcetype/"
MADE, EDITED = f"{_CODES}trainedAlgorithmicMedia", f"{_CODES}compositeWithTrainedAlgorithmicMedia"
# The PNG chunk that holds the packet.
PNG_KEYWORD = "XML:com.adobe.xmp"
# A JPEG segment holds 65,533 bytes, including its own name.
MOST_IN_JPEG = 65_533 - len(b"http://ns.adobe.com/xap/1.0/\0")
# The packet's markers are the same in every file, by the specification.
_PACKET = (
    '<?xpacket begin="\ufeff" id="W5M0MpCehiHzreSzNTczkc9d"?><x:xmpmeta xmlns:x="adobe:ns:meta/">'
    '<rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#" '
    'xmlns:Iptc4xmpExt="http://iptc.org/std/Iptc4xmpExt/2008-02-29/"{space}>'
    '<rdf:Description rdf:about="">'
    "<Iptc4xmpExt:DigitalSourceType>{source_type}</Iptc4xmpExt:DigitalSourceType>{record}"
    '</rdf:Description></rdf:RDF></x:xmpmeta><?xpacket end="w"?>'
)
_SPACE = ' xmlns:hyimg="urn:x-hyimg:1.0/"'
# As hyimg writes it, and as other programs rewrite a packet.
_RECORDS = ((b"<hyimg:record>", b"</hyimg:record>"), (b'hyimg:record="', b'"'))
_SOURCE_TYPE = re.compile(rb":DigitalSourceType\s*(?:>|=\s*[\"'])([^<\"']{0,200})[<\"']")
_BOX = uuid.UUID("be7acfcb-97a9-42e8-9c71-999491e3afac").bytes


def packet(source_type: str, record: str = "") -> bytes:
    """Return a packet with the source type and `record`; empty without both."""
    if not source_type:
        return b""
    said = f"<hyimg:record>{escape(record)}</hyimg:record>" if record else ""
    space = _SPACE if record else ""
    return _PACKET.format(space=space, source_type=escape(source_type), record=said).encode()


def mp4_box(source_type: str) -> bytes:
    """Return the box that holds the packet in an MP4, after all others."""
    data = _BOX + packet(source_type)
    return (len(data) + 8).to_bytes(4) + b"uuid" + data


def source_type_in(data: bytes) -> str:
    """Return the DigitalSourceType of a packet; empty if it has none."""
    found = _SOURCE_TYPE.search(data)
    return found[1].decode("utf-8", "replace") if found else ""


def record_in(data: bytes) -> str:
    """Return the record of a packet; empty if it has none."""
    for start, end in _RECORDS:
        record, is_whole, _ = data.partition(start)[2].partition(end)
        if is_whole:
            return unescape(record.decode("utf-8", "replace"))
    return ""
