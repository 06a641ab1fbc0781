"""Files of an edit with `keep_outside`: what is equal, carried along, refused."""

import json
from base64 import b64decode
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from journal.conftest import in_mode
from PIL import ExifTags, Image, ImageCms, ImageDraw

from hyimg_cli.engine.sources import faults, probe_sources
from hyimg_cli.errors import JobError, OutputError, SourceImageError
from hyimg_cli.journal import keys
from hyimg_cli.journal.edit_facts import edit_notes, edit_warnings
from hyimg_cli.journal.job_pictures import Drawing, finish, keep_redraws
from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.media.carried import Carried, depth_fault, read_carried, region_of
from hyimg_cli.media.images import pixel_digest, stretch, text_of
from hyimg_cli.media.metadata import PictureFacts, Provenance
from hyimg_cli.settings.run import OutputConfig
from hyimg_cli.spec import digest
from hyimg_cli.spec.job import Encoding, ImageJob, Size, SizeRequest
from hyimg_cli.spec.options import KeepOutside, TextSampling

SIZE = Size(64, 96)
FACTS = PictureFacts("tiny", Provenance("0.1.0", "abc"))
TEXT = TextSampling(0.0, 0, 1.0, 1)


def opened(path: Path, mode: str = "") -> np.ndarray:
    """A file as Pillow decodes it."""
    with Image.open(path) as image:
        return np.array(image.convert(mode) if mode else image)


def picture() -> Image.Image:
    """A photograph's stand-in: smooth, with a disc in it, 150 x 101."""
    y, x = np.mgrid[:101, :150]
    noise = np.random.default_rng(0).normal(0, 2, (101, 150, 3))
    levels = np.stack([x + 40, y + 60, 200 - x / 2], -1) + noise
    levels[np.hypot(y - 50, x - 70) < 22] = (200, 60, 50)
    return Image.fromarray(np.clip(levels, 0, 255).astype(np.uint8))


def job(path: Path, outside: KeepOutside | None = None, **more: Any) -> ImageJob:
    return ImageJob(
        custom_id="a",
        task="it2i",
        prompt="blue",
        images=(str(path),),
        model="tiny-image",
        seed=0,
        size=SizeRequest(64, 96),
        num_inference_steps=1,
        guidance_scale=1.0,
        flow_shift=1.0,
        bot_task="none",
        text=TEXT,
        outside=outside or KeepOutside(),
        **more,
    )


def put_back(
    folder: Path, source: Path, *, is_whole: bool = False, keep_gps: bool = False,
    metadata: bool = True, no_edit: bool = False, drift: float = 1,
    ink: tuple[int, int, int] = (40, 60, 210), **more: Any,
) -> tuple[Path, dict[str, Any]]:  # fmt: skip
    """A redraw that makes the disc blue (`ink`), or all of it dark, on the source in a file."""
    shown = stretch(read_carried(source).pixels, SIZE)
    y, x = np.mgrid[:64, :96]
    drawn = shown.copy()
    if is_whole:
        drawn = (drawn // 4).astype(np.uint8)
    elif not no_edit:
        drawn[np.hypot(y - 31.5, x - 44.5) < 14] = ink
    drawn = np.clip(drawn * drift, 0, 255).astype(np.uint8)
    config = OutputConfig(folder, metadata=metadata, keep_gps=keep_gps)
    one = job(source, **more)
    with RunFolder(folder) as run:
        edit = keep_redraws(run, one, [Drawing(drawn, shown)], FACTS if metadata else None)
        try:
            file = finish(run, one, [Drawing(drawn, shown)], edit, config)
        except JobError as error:
            error.add_note(json.dumps(edit))
            raise
    return folder / file.path, edit


def saved(folder: Path, mode: str, suffix: str = ".png", **how: Any) -> Path:
    image = in_mode(picture(), mode, clear=20)
    path = folder / f"source{suffix}"
    image.save(path, **how)
    return path


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "L", "LA"])
@pytest.mark.parametrize("encoding", [Encoding(), Encoding("webp")], ids=["png", "webp"])
def test_outside_the_mask_every_pixel_is_the_files(
    tmp_path: Path, mode: str, encoding: Encoding
) -> None:
    source = saved(tmp_path, mode)
    path, edit = put_back(tmp_path / "out", source, encoding=encoding)
    assert (edit["kind"], edit["outside_equal"]) == ("local", True)
    kind = "RGBA" if mode in ("RGBA", "LA") else "RGB"
    own, found = (opened(one, kind) for one in (source, path))
    free = opened(tmp_path / "out" / edit["mask"]) == 0
    assert found.shape == own.shape
    assert np.array_equal(found[free], own[free])
    assert 0.5 < free.mean() < 0.9
    left, top, right, bottom = edit["box"]
    assert not free[top:bottom, left:right].all()
    assert (found[50, 70][:3].astype(int) - own[50, 70][:3])[2] > 50, "the disc is blue"
    if mode == "RGBA":
        assert not found[:15, ..., 3].any(), "clear stays clear"


