"""A picture has the same record as PNG, JPEG and WebP, however long it is."""

import io
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from hyimg_cli.media import formats, xmp
from hyimg_cli.media.images import pixel_digest, read_image, text_of
from hyimg_cli.media.metadata import PictureText
from hyimg_cli.spec.job import Encoding

NOISE = np.random.default_rng(0).integers(0, 256, (40, 56, 3), np.uint8)
# A photograph's colours change slowly.
SMOOTH = np.asarray(
    Image.fromarray(NOISE[:5, :7]).resize((56, 40), Image.Resampling.BICUBIC), dtype=np.uint8
)
ENCODINGS = {
    "png": Encoding(),
    "jpeg": Encoding("jpeg", 95),
    "small jpeg": Encoding("jpeg", 1),
    "webp": Encoding("webp", 80),
    "lossless webp": Encoding("webp"),
}
RECORD = json.dumps({"prompt": "<b> & ]]> \"'\n\t\x7f é 犬 \N{GRINNING FACE}"}, ensure_ascii=False)
TEXT = PictureText("a ünïcode cat, 犬\nSteps: 4, Seed: 1", RECORD, xmp.MADE)
RDF = "{http://www.w3.org/1999/02/22-rdf-syntax-ns#}"
IPTC = "{http://iptc.org/std/Iptc4xmpExt/2008-02-29/}DigitalSourceType"


@pytest.fixture(params=ENCODINGS.values(), ids=ENCODINGS.keys())
def encoding(request: pytest.FixtureRequest) -> Encoding:
    found: Encoding = request.param
    return found


def written(folder: Path, encoding: Encoding, text: PictureText | None) -> Path:
    path = folder / f"a{encoding.suffix}"
    path.write_bytes(formats.encode(SMOOTH, encoding, text))
    return path


def long(characters: int, parameters: int = 0) -> PictureText:
    """Text of so many characters, which no compression and no repetition makes shorter."""
    digits = np.random.default_rng(1).integers(0x4E00, 0x9FA5, characters)
    words = "".join(map(chr, digits))
    record = json.dumps({"cot": words}, ensure_ascii=False)
    return PictureText(f"{words[:parameters]}\nSteps: 4", record, xmp.EDITED)


def test_text_comes_back_and_changes_no_pixel(tmp_path: Path, encoding: Encoding) -> None:
    bare = read_image(written(tmp_path, encoding, None))
    path = written(tmp_path, encoding, TEXT)
    assert text_of(path) == TEXT
    found = read_image(path)
    assert pixel_digest(found.pixels) == pixel_digest(bare.pixels)
    assert found.notes == (), "nothing in the text turns the picture"
    with Image.open(path) as image:
        assert image.format == {"jpeg": "JPEG"}.get(encoding.format, encoding.format.upper())
        image.verify()


def test_without_text_a_picture_says_nothing(tmp_path: Path, encoding: Encoding) -> None:
    path = written(tmp_path, encoding, None)
    assert text_of(path) == PictureText("", "", "")
    with Image.open(path) as image:
        assert not {"exif", "xmp", "parameters"} & image.info.keys()


def test_equal_jobs_give_equal_bytes(encoding: Encoding) -> None:
    assert formats.encode(SMOOTH, encoding, TEXT) == formats.encode(SMOOTH, encoding, TEXT)


def test_what_is_lossless_is(tmp_path: Path, encoding: Encoding) -> None:
    pixels = read_image(written(tmp_path, encoding, TEXT)).pixels
    assert np.array_equal(pixels, SMOOTH) is (encoding.quality is None)
    assert pixels.shape == SMOOTH.shape


@pytest.mark.parametrize("kind", ["jpeg", "webp"])
def test_a_higher_quality_is_nearer_and_larger(tmp_path: Path, kind: str) -> None:
    apart, sizes = [], []
    for quality in (10, 60, 95, 100):
        path = written(tmp_path, Encoding(kind, quality), None)  # type: ignore[arg-type]
        pixels = read_image(path).pixels.astype(int)
        apart.append(float(np.abs(pixels - SMOOTH).mean()))
        sizes.append(path.stat().st_size)
    assert apart == sorted(apart, reverse=True)
    assert sizes == sorted(sizes)


@pytest.mark.parametrize("characters", [1, 20_000, 21_700, 21_800, 22_000, 100_000, 400_000])
def test_however_long_the_text_is(tmp_path: Path, encoding: Encoding, characters: int) -> None:
    """A JPEG's segment holds 64 KB; three bytes a character, so the border is at 21,800."""
    text = long(characters)
    assert text_of(written(tmp_path, encoding, text)) == text


