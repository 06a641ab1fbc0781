"""Source images from memory, disk or the model: the same pixels, and counted where they come
from.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image

from hyimg_cli.cache import disk
from hyimg_cli.engine.session import Session
from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.journal.keys import source_key
from hyimg_cli.manifest.planner import make_plan
from hyimg_cli.media.images import SourceImage, read_image
from hyimg_cli.models import registry
from hyimg_cli.models.hunyuan_image3.family import HunyuanImage3
from hyimg_cli.pipelines.image.sources import EncodedSources
from hyimg_cli.settings.run import BatchConfig, CacheConfig, ModelChoice, OutputConfig, RunConfig
from hyimg_cli.spec.events import JobEnded, Outcome
from hyimg_cli.spec.job import ImageJob


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Digests of the images that the model encoded, in order."""
    digests: list[str] = []
    encode = HunyuanImage3.encode_source

    def counted(self: Any, pixels: Any, digest: str) -> Any:
        digests.append(digest)
        return encode(self, pixels, digest)

    monkeypatch.setattr(HunyuanImage3, "encode_source", counted)
    return digests


@pytest.fixture
def run(job: ImageJob, sources: tuple[str, ...], tmp_path: Path) -> Callable[..., list[Outcome]]:
    """Draws two edits of one picture and one of two others, with the cache given."""
    edits = [
        replace(job, custom_id="first", images=sources[:1], bot_task="none", seed=1),
        replace(job, custom_id="second", images=sources[:1], bot_task="none", seed=2),
        replace(job, custom_id="two", images=sources[1:], bot_task="none"),
    ]
    folders = iter(range(100))

    def drawn(cache: CacheConfig) -> list[Outcome]:
        config = RunConfig(
            OutputConfig(tmp_path / f"out-{next(folders)}"),
            model=ModelChoice(device="cpu", dtype="float32"),
            batch=BatchConfig(prewarm=False),
            cache=cache,
        )
        with RunFolder(config.output.folder) as folder:
            events = list(Session(config).run(make_plan(edits, registry.model_card), folder))
        return [event.outcome for event in events if isinstance(event, JobEnded)]

    return drawn


def _pixels(outcomes: list[Outcome]) -> dict[str, str]:
    return {outcome.custom_id: outcome.outputs[0].pixel_sha256 for outcome in outcomes}


def _counts(outcomes: list[Outcome]) -> tuple[int, ...]:
    return tuple(outcomes[-1].cache["source_images"].values())


def test_pixels_are_the_same_off_cold_and_warm(
    run: Callable[..., list[Outcome]], encoded: list[str], tmp_path: Path
) -> None:
    off = run(CacheConfig())
    assert len(encoded) == 3
    cold = run(CacheConfig(tmp_path / "cache"))
    assert len(encoded) == 6
    warm = run(CacheConfig(tmp_path / "cache"))
    assert len(encoded) == 6, "the second run encodes nothing"
    assert _pixels(off) == _pixels(cold) == _pixels(warm)
    assert list(off[-1].cache["source_images"]) == ["memory_hits", "disk_hits", "misses"]
    assert (_counts(off), _counts(cold), _counts(warm)) == ((1, 0, 3), (1, 0, 3), (1, 3, 0))
    assert [o.notes for o in warm] == [o.notes for o in off], "notes are kept with the rows"


def test_how_a_picture_was_read_is_a_note_and_no_warning(
    run: Callable[..., list[Outcome]], sources: tuple[str, ...]
) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    Image.new("RGB", (40, 80), "red").save(sources[0], exif=exif)
    Image.new("RGBA", (64, 64)).save(sources[1])
    by_id = {one.custom_id: one for one in run(CacheConfig())}
    first, two = by_id["first"], by_id["two"]
    assert two.warnings == ("the picture is transparent everywhere",), "it showed nothing"
    assert "transparency composited on white" in two.notes
    assert first.warnings == ()
    assert first.notes == (
        "EXIF orientation applied",
        "80x40 fitted to 64x64: tiny-image makes 64x64; left and right cut off, 50% of the width",
    )