@pytest.mark.parametrize("encoding", [Encoding(), Encoding("webp")], ids=["png", "webp"])
@pytest.mark.parametrize("mode", ["RGBA", "L"])
def test_what_is_said_of_the_pixels_is_true_of_a_file_without_alpha_or_grey(
    tmp_path: Path, mode: str, encoding: Encoding
) -> None:
    image = picture().convert(mode)
    if mode == "RGBA":  # clear only where the edit is
        image.putalpha(Image.fromarray(np.full((101, 150), 255, np.uint8)))
        image.paste((0, 0, 0, 0), (66, 46, 74, 54))
    image.save(tmp_path / "source.png")
    path, edit = put_back(
        tmp_path / "out", tmp_path / "source.png", ink=(0, 0, 0), encoding=encoding
    )
    assert edit["outside_equal"]
    said = json.loads(text_of(path).record)["pixel_sha256"]
    assert said == pixel_digest(np.asarray(Image.open(path))), "so a replay can compare"


def test_profile_and_exif_go_along_upright_and_without_the_place(tmp_path: Path) -> None:
    exif, profile = Image.Exif(), ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    exif[ExifTags.Base.Orientation], exif[ExifTags.Base.Artist] = 6, "somebody"
    exif.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.MakerNote] = b"serial 12345"
    exif.get_ifd(ExifTags.IFD.GPSInfo)[ExifTags.GPS.GPSLatitudeRef] = "N"
    source = saved(tmp_path, "RGB", ".jpg", exif=exif, icc_profile=profile, quality=95)
    upright = np.rot90(opened(source), -1)
    for name, how in (("plain", {}), ("gps", {"keep_gps": True}), ("bare", {"metadata": False})):
        path, edit = put_back(tmp_path / name, source, **how)
        with Image.open(path) as image:
            found, said = np.array(image), image.getexif()
            assert image.info["icc_profile"] == profile
        free = opened(tmp_path / name / edit["mask"]) == 0
        assert np.array_equal(found[free], upright[free])
        assert ExifTags.Base.Orientation not in said
        assert said.get(ExifTags.Base.Artist) == (None if name == "bare" else "somebody")
        assert bool(said.get_ifd(ExifTags.IFD.GPSInfo)) == (name == "gps")
        assert b"serial 12345" not in path.read_bytes()
        assert bool(text_of(path).record) == (name != "bare")


def test_a_result_tells_its_own_size_and_the_plain_picture_its_own(tmp_path: Path) -> None:
    path, edit = put_back(tmp_path / "out", saved(tmp_path, "RGB"))
    texts = [text_of(one) for one in (path, tmp_path / "out" / edit["plain"])]
    assert [json.loads(text.record)["size"] for text in texts] == ["150x101", "96x64"]
    assert "Size: 150x101" in texts[0].parameters
    assert all("compositeWithTrained" in text.source_type for text in texts)


def test_no_edit_gives_the_source_without_a_mark(tmp_path: Path) -> None:
    source = saved(tmp_path, "RGB")
    path, edit = put_back(tmp_path / "out", source, no_edit=True)
    assert edit["kind"] == "none"
    assert np.array_equal(opened(path), opened(source))
    text = text_of(path)
    assert (text.record, text.parameters, text.source_type) == ("", "", "")
    assert text_of(tmp_path / "out" / edit["plain"]).record


