"""Pictures that files, folders and patterns of a command line name, and notes on skipped files."""

from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from hyimg_cli.errors import HyimgError, ManifestError
from hyimg_cli.manifest import sources as module
from hyimg_cli.manifest.sources import is_pattern, sources
from hyimg_cli.media.kinds import FORMATS, RAW_SUFFIXES, SUFFIXES, UNREAD_SUFFIXES

Tree = Callable[..., None]


def names(*arguments: str, is_recursive: bool = False) -> list[str]:
    return list(sources(arguments, is_recursive=is_recursive).files)


def faults(*arguments: str, is_recursive: bool = False) -> list[tuple[str, str]]:
    with pytest.raises(ManifestError) as caught:
        sources(arguments, is_recursive=is_recursive)
    return [(one.code, one.where) for one in caught.value.faults]


def test_the_suffixes_are_pillows_own() -> None:
    pytest.importorskip("pillow_heif").register_heif_opener()
    Image.init()
    known = Image.registered_extensions().items()
    # Of the pictures in an MPO file the first is a JPEG, and is read as one.
    read = (*FORMATS, "HEIF", "MPO")
    assert {suffix for suffix, name in known if name in read} == SUFFIXES


def test_a_folder_in_natural_order(tree: Tree) -> None:
    tree("p/IMG_10.JPG", "p/img_2.png", "p/b/1.jpg", "p/b/10.jpg", "p/b/2.jpg", "p/a.txt")
    assert names("p") == ["img_2.png", "IMG_10.JPG"]
    found = sources(["p/"], is_recursive=True)
    assert list(found.files) == ["b/1.jpg", "b/2.jpg", "b/10.jpg", "img_2.png", "IMG_10.JPG"]
    assert found.files["b/2.jpg"] == Path("p/b/2.jpg")
    assert found.base == Path("p")


def test_what_is_left_out_is_told_in_a_line_each(tree: Tree) -> None:
    tree("p/a.jpg", "p/.hidden.jpg", "p/n.txt", "p/x.psd", "p/y", "p/s/b.jpg", "p/.git/c.jpg")
    found = sources(["p"], is_recursive=False)
    assert found.notes == (
        "skipped 4 files that are not images: p/.git, p/.hidden.jpg, p/n.txt and 1 more",
        "skipped 1 picture of a kind that is not supported (convert it): p/x.psd",
        "skipped 1 subfolder (add --recursive): p/s",
    )


def test_results_of_earlier_runs_and_links_are_not_entered(tree: Tree) -> None:
    tree("a.jpg", "runs/one/results.jsonl", "runs/one/outputs/a.png", "b/c.jpg")
    Path("round").symlink_to(".")
    found = sources(["."], is_recursive=True)
    assert list(found.files) == ["a.jpg", "b/c.jpg"]
    assert found.notes == (
        "skipped 1 linked folder: ./round",
        "skipped 1 folder of an earlier run: ./runs/one",
    )


def test_files_folders_and_patterns_of_one_folder_have_the_same_names(tree: Tree) -> None:
    tree("p/a.jpg", "p/b.jpg")
    assert names("p") == names("p/a.jpg", "./p/b.jpg") == names("p/*.jpg") == ["a.jpg", "b.jpg"]


def test_several_folders_are_named_from_the_one_above(tree: Tree) -> None:
    tree("x/p/a.jpg", "x/q/a.jpg", "x/q/s/b.jpg")
    assert names("x/p", "x/q") == ["p/a.jpg", "q/a.jpg"]
    assert names("x/**/*.jpg") == ["p/a.jpg", "q/a.jpg", "q/s/b.jpg"]
    assert sources(["x/p", "x/q"], is_recursive=False).base == Path("x")


def test_what_is_named_twice_is_taken_once(tree: Tree) -> None:
    tree("p/a.jpg")
    found = sources(["p/a.jpg", "p", "p/../p/a.jpg"], is_recursive=False)
    assert list(found.files) == ["a.jpg"]
    assert found.notes == ("used once, though named more than once: 2",)


def test_a_pattern_that_is_a_files_name_is_that_file(tree: Tree) -> None:
    tree("a[1].jpg", "a1.jpg")
    assert not is_pattern("a[1].jpg")
    assert names("a[1].jpg") == ["a[1].jpg"]
    assert names("a[12].jpg") == ["a1.jpg"]


def test_every_fault_at_once(tree: Tree) -> None:
    tree("a.jpg")
    given = ("nowhere", "", "*.gif", "a.jpg/b.jpg", "x\0y", "s3://b/a.jpg")
    found = faults("a.jpg", *given)
    assert [code for code, _ in found] == ["manifest.missing"] * 6
    assert [where for _, where in found[:3]] == ["nowhere", '""', "*.gif"]


