"""Records read back: ours in full, other programs' in part, and damaged ones as errors."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image, PngImagePlugin
from pngs import write_png

from hyimg_cli.errors import SourceImageError, UsageError
from hyimg_cli.media import formats, xmp
from hyimg_cli.media.frames import read_frames
from hyimg_cli.media.metadata import KEYWORD, PictureText, Provenance, video_text
from hyimg_cli.media.recorded import MAX_SIDECAR_BYTES, Record, read_described
from hyimg_cli.media.video import write_video
from hyimg_cli.spec import digest
from hyimg_cli.spec.job import Encoding

PROVENANCE = Provenance("0.1.0", "f" * 64, {"dtype": "float32"}, {"torch": "2.11.0"})
JOB = {"custom_id": "犬", "prompt": "ein Hündchen\n犬", "model": "tiny-video", "task": "t2v"}
RECORD = json.loads(video_text(JOB, PROVENANCE))
FRAMES = np.zeros((2, 32, 32, 3), dtype=np.uint8)
WritePng = Callable[..., Path]


@pytest.fixture
def png(tmp_path: Path) -> WritePng:
    def write(**texts: str) -> Path:
        noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
        write_png(tmp_path / "a.png", noise, texts)
        return tmp_path / "a.png"

    return write


def code_of(path: Path) -> str:
    with pytest.raises((UsageError, SourceImageError)) as caught:
        read_described(path)
    assert caught.value.where
    return caught.value.code


def provenance_of(record: Record) -> Provenance:
    return Provenance(record.version, record.model_fingerprint, record.settings, record.packages)


def test_a_record_comes_back_as_it_was_written(png: WritePng, tmp_path: Path) -> None:
    text = video_text(JOB, PROVENANCE)
    (tmp_path / "a.json").write_text(text + "\n")
    write_video(tmp_path / "a.mp4", [FRAMES], fps=8, comment=text)
    for path, kind in (
        (png(**{KEYWORD: text}), "png"),
        (tmp_path / "a.mp4", "mp4"),
        (tmp_path / "a.json", "sidecar"),
    ):
        found = read_described(path)
        assert found.kind == kind
        assert found.record is not None
        assert (found.record.job, provenance_of(found.record)) == (JOB, PROVENANCE)


@pytest.mark.parametrize("encoding", [Encoding("jpeg", 90), Encoding("webp", 90), Encoding("webp")])
def test_every_format_of_a_picture_says_the_same(tmp_path: Path, encoding: Encoding) -> None:
    path = tmp_path / "a.of-any-name"
    text = PictureText("a cat", video_text(JOB, PROVENANCE), xmp.EDITED)
    path.write_bytes(formats.encode(FRAMES[0], encoding, text))
    found = read_described(path)
    assert found.record is not None
    assert (found.kind, found.source_type) == (encoding.format, xmp.EDITED)
    assert (found.record.job, provenance_of(found.record), found.parameters) == (
        JOB,
        PROVENANCE,
        "a cat",
    )


def test_a_film_says_that_a_model_made_it_and_plays_on(tmp_path: Path) -> None:
    """In a box of its own at the top level, as XMP's specification says of MPEG-4."""
    path, text = tmp_path / "a.mp4", video_text(JOB, PROVENANCE)
    plain = write_video(path, [FRAMES], fps=8, comment=text)
    before = path.read_bytes()
    marked = write_video(path, [FRAMES], fps=8, comment=text, box=xmp.mp4_box(xmp.MADE))
    data = path.read_bytes()
    assert data.startswith(before)
    length, kind = struct.unpack(">I4s", data[len(before) : len(before) + 8])
    assert (length, kind) == (len(data) - len(before), b"uuid")
    assert data[len(before) + 8 :].startswith(
        bytes.fromhex("BE7ACFCB97A942E89C71999491E3AFAC") + b"<?xpacket"
    )
    assert (plain.pixel_sha256, digest.of_file(path)) == (marked.pixel_sha256, marked.sha256)
    assert len(list(read_frames(path))) == len(FRAMES)
    found = read_described(path)
    assert found.record is not None
    assert (found.record.job, found.source_type) == (JOB, xmp.MADE)


def test_what_another_program_says_of_a_picture_of_its_own(tmp_path: Path) -> None:
    data = formats.encode(FRAMES[0], Encoding("jpeg", 90), PictureText("", "", "x"))
    (tmp_path / "a.jpg").write_bytes(data)
    found = read_described(tmp_path / "a.jpg")
    assert (found.record, found.parameters, found.source_type) == (None, "", "x")


def test_a_picture_of_another_program_has_its_parameters_alone(png: WritePng) -> None:
    found = read_described(png(parameters="a cat\nSteps: 20, Sampler: Euler a"))
    assert (found.record, found.parameters) == (None, "a cat\nSteps: 20, Sampler: Euler a")