def test_an_edit_outside_the_region_is_not_called_none(tmp_path: Path) -> None:
    source = saved(tmp_path, "RGB")
    _, edit = put_back(tmp_path / "out", source, outside=KeepOutside(region="0,0,9,9"))
    assert (edit["kind"], edit["spill"]) == ("none", 1.0)
    (said,) = edit_warnings(edit)
    assert said.startswith("the edit lies outside the region: the result is the source")
    _, edit = put_back(tmp_path / "none", source, no_edit=True)
    assert next(edit_warnings(edit)).startswith("no edit was found")


def test_an_edit_of_the_whole_is_kept_or_fails(tmp_path: Path) -> None:
    source = saved(tmp_path, "RGB")
    path, edit = put_back(tmp_path / "out", source, is_whole=True)
    assert (edit["kind"], edit["outside_equal"]) == ("global", None)
    assert edit["reasons"]
    assert edit["area"] == 1.0
    assert opened(path).shape == (101, 150, 3)
    fail = KeepOutside(on_global="fail")
    with pytest.raises(OutputError, match="whole picture was edited") as raised:
        put_back(tmp_path / "fail", source, is_whole=True, outside=fail)
    # As its hint says: a region limits it.
    limited = KeepOutside(on_global="fail", region="20,20,90,70", max_edited_area=0.3)
    path, edit = put_back(tmp_path / "limited", source, is_whole=True, outside=limited)
    assert (edit["kind"], edit["outside_equal"], edit["gates"]) == ("local", True, [])
    own, found = opened(source), opened(path)
    own[20:70, 20:90] = found[20:70, 20:90]
    assert np.array_equal(own, found)
    said, *_ = edit_warnings(edit)
    assert said.startswith("the whole picture was edited (")
    assert said.endswith("): only the region was used")
    assert [*edit_notes(edit)] == ["region: 23% of the picture"]
    assert [*edit_notes({"region_area": 0.00412})] == ["region: 0.4% of the picture"]
    assert not [*edit_notes(None)]
    assert raised.value.code == "outside.global"
    assert (tmp_path / "fail" / "outputs" / "a.redraw.png").is_file()
    assert not (tmp_path / "fail" / "outputs" / "a.png").exists()


def test_gates_say_what_they_judge(tmp_path: Path) -> None:
    gates = KeepOutside(
        region="0,0,70,101", max_spill=0.1, max_edited_area=0.001, max_outside_change=50, max_seam=0
    )
    _, edit = put_back(tmp_path / "out", saved(tmp_path, "RGB"), outside=gates, drift=1.02)
    assert [text.split(":")[0] for text in edit["gates"]] == [
        "max_edited_area 0.001",
        "max_spill 0.1",
        "max_seam 0",
    ]
    assert edit["spill"] > 0.3
    seam = edit["seam"]
    assert edit["gates"][-1].endswith(f"is {max(seam['cast'], seam['step'] / 2):.4g}")
    goes_on = f"the edit goes on beyond the region ({seam['cut']:.0%} of its border)"
    assert goes_on in edit["doubts"]
    assert f"not sure: {goes_on}" in edit_warnings(edit)


def test_a_product_without_detail_on_a_new_background_needs_a_mask(tmp_path: Path) -> None:
    image, source = picture(), tmp_path / "source.png"
    ImageDraw.Draw(image).ellipse((30, 10, 110, 90), fill=(200, 60, 50))
    image.save(source)
    shown = stretch(read_carried(source).pixels, SIZE)
    drawn = np.where((shown == (200, 60, 50)).all(axis=2, keepdims=True), shown, np.uint8(250))
    one = job(source)
    with RunFolder(tmp_path / "out") as run:
        edit = keep_redraws(run, one, [Drawing(drawn, shown)], FACTS)
        finish(run, one, [Drawing(drawn, shown)], edit, OutputConfig(tmp_path / "out"))
    assert edit["kind"] == "global"
    assert any("use region_keeps inside" in text for text in edit_warnings(edit))