@pytest.mark.parametrize("names", [[], ["e/a.txt"], ["e/.a.jpg"], ["e/s/a.jpg"]])
def test_a_folder_without_pictures(tree: Tree, names: list[str]) -> None:
    tree(*names)
    Path("e").mkdir(exist_ok=True)
    assert faults("e") == [("manifest.no-pictures", "e")]


def test_a_broken_link_is_a_source_that_will_be_missing(tree: Tree) -> None:
    tree("p/b.jpg")
    Path("p/a.jpg").symlink_to("nowhere.jpg")
    assert names("p") == ["a.jpg", "b.jpg"]


def test_a_folder_that_cannot_be_read(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    tree("p/a.jpg", "p/s/b.jpg")
    walk, refusing = module.os.walk, "p"

    def refused(top: str, onerror: Callable[[OSError], None]) -> object:
        onerror(PermissionError(13, "Permission denied", refusing))
        return walk(top)

    monkeypatch.setattr(module.os, "walk", refused)
    assert faults("p") == [("manifest.unreadable", "p")]
    refusing = "p/s"
    found = sources(["p"], is_recursive=False)
    assert list(found.files) == ["a.jpg"]
    assert found.notes[-1] == "skipped 1 subfolder that cannot be read: p/s"


@pytest.mark.parametrize(
    "arguments", [["p"], ["p/a.jpg", "p/bad\udcff.jpg"], ["p/*.jpg"], ["p", "b"]]
)
def test_a_name_that_is_not_utf8_does_not_stop_the_others(tree: Tree, arguments: list[str]) -> None:
    tree("p/a.jpg", "p/bad\udcff.jpg", "p/x\udcff/b.jpg", "b/bad\udcff/c.jpg", "b/d.jpg")
    found = sources(arguments, is_recursive=True)
    assert all(name.isprintable() for name in found.files)
    assert found.files
    (note,) = (note for note in found.notes if "UTF-8" in note)
    assert "\\udcff" in note
    assert note.isprintable()


def test_only_names_that_are_not_utf8_are_no_pictures(tree: Tree) -> None:
    tree("p/bad\udcff.jpg")
    with pytest.raises(ManifestError) as caught:
        sources(["p"], is_recursive=False)
    (fault,) = caught.value.faults
    assert (fault.code, "rename" in fault.hint) == ("manifest.no-pictures", True)


SYSTEMS = ("@eaDir", "#recycle", "@Recycle", "@recycle", "$RECYCLE.BIN", "$Recycle.Bin")
SYSTEMS += ("#snapshot", "lost+found", "found.000", "System Volume Information", "__MACOSX")
SYSTEMS += ("Fotos Previews.lrdata", "Photos Library.photoslibrary")


@pytest.mark.parametrize("name", SYSTEMS)
def test_folders_of_systems_are_left_out(tree: Tree, name: str) -> None:
    tree("p/a.jpg", f"p/{name}/b.jpg", f"p/s/{name}/x/c.jpg", "p/Recycled/d.jpg", "p/eaDir/e.jpg")
    kept = ["a.jpg", "eaDir/e.jpg", "Recycled/d.jpg"]
    found = sources(["p"], is_recursive=True)
    assert list(found.files) == kept
    assert found.notes == (
        f"skipped 2 folders of thumbnails, deleted files or snapshots: p/{name}, p/s/{name}",
    )
    assert set(names("p/**/*.jpg")) == set(kept)
    assert names(f"p/{name}") == names(f"p/{name}/*.jpg") == ["b.jpg"]  # as asked


def test_a_bracket_in_a_pattern_is_explained(tree: Tree) -> None:
    tree("br[1]/a.png")
    with pytest.raises(ManifestError) as caught:
        sources(["br[1]/*.png"], is_recursive=False)
    (fault,) = caught.value.faults
    assert "'br[[]1]/*.png'" in fault.hint
    assert names("br[[]1]/*.png")


def test_each_fault_is_an_error_of_usage(tree: Tree) -> None:
    with pytest.raises(HyimgError) as caught:
        sources(["nowhere"], is_recursive=False)
    assert caught.value.exit_code == 2


def test_pictures_of_kinds_that_are_not_read_are_named_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.png", "b.jxl", "c.PSD", "d.txt"):
        (tmp_path / name).touch()
    found = sources(["."], is_recursive=False)
    assert [*found.files] == ["a.png"]
    assert found.notes == (
        "skipped 1 file that is not an image: ./d.txt",
        "skipped 2 pictures of kinds that are not supported (convert them): ./b.jxl, ./c.PSD",
    )
    assert UNREAD_SUFFIXES.isdisjoint(SUFFIXES | RAW_SUFFIXES)