def test_text_behind_the_pixels_and_compressed_is_found(tmp_path: Path) -> None:
    chunks = PngImagePlugin.PngInfo()
    chunks.add_text("parameters", "words " * 1000, zip=True)
    chunks.add(b"tEXt", b"hyimg\0" + json.dumps(RECORD).encode("latin-1"), after_idat=True)
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png", pnginfo=chunks)
    found = read_described(tmp_path / "a.png")
    assert found.record is not None
    assert found.record.job["custom_id"] == "犬"
    assert found.parameters.startswith("words words")


def test_format_1_had_neither_settings_nor_digests(png: WritePng) -> None:
    old = {"format": 1, "version": "0.1.0", "job": JOB, "model_fingerprint": "f"}
    found = read_described(png(hyimg=json.dumps(old))).record
    assert found is not None
    assert (found.settings, found.source_sha256, found.version) == (
        {},
        (),
        "0.1.0",
    )


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{", "damaged"),
        ("[1]", "none"),
        ('"format"', "none"),
        ("{}", "none"),
        ('{"format": 1}', "none"),
        ('{"format": 1, "job": []}', "none"),
        ('{"format": true, "job": {}}', "none"),
        ('{"format": "1", "job": {}}', "none"),
        ('{"format": 0, "job": {}}', "newer"),
        ('{"format": 99, "job": {}}', "newer"),
        ("[" * 100_000, "damaged"),
    ],
)
def test_a_record_that_is_none(png: WritePng, text: str, code: str) -> None:
    assert code_of(png(hyimg=text)) == f"metadata.{code}"


@pytest.mark.parametrize("wrong", [7, None, [], "text", {"a": [1]}])
def test_values_of_other_types_are_no_error(png: WritePng, wrong: Any) -> None:
    names = ("version", "settings", "packages", "source_sha256", "size", "cot_text", "bot_task")
    raw = {"format": 2, "job": {}} | dict.fromkeys(names, wrong)
    found = read_described(png(hyimg=json.dumps(raw))).record
    assert found is not None
    assert isinstance(found.version, str)
    assert isinstance(found.size, str)
    assert all(isinstance(value, str) for value in found.settings.values())
    assert all(isinstance(value, str) for value in found.source_sha256)


def test_files_that_say_nothing(png: WritePng, tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", [FRAMES], fps=8)
    (tmp_path / "a.txt").write_text("words")
    (tmp_path / "empty").touch()
    Image.new("RGB", (8, 8)).save(tmp_path / "a.jpg")
    assert code_of(png()) == "metadata.none"
    assert code_of(tmp_path / "a.mp4") == "metadata.none"
    assert code_of(tmp_path / "a.txt") == "metadata.not-ours"
    assert code_of(tmp_path / "a.jpg") == "metadata.none"
    Image.new("RGB", (8, 8)).save(tmp_path / "a.gif")
    assert code_of(tmp_path / "a.gif") == "metadata.not-ours"
    assert code_of(tmp_path / "empty") == "metadata.not-ours"
    assert code_of(tmp_path / "gone.png") == "metadata.missing"
    (tmp_path / "results.jsonl").write_text('{"custom_id": "a"}\n{"custom_id": "b"}\n')
    with pytest.raises(UsageError) as caught:
        read_described(tmp_path / "results.jsonl")
    assert caught.value.hint.startswith("give a .png")
    assert code_of(tmp_path) == "metadata.is-a-folder"


def test_a_sidecar_speaks_for_a_film_that_lost_its_comment(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", [FRAMES], fps=8)
    (tmp_path / "a.json").write_text(json.dumps(RECORD))
    found = read_described(tmp_path / "a.mp4")
    assert found.kind == "mp4"
    assert found.record is not None


def test_damaged_files_are_told_from_silent_ones(png: WritePng, tmp_path: Path) -> None:
    whole = png(hyimg=json.dumps(RECORD))
    data = whole.read_bytes()
    for name, cut in (("half.png", data[: len(data) // 2]), ("start.png", data[:40])):
        (tmp_path / name).write_bytes(cut)
        assert code_of(tmp_path / name) == "source.truncated"
    write_video(tmp_path / "a.mp4", [FRAMES], fps=8, comment=json.dumps(RECORD))
    film = (tmp_path / "a.mp4").read_bytes()
    (tmp_path / "cut.mp4").write_bytes(film[:200])
    assert code_of(tmp_path / "cut.mp4") == "metadata.damaged"
    (tmp_path / "big.json").write_bytes(b"{" + b" " * MAX_SIDECAR_BYTES)
    assert code_of(tmp_path / "big.json") == "metadata.damaged"
    (tmp_path / "latin.json").write_bytes(b'{"a": "\xff"}')
    assert code_of(tmp_path / "latin.json") == "metadata.damaged"


def test_a_comment_of_another_program_is_no_record(tmp_path: Path) -> None:
    with av.open(str(tmp_path / "a.mp4"), "w") as container:
        container.metadata["comment"] = "holidays"
        stream = container.add_stream("libx264", rate=8)
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv420p"
        container.mux(stream.encode(av.VideoFrame(32, 32, "yuv420p")))
        container.mux(stream.encode(None))
    assert code_of(tmp_path / "a.mp4") == "metadata.none"