def test_a_gate_judges_what_the_result_changed_and_not_the_drift_that_was_undone(
    tmp_path: Path,
) -> None:
    strict = KeepOutside(max_outside_change=0, max_edited_area=0.9)
    source = saved(tmp_path, "RGB")
    _, edit = put_back(tmp_path / "local", source, outside=strict, drift=1.06)
    assert (edit["kind"], edit["gates"], edit["change"]) == ("local", [], {"mean_de": 0.0})
    assert edit["redraw"]["mean_de"] > 2, "which is told apart"
    _, edit = put_back(tmp_path / "whole", source, is_whole=True, outside=strict)
    assert [text.split(":")[0] for text in edit["gates"]] == [
        "max_outside_change 0",
        "max_edited_area 0.9",
    ]
    assert edit["change"]["mean_de"] > 20


def test_a_difference_outside_is_a_failure_and_the_redraw_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = Carried.encode

    def spoilt(source: Carried, pixels: Any, *more: Any) -> bytes:
        pixels = pixels.copy()
        pixels[3, 4] ^= 1
        return encode(source, pixels, *more)

    monkeypatch.setattr(Carried, "encode", spoilt)
    with pytest.raises(OutputError, match="1 pixels outside the edit differ"):
        put_back(tmp_path / "out", saved(tmp_path, "RGB"))
    assert (tmp_path / "out" / "outputs" / "a.redraw.png").is_file()


@pytest.mark.parametrize(
    ("mode", "suffix", "why"),
    [("I;16", ".png", "16 bits"), ("CMYK", ".jpg", "CMYK"), ("F", ".tif", "floating-point")],
)
def test_what_cannot_be_equal_is_refused_before_a_model_loads(
    tmp_path: Path, mode: str, suffix: str, why: str
) -> None:
    image, path = picture(), tmp_path / f"source{suffix}"
    if mode == "I;16":
        image = Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)
    (image if mode == "I;16" else image.convert(mode)).save(path)
    found = probe_sources([job(path)])
    (fault,) = faults(found, [job(path)])
    assert fault.code == "source.source-depth"
    assert why in fault.what
    assert found.error_of(job(path)) is not None
    with pytest.raises(SourceImageError, match="cannot be equal"):
        read_carried(path)


# 96 x 64 with 10 bits a channel, in colour.
TEN_BITS = (
    "AAAAIGZ0eXBhdmlmAAAAAGF2aWZtaWYxbWlhZk1BMUIAAAD5bWV0YQAAAAAAAAAvaGRscgAAAAAAAAAAcGljdAAAAAAAAA"
    "AAAAAAAFBpY3R1cmVIYW5kbGVyAAAAAA5waXRtAAAAAAABAAAAHmlsb2MAAAAARAAAAQABAAAAAQAAASEAAABWAAAAKGlp"
    "bmYAAAAAAAEAAAAaaW5mZQIAAAAAAQAAYXYwMUNvbG9yAAAAAGppcHJwAAAAS2lwY28AAAAUaXNwZQAAAAAAAABgAAAAQA"
    "AAABBwaXhpAAAAAAMKCgoAAAAMYXYxQ4EATAAAAAATY29scm5jbHgAAgACAAIAAAAAF2lwbWEAAAAAAAAAAQABBAECgwQA"
    "AABebWRhdAoKAAAAAy3/xq+cBDJIEACdAQWWKKCeAARsTntYDKI3znOKhA3oLXrYnepGC+8BP+qpPKeLx5XXBgt/NG8FYq"
    "EyrHn69UI0eD+rFgGEBhufwAmzWORQ"
)


def deep(name: str) -> tuple[bytes, str]:
    """A picture in colour that Pillow opens as one of 8 bits a channel, and what it has."""
    levels, data = np.arange(6 * 9 * 3, dtype=np.uint16).reshape(6, 9, 3) * 400, BytesIO()
    if name == "ppm":
        return b"P6 9 6 65535\n" + levels.astype(">u2").tobytes(), "16 bits"
    if name == "planar.tif":
        tifffile.imwrite(data, levels.transpose(2, 0, 1), photometric="rgb")
        return data.getvalue(), "16 bits"
    if name == "avif":
        return b64decode(TEN_BITS), "10 bits"
    Image.fromarray((levels >> 8).astype(np.uint8)).save(data, "JPEG2000")
    eight, twelve = b"\0\3" + b"\7\1\1" * 3, b"\0\3" + b"\13\1\1" * 3
    assert data.getvalue().count(eight) == 1
    return data.getvalue().replace(eight, twelve), "12 bits"