def test_a_jpeg_holds_a_cut_prompt_where_viewers_look(tmp_path: Path) -> None:
    text = long(40_000, parameters=40_000)
    found = text_of(written(tmp_path, ENCODINGS["jpeg"], text))
    assert found.record == text.record
    prompt, settings = found.parameters.split("\n")
    assert settings == "Steps: 4"
    start, mark, _ = prompt.partition("… (cut")
    assert mark
    assert len(start) == 16_000
    assert text.parameters.startswith(start)
    whole = text_of(written(tmp_path, ENCODINGS["webp"], text))
    assert whole == text


# --- as the standards have it, read without our own reader --------------------------------------


def segments(data: bytes, marker: int = 0xE1) -> Iterator[bytes]:
    """The segments of a JPEG with this marker: APP1, or comments."""
    place = 2
    while data[place + 1] != 0xDA:
        (length,) = struct.unpack(">H", data[place + 2 : place + 4])
        if data[place + 1] == marker:
            yield data[place + 4 : place + 2 + length]
        place += 2 + length


def properties(packet: bytes) -> dict[str, str | None]:
    (description,) = ElementTree.fromstring(packet).iter(f"{RDF}Description")
    return {child.tag: child.text for child in description}


def test_a_long_record_of_a_jpeg_is_in_its_comments(tmp_path: Path) -> None:
    text = long(60_000)
    data = written(tmp_path, ENCODINGS["jpeg"], text).read_bytes()
    comments = list(segments(data, 0xFE))
    assert len(comments) == 3
    assert b"".join(one.removeprefix(b"hyimg ") for one in comments).decode() == text.record
    (packet,) = (one for one in segments(data) if one.startswith(b"http://ns.adobe.com/xap/1.0/"))
    assert list(properties(packet.split(b"\0", 1)[1]).values()) == [xmp.EDITED]


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp"])
def test_the_source_type_is_where_the_format_keeps_xmp(tmp_path: Path, kind: str) -> None:
    with Image.open(written(tmp_path, ENCODINGS[kind], TEXT)) as image:
        assert properties(image.info["xmp"])[IPTC] == xmp.MADE


@pytest.mark.parametrize("kind", ["jpeg", "webp"])
def test_parameters_are_where_other_tools_keep_theirs(tmp_path: Path, kind: str) -> None:
    """EXIF UserComment, in Unicode, as A1111 writes it by piexif."""
    with Image.open(written(tmp_path, ENCODINGS[kind], TEXT)) as image:
        comment = image.getexif().get_ifd(0x8769)[0x9286]
    assert comment == b"UNICODE\0" + TEXT.parameters.encode("utf-16-be")


# --- hostile and damaged ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "packet",
    [
        b"",
        b"<",
        b"\xff\xfe\x00",
        b"<x/>" * 2,
        b"<a>" * 200_000,
        b'<!DOCTYPE a [<!ENTITY b "c">]><a>&b;</a>',
        '<!DOCTYPE a [<!ENTITY b "c">]><a>&b;</a>'.encode("utf-16"),
    ],
)
def test_a_packet_that_is_none_says_nothing(packet: bytes) -> None:
    assert (xmp.record_in(packet), xmp.source_type_in(packet)) == ("", "")


def test_entities_are_not_followed() -> None:
    laughs = xmp.packet(xmp.MADE, "ha").replace(
        b"<x:xmpmeta", b'<!DOCTYPE x [<!ENTITY a "haha"><!ENTITY b "&a;&a;">]><x:xmpmeta'
    )
    assert xmp.record_in(laughs.replace(b">ha<", b">&b;<")) == "&b;"


@given(st.binary(max_size=300), st.integers(0, 2000))
def test_any_damage_is_survived(noise: bytes, place: int) -> None:
    data = bytearray(formats.encode(SMOOTH, ENCODINGS["jpeg"], TEXT))
    data[place : place + len(noise)] = noise
    with Image.open(io.BytesIO(formats.encode(SMOOTH, ENCODINGS["webp"], TEXT))) as image:
        image.info["xmp"] = bytes(data)
        assert formats.text_in(image).parameters == TEXT.parameters
    assert isinstance(xmp.record_in(bytes(data)), str)


def test_attributes_and_a_packet_of_another_program_are_read() -> None:
    packet = (
        b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><r:RDF '
        b'xmlns:r="http://www.w3.org/1999/02/22-rdf-syntax-ns#"><r:Description '
        b'xmlns:i="http://iptc.org/std/Iptc4xmpExt/2008-02-29/" i:DigitalSourceType="abc"/>'
        b"</r:RDF></x:xmpmeta>"
    )
    assert xmp.source_type_in(packet) == "abc"
    assert xmp.record_in(packet) == ""
    record = b' hyimg:record="{&quot;a&quot;: &lt;&#xE9;}"'
    again = packet.replace(b"/></r:RDF>", record + b"/></r:RDF>")
    assert xmp.record_in(again) == '{"a": <é}'
