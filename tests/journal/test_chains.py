"""What an edit of an edit records of its first source, whatever happens to the files between."""

import json
from pathlib import Path
from shutil import copy
from typing import Any

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from hyimg_cli.journal.job_pictures import Drawing, finish, keep_redraws
from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.measure.outside import outside_of
from hyimg_cli.media.carried import history_of_file, read_carried
from hyimg_cli.media.history import History, Origin, recorded_history
from hyimg_cli.media.images import pixel_digest, stretch, text_of
from hyimg_cli.media.metadata import PictureText
from hyimg_cli.settings.run import OutputConfig
from hyimg_cli.spec.job import Encoding, ImageJob, Size
from hyimg_cli.spec.options import KeepOutside
from tests.journal.test_job_pictures import FACTS, SIZE, job, opened, saved

CENTRES = ((20, 25), (45, 60), (30, 75))


def edited(
    folder: Path, source: Path, link: int, *, metadata: bool = True, kind: str = "local",
    outside: KeepOutside | None = None, **more: Any,
) -> tuple[Path, dict[str, Any]]:  # fmt: skip
    """The file and the record of an edit: a disc in another place for each link."""
    shown = stretch(read_carried(source).pixels, SIZE)
    y, x = np.mgrid[:64, :96]
    drawn = shown.copy()
    if kind == "global":
        drawn = (drawn // 4).astype(np.uint8)
    elif kind == "local":
        down, across = CENTRES[link % 3]
        drawn[np.hypot(y - down, x - across) < 9] = (30, 200, 40 * (link % 5))
    one: ImageJob = job(source, outside, file_name=f"link-{link}", **more)
    with RunFolder(folder) as run:
        edit = keep_redraws(run, one, [Drawing(drawn, shown)], FACTS if metadata else None)
        file = finish(
            run, one, [Drawing(drawn, shown)], edit, OutputConfig(folder, metadata=metadata)
        )
    assert edit["kind"] == kind
    return folder / file.path, edit


def known(path: Path) -> History:
    found = recorded_history(path, text_of(path), Size(*opened(path).shape[:2]))
    assert found is not None
    return found


THOROUGH = pytest.mark.thorough


@pytest.mark.parametrize(("mode", "metadata"), [
    ("RGBA", False),
    *(pytest.param(*case, marks=THOROUGH) for case in (("RGB", True), ("RGBA", True), ("L", True))),
])  # fmt: skip
def test_pixels_that_no_edit_touched_are_the_first_sources(
    tmp_path: Path, mode: str, metadata: bool
) -> None:
    first = source = saved(tmp_path, mode)
    touched = np.zeros((101, 150), bool)
    for link in range(3):
        source, edit = edited(tmp_path / "out", source, link, metadata=metadata)
        touched |= opened(tmp_path / "out" / edit["mask"]) > 0
        assert edit["links"] == link + 1
        found = known(source)
        assert np.array_equal(found.touched, touched), "it is the union of the mattes"
    own = read_carried(first)
    assert found.origin == Origin(own.digest, pixel_digest(own.own))
    assert edit["origin"] == {"sha256": own.digest, "pixel_sha256": pixel_digest(own.own)}
    free = ~touched
    assert np.array_equal(opened(source, "RGBA")[free], opened(first, "RGBA")[free])
    counts = {"touched_pixels": int(touched.sum()), "untouched_pixels": int(free.sum())}
    assert found.counts() == counts
    beside = opened(tmp_path / "out" / edit["touched"])
    assert np.array_equal(beside, touched)


@THOROUGH
def test_a_moved_result_has_its_history_with_it(tmp_path: Path) -> None:
    source, _ = edited(tmp_path / "a", saved(tmp_path, "RGB"), 0, encoding=Encoding("webp"))
    source, last = edited(tmp_path / "a", source, 1, encoding=Encoding("webp"))
    (elsewhere := tmp_path / "elsewhere").mkdir()
    moved = Path(copy(source, elsewhere / "other-name.webp"))
    _, edit = edited(tmp_path / "b", moved, 2)
    assert (edit["links"], edit["origin"]) == (3, last["origin"])


def test_a_picture_that_another_program_changed_is_a_first_source(tmp_path: Path) -> None:
    source, edit = edited(tmp_path / "out", saved(tmp_path, "RGB"), 0)
    chunks = PngInfo()
    chunks.add_text("hyimg", text_of(source).record)
    pixels = opened(source)
    pixels[0, 0] ^= 1
    Image.fromarray(pixels).save(tmp_path / "changed.png", pnginfo=chunks)
    Image.fromarray(opened(source)).save(tmp_path / "plain.png")
    for name in ("changed.png", "plain.png"):
        _, later = edited(tmp_path / name.removesuffix(".png"), tmp_path / name, 1)
        assert later["links"] == 1
        assert later["origin"]["sha256"] == read_carried(tmp_path / name).digest
        assert later["origin"] != edit["origin"]


@THOROUGH
def test_links_that_change_nothing_or_everything(tmp_path: Path) -> None:
    """Without an edit, the result is its source, an edit too; after a whole one nothing is left."""
    source, edit = edited(tmp_path / "out", saved(tmp_path, "RGB"), 0)
    same, unchanged = edited(tmp_path / "out", source, 1, kind="none")
    assert (unchanged["links"], unchanged["origin"]) == (1, edit["origin"])
    assert text_of(same) == text_of(source), "it keeps the mark that a model made it"
    later, edit = edited(tmp_path / "out", same, 2)
    assert edit["links"] == 2
    assert not known(later).touched.all()
    whole, edit = edited(tmp_path / "out", later, 3, kind="global")
    assert edit["links"] == 3
    assert known(whole).counts()["untouched_pixels"] == 0
    _, edit = edited(tmp_path / "new", saved(tmp_path, "RGB"), 0, kind="none")
    assert edit["links"] == 0
    assert "touched" not in edit


@pytest.mark.parametrize("record", [
    "", "{}", "[]", "nonsense", '{"chain": 1, "pixel_sha256": "x"}',
    '{"chain": {"origin": {"sha256": "a"}, "links": 1, "touched": ""}, "pixel_sha256": "x"}',
    '{"chain": {"origin": {"sha256": "a", "pixel_sha256": "b"}, "links": 0, "touched": "iVBO"}}',
])  # fmt: skip
def test_a_damaged_record_has_no_history(tmp_path: Path, record: str) -> None:
    assert recorded_history(tmp_path / "a.png", PictureText(record=record), SIZE) is None


@THOROUGH
def test_a_very_ragged_union_claims_less_than_is_true() -> None:
    """Its PNG would be as large as the picture, so whole squares count as touched."""
    touched = np.random.default_rng(0).random((2999, 4001)) < 0.02
    touched[:, 2000:] = False
    found = History(Origin("a", "b"), 2, touched, "c")
    text = PictureText(record=json.dumps({"chain": found.to_record(), "pixel_sha256": "c"}))
    again = recorded_history(Path("none"), text, Size(2999, 4001))
    assert again is not None
    assert len(text.record) < 1_000_000
    assert not (touched & ~again.touched).any()
    assert not again.touched[:, 2008:].any()


def test_the_first_source_and_the_last_result_are_compared_outside_all_edits(
    tmp_path: Path,
) -> None:
    first, files = saved(tmp_path, "RGB"), []
    source = first
    for link in range(3):
        source, _ = edited(tmp_path / "out", source, link)
        files.append(source)
    union = int(known(source).touched.sum())
    moved = Path(copy(source, tmp_path / "moved.png"))
    for last in (source, moved):
        found = outside_of(first, last, KeepOutside())
        assert (found["outside_by"], found["links"], found["outside_equal"]) == ("touched", 3, True)
        assert (found["outside_differing_pixels"], found["outside_pixels"]) == (0, 15150 - union)
    for earlier in files[:2]:
        later = outside_of(earlier, source, KeepOutside())
        assert (later["outside_by"], later["outside_equal"]) == ("touched", True)
    other = outside_of(source, files[0], KeepOutside())
    assert other["outside_by"] == "found", "the sources of a result come before it"
    alone = outside_of(first, Path(copy(files[0], tmp_path / "one.png")), KeepOutside())
    assert (alone["outside_by"], alone["outside_differing_pixels"]) == ("touched", 0)
    # One pixel that another program changed is counted, with the record in the file or next to it.
    pixels = opened(source)
    assert not known(source).touched[0, 149]
    pixels[0, 149] ^= 4
    Image.fromarray(pixels).save(source)
    assert outside_of(first, source, KeepOutside())["outside_differing_pixels"] == 1
    found = history_of_file(source)
    assert found is not None
    assert not found[1], "it says so"