def test_a_damaged_entry_is_encoded_again_with_a_warning_in_one_line(
    run: Callable[..., list[Outcome]], encoded: list[str], tmp_path: Path
) -> None:
    clean = run(CacheConfig(tmp_path / "cache"))
    for path in (tmp_path / "cache" / disk.SOURCE_IMAGES).iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    again = run(CacheConfig(tmp_path / "cache"))
    assert _pixels(again) == _pixels(clean)
    assert _counts(again) == (1, 0, 3)
    warned = {o.custom_id: sum("damaged" in warning for warning in o.warnings) for o in again}
    # Warnings of a line are told apart by their words: two damaged sources read as one.
    assert warned == {"first": 1, "second": 0, "two": 1}
    assert _counts(run(CacheConfig(tmp_path / "cache"))) == (1, 3, 0)


def test_a_cache_that_cannot_be_written_is_one_warning_and_no_failure(
    run: Callable[..., list[Outcome]], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    outcomes = run(CacheConfig(tmp_path / "file"))
    assert [o.status for o in outcomes] == ["done"] * 3
    notes = [warning for o in outcomes for warning in o.warnings if "disk cache" in warning]
    assert len(notes) == 1
    assert str(tmp_path) not in notes[0]
    assert _pixels(outcomes) == _pixels(run(CacheConfig()))


def test_a_budget_of_zero_keeps_nothing(run: Callable[..., list[Outcome]], tmp_path: Path) -> None:
    assert _counts(run(CacheConfig(tmp_path / "cache", budget_mb=0))) == (1, 0, 3)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_come_back_bit_by_bit(family: Any, sources: tuple[str, ...], dtype: Any) -> None:
    image = read_image(Path(sources[1]))
    made = family.encode_source(image.pixels, image.digest)
    rows = {name: tensor.to(dtype) for name, tensor in vars(made.rows).items()}
    made = replace(made, rows=type(made.rows)(**rows), notes=("fitted – somehow",))
    back = family.unpack_source(family.pack_source(made), image.digest)
    assert (back.digest, back.shape, back.notes) == (made.digest, made.shape, made.notes)
    for name, tensor in rows.items():
        restored = getattr(back.rows, name)
        assert restored.dtype == dtype
        assert torch.equal(restored, tensor)


@pytest.mark.parametrize("data", [b"", b"12345678", b"\x02" + b"\0" * 7 + b"{}", b"\xff" * 64])
def test_other_bytes_are_no_source(family: Any, data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        family.unpack_source(data, "digest")


def test_rows_of_another_image_are_refused(family: Any, sources: tuple[str, ...]) -> None:
    image = read_image(Path(sources[0]))
    packed = family.pack_source(family.encode_source(image.pixels, image.digest))
    with pytest.raises(ValueError, match="another key"):
        family.unpack_source(packed, "digest")


def test_whole_bytes_that_are_no_source_are_encoded_again(
    family: Any, encoded: list[str], tmp_path: Path
) -> None:
    """The checksum holds and the family refuses: foreign bytes under our name."""
    image = SourceImage(np.zeros((64, 64, 3), dtype=np.uint8), "digest", ())
    key = source_key("digest", "print", device="cpu", dtype="float32")
    disk.DiskStore(tmp_path, 10**6).write(disk.SOURCE_IMAGES, key, b"foreign")
    kept = EncodedSources(CacheConfig(tmp_path))
    kept.use(family, "print")
    first, _ = kept.encode(image)
    assert [note for note in first.warnings if "damaged" in note]
    again, _ = kept.encode(image)
    assert not [note for note in again.warnings if "damaged" in note]
    assert tuple(kept.counts().values()) == (1, 0, 1)
    assert encoded == ["digest"]
    fresh = EncodedSources(CacheConfig(tmp_path))
    fresh.use(family, "print")
    fresh.encode(image)
    assert tuple(fresh.counts().values()) == (0, 1, 0)


def test_the_key_holds_all_that_shapes_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from hyimg_cli.journal import keys

    plain = {"device": "cpu", "dtype": "float32"}
    found = {
        source_key("image", "print", **plain),
        source_key("other", "print", **plain),
        source_key("image", "other", **plain),
        source_key("image", "print", **plain | {"device": "cuda"}),
        source_key("image", "print", **plain | {"dtype": "bfloat16"}),
    }
    monkeypatch.setattr(keys, "versions", lambda: {"torch": "another"})
    found.add(source_key("image", "print", **plain))
    assert len(found) == 6
    assert source_key("image", "print", **plain) in found