@pytest.mark.parametrize("name", ["ppm", "planar.tif", "avif", "jp2"])
def test_colours_that_are_read_as_8_bits_but_have_more_are_refused(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / f"source.{name}"
    data, why = deep(name)
    path.write_bytes(data)
    with Image.open(path) as image:
        assert image.mode == "RGB"
    assert why in str(depth_fault(path))
    with pytest.raises(SourceImageError, match=f"{why} per channel"):
        read_carried(path)


@pytest.mark.parametrize(("kind", "white"), [("uint16", 65535), ("float32", 1), ("float32", 255)])
def test_a_mask_of_wide_numbers_is_white_from_half_on(
    tmp_path: Path, kind: str, white: int
) -> None:
    """A clipped one would be white nearly everywhere, or black."""
    parts = np.tile(np.array([0, 0.01, 0.4, 0.6, 1]), (9, 1))
    path = tmp_path / f"mask.{'png' if kind == 'uint16' else 'tif'}"
    Image.fromarray((parts * white).astype(kind)).save(path)
    found = region_of(KeepOutside(region=str(path)), Size(9, 5))
    assert found is not None
    assert (found[0] > 127).tolist() == [False, False, False, True, True]


def test_frames_and_regions_are_looked_at_too(tmp_path: Path) -> None:
    several, source = tmp_path / "several.gif", saved(tmp_path, "RGB")
    picture().save(several, save_all=True, append_images=[picture().rotate(90)])
    assert depth_fault(several) is not None
    assert depth_fault(source) is None
    mask = tmp_path / "mask.png"
    for pixels, why in (
        (np.zeros((101, 150)), "black"),
        (np.ones((50, 50)), "expected 150x101"),
    ):
        Image.fromarray(np.uint8(pixels * 255)).save(mask)
        one = job(source, KeepOutside(region=str(mask)))
        assert why in str(probe_sources([one]).error_of(one))
    Image.fromarray(np.eye(101, 150, dtype=np.uint8)).save(mask)
    assert "brightest level 1 of 255" in str(probe_sources([one]).error_of(one))
    beyond = job(source, KeepOutside(region="0,0,151,20"))
    assert "extends beyond the source" in str(probe_sources([beyond]).error_of(beyond))


@pytest.mark.parametrize("mode", ["limit", "instead"])
@pytest.mark.parametrize("keeps", ["outside", "inside"])
def test_a_soft_mask_is_the_most_that_its_edit_is_blended_by(
    tmp_path: Path, mode: Any, keeps: Any
) -> None:
    """And all of it where the edit goes on: no step where the mask is half black."""
    source, path = saved(tmp_path, "RGB"), tmp_path / "soft.png"
    ramp = np.clip((np.arange(150) - 50) * 6, 0, 255)  # over the disc, from black to white
    soft = np.tile(ramp, (101, 1)).astype(np.uint8)
    Image.fromarray(soft).save(path)
    outside = KeepOutside(region=str(path), region_mode=mode, region_keeps=keeps)
    result, edit = put_back(tmp_path / "out", source, outside=outside)
    allowed = soft if keeps == "outside" else 255 - soft
    matte, own, found = (opened(one) for one in (tmp_path / "out" / edit["mask"], source, result))
    assert (matte <= allowed).all()
    assert np.array_equal(matte[50, 55:85], allowed[50, 55:85])
    assert np.array_equal(own[allowed == 0], found[allowed == 0])
    assert (edit["kind"], edit["outside_equal"]) == ("local", True)
    assert 0.2 < edit["region_blends"] < 0.35
    (note,) = edit_notes(edit)
    assert "; the soft mask blends 2" in note


def test_a_field_of_a_newer_version_does_not_finish_older_edits_again() -> None:
    """The key is that of a version without it."""
    one = job(Path("x"), KeepOutside(region="1,2,30,40", max_spill=0.5))
    facts = {"region": "1,2,30,40", "region_mode": "limit", "on_global": "keep"}
    facts |= {"max_outside_change": None, "max_edited_area": None, "max_spill": 0.5}
    facts |= {"metadata": True, "keep_gps": False, "format": keys._FINISHING_FORMAT}
    assert keys.finishing_key(one, OutputConfig(Path("out"))) == digest.of_json(facts)
