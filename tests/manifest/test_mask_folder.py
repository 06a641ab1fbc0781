"""Masks of a folder, and next to pictures: which belongs to which, and what is refused."""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from hyimg_cli.errors import ManifestError, SourceImageError
from hyimg_cli.manifest.mask_folder import MaskFolder, with_regions
from hyimg_cli.manifest.sources import Sources, sources
from hyimg_cli.spec.job import EDIT_SUFFIXES
from hyimg_cli.spec.options import Region

Run = Callable[..., Any]
Tree = Callable[..., None]


@pytest.fixture
def tree(tree: Callable[..., None]) -> Tree:
    """Makes pictures below the working folder, 16 x 12; masks are white in the left half."""

    def write(path: Path) -> None:
        picture = Image.new("L", (16, 12))
        picture.paste(255, (0, 0, 8, 12))
        picture.save(path)

    return partial(tree, write=write)


def found(*arguments: str, region: str = "", **more: Any) -> Sources:
    searched = sources(arguments, is_recursive=True)
    return with_regions(searched, Region(region), keeps_outside=True, **more)


def pairs(*arguments: str, region: str = "masks") -> dict[str, str]:
    return dict(found(*arguments, region=region).regions)


@pytest.mark.parametrize(
    "mask",
    [
        "cat.png", "cat.jpg", "cat.tif", "cat.mask.png", "cat_mask.png", "cat-mask.png",
        "cat.MASK.png", "CAT.PNG", "cat.jpg.png", "cat.jpg.mask.png", "a/cat.png", "p/a/cat.png",
    ],
)  # fmt: skip
def test_a_mask_has_its_pictures_name(tree: Tree, mask: str) -> None:
    tree("p/a/cat.jpg", f"masks/{mask}", "masks/cats.png", "masks/scat.png", "masks/x/cat.png")
    assert MaskFolder("masks").mask_of("p/a/cat.jpg") == f"masks/{mask}"
    assert MaskFolder("masks/").mask_of(os.path.abspath("p/a/cat.jpg")) == f"masks/{mask}"


def test_accents_in_another_encoding_are_the_same_name(tree: Tree) -> None:
    tree("p/e\u0301.jpg", "masks/\u00e9.png")
    assert MaskFolder("masks").mask_of("p/e\u0301.jpg") == "masks/\u00e9.png"


def test_a_subfolder_that_the_masks_have_too_is_the_only_place(tree: Tree) -> None:
    tree(
        "p/cat.jpg", "p/a/cat.jpg", "p/b/dog.jpg", "masks/cat.png", "masks/dog.png", "masks/a/x.png"
    )
    masks = MaskFolder("masks")
    assert masks.mask_of("p/cat.jpg") == "masks/cat.png"
    assert masks.mask_of("p/b/dog.jpg") == "masks/dog.png"
    assert masks.mask_of("p/a/cat.jpg") == ""
    assert masks.unused() == ["masks/a/x.png"]


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (("masks/cat.png", "masks/cat_mask.png"), ("masks/cat.png", "masks/cat_mask.png")),
        (("masks/cat.png", "masks/cat.tif"), ("masks/cat.png", "masks/cat.tif")),
        (("masks/cat.png", "p/cat.png"), ("p/cat.jpg", "p/cat.png")),
        (("masks/cat.png", "p/a/cat.jpg"), ("p/cat.jpg", "p/a/cat.jpg")),
    ],
)
def test_what_is_not_clear_is_refused_with_both_names(
    tree: Tree, names: tuple[str, ...], says: tuple[str, str]
) -> None:
    tree("p/cat.jpg", *names)
    with pytest.raises(ManifestError) as caught:
        found("p", region="masks")
    (error,) = caught.value.faults
    assert error.code == "manifest.region"
    assert all(name in error.what for name in says), error.what
    # The names in the hint are clear.
    for name in ("cat.jpg", "cat.png"):
        tree(f"masks/{name}.png")
    if "p/a/cat.jpg" not in names:
        assert pairs("p")["cat.jpg"] == "masks/cat.jpg.png"


def test_pictures_without_a_mask_are_counted_and_named(tree: Tree) -> None:
    tree(*(f"p/{number}.jpg" for number in range(6)), "masks/3.png", "masks/other.png")
    with pytest.raises(ManifestError) as caught:
        found("p", region="masks")
    (error,) = caught.value.faults
    assert error.what == "5 of 6 pictures without a mask: p/0.jpg, p/1.jpg, p/2.jpg and 2 more"
    assert (error.where, "0_mask.png" in error.hint) == ("masks", True)
    kept = found("p", region="masks", may_lack=True)
    assert (kept.regions["3.jpg"], kept.regions["4.jpg"]) == ("masks/3.png", "masks")
    assert kept.notes == ("skipped 1 mask without a picture: masks/other.png",)


def test_masks_below_the_pictures_or_among_them_are_not_pictures(tree: Tree) -> None:
    tree("p/a.jpg", "p/s/b.jpg", "p/masks/a.png", "p/masks/s/b.png")
    below = found("p", region="p/masks")
    assert {**below.regions} == {"a.jpg": "p/masks/a.png", "s/b.jpg": "p/masks/s/b.png"}
    assert [*below.files] == ["a.jpg", "s/b.jpg"]
    tree("q/a.jpg", "q/a_mask.png", "q/b.png", "q/b.mask.png")
    among = found("q", region="q")
    assert [*among.files] == ["a.jpg", "b.png"]
    assert [among.regions[name] for name in among.files] == ["q/a_mask.png", "q/b.mask.png"]


def test_a_mask_next_to_its_picture_is_not_a_picture(tree: Tree) -> None:
    tree(
        "p/cat.jpg",
        "p/cat.mask.png",
        "p/dog.jpg",
        "p/owl.mask.png",
        "p/face_mask.jpg",
        "p/face.jpg",
    )
    kept = found("p")
    assert [*kept.files] == ["cat.jpg", "dog.jpg", "face.jpg", "face_mask.jpg", "owl.mask.png"]
    assert {**kept.regions} == {"cat.jpg": "p/cat.mask.png"}
    assert kept.notes == ("1 of 5 pictures limited by a mask next to it: p/cat.mask.png",)
    plain = with_regions(sources(["p"], is_recursive=True), Region(""), keeps_outside=False)
    assert ([*plain.files], {**plain.regions}) == ([*kept.files], {})
    assert plain.notes == (
        "skipped 1 mask next to pictures (--keep-outside uses them): p/cat.mask.png",
    )
    by_shell = found("p/cat.jpg", "p/cat.mask.png")
    assert ([*by_shell.files], [*by_shell.regions]) == (["cat.jpg"], ["cat.jpg"])
    assert [*found("p/cat.mask.png").files] == ["cat.mask.png"], "alone, it is a picture"
    tree("p/cat.mask.webp")
    tree("p/dog.png", "p/dog.mask.png")
    with pytest.raises(ManifestError) as caught:
        found("p")
    assert [one.what for one in caught.value.faults] == [
        "p/cat.jpg has 2 masks: p/cat.mask.png, p/cat.mask.webp",
        "p/dog.mask.png is named like 2 pictures: p/dog.jpg, p/dog.png",
    ]


def test_files_of_an_edit_are_neither_pictures_nor_masks(tree: Tree) -> None:
    ends = (".png", *EDIT_SUFFIXES.values())
    tree(*(f"out/cat{end}" for end in ends), "out/dog.png", "out/dog.reference.jpg")
    kept = found("out")
    assert ([*kept.files], {**kept.regions}) == (["cat.png", "dog.png", "dog.reference.jpg"], {})
    assert kept.notes == (
        "skipped 6 files of earlier edits: out/cat.mask.png, out/cat.redraw-2.png, "
        "out/cat.redraw.png and 3 more",
    )


def test_the_manifest_of_pictures_has_their_masks(tree: Tree, run_cli: Run) -> None:
    tree("p/a.jpg", "p/s/b.jpg", "masks/a.png", "masks/s/b_mask.png")
    how = (
        "--prompt",
        "x",
        "--recursive",
        "--region",
        "transparent:masks",
        "--region-keeps",
        "inside",
    )
    Path("lists").mkdir()
    ran = run_cli("manifest", "p", *how, "-o", "lists/jobs.jsonl")
    assert ran.code == 0, ran.err
    lines = [json.loads(line) for line in Path("lists/jobs.jsonl").read_text().splitlines()]
    assert [one["region"] for one in lines] == [
        "transparent:../masks/a.png",
        "transparent:../masks/s/b_mask.png",
    ]
    assert {one["region_keeps"] for one in lines} == {"inside"}


def test_a_manifest_with_a_folder_of_masks(tree: Tree, run_cli: Run) -> None:
    tree("in/a.jpg", "in/b.jpg", "masks/a.png")
    lines = [
        {"custom_id": name, "prompt": "x", "images": [f"in/{name}.jpg"], "keep_outside": True}
        for name in ("a", "b")
    ]
    jobs = Path("jobs.jsonl")
    jobs.write_text("".join(json.dumps(one | {"region": "masks"}) + "\n" for one in lines))
    ran = run_cli("check", jobs)
    assert (ran.code, "in/b.jpg has no mask" in ran.err, "jobs.jsonl:2: region" in ran.err) == (
        2,
        True,
        True,
    )
    jobs.write_text("".join(json.dumps(one) + "\n" for one in lines))
    assert "in/b.jpg has no mask" in run_cli("check", jobs, "--region", "masks/").err
    tree("masks/b_mask.png")
    assert run_cli("check", jobs, "--region", "masks/").code == 0


def test_eval_takes_the_mask_of_its_source(tree: Tree, run_cli: Run) -> None:
    tree("in/a.png", "masks/a.mask.png")
    given = ("eval", "outside", "in/a.png", "in/a.png", "--region-mode", "instead", "--region")
    (record,) = run_cli(*given, "masks", "--json").json_lines
    assert (record["outside_by"], record["region_area"]) == ("region", 0.5)
    with pytest.raises(SourceImageError):
        MaskFolder("in").needed_for("in/b.png")
    assert "has no mask" in run_cli(*given, "in").err


def test_with_another_folder_of_masks_those_next_to_pictures_are_skipped(tree: Tree) -> None:
    tree("p/cat.jpg", "p/cat.mask.png", "masks/cat.png")
    kept = found("p", region="masks")
    assert ({**kept.regions}, kept.notes) == (
        {"cat.jpg": "masks/cat.png"},
        ("skipped 1 mask next to pictures: p/cat.mask.png",),
    )
    assert found("p", region="0,0,9,9").notes == kept.notes
    tree("p/dog.jpg")
    with pytest.raises(ManifestError) as caught:
        found("p", region="p")
    assert caught.value.faults[0].hint == "name it dog.mask.png or dog_mask.png"


def test_skip_invalid_runs_the_pictures_that_have_masks(tree: Tree, run_cli: Run) -> None:
    tree("p/a.jpg", "p/b.jpg", "masks/a.png")
    how = ("p", "--prompt", "x", "--region", "masks")
    assert "1 of 2 pictures without a mask: p/b.jpg" in run_cli("plan", *how).err
    ran = run_cli("plan", *how, "--skip-invalid")
    assert (ran.code, "1 job, " in ran.out) == (0, True)


def test_a_chain_of_edits_has_the_mask_of_its_first_picture(tree: Tree, run_cli: Run) -> None:
    tree("in/cat.jpg", "masks/cat.png")
    Path("jobs.jsonl").write_text(
        '{"custom_id": "c", "prompt": "x", "images": ["@b"]}\n'
        '{"custom_id": "b", "prompt": "x", "images": ["@a"]}\n'
        '{"custom_id": "a", "prompt": "x", "images": ["in/cat.jpg"]}\n'
    )
    assert run_cli("check", "jobs.jsonl", "--region", "masks").code == 0
    Path("masks/cat.png").rename("masks/dog.png")
    assert (
        "in/cat.jpg has no mask in masks" in run_cli("check", "jobs.jsonl", "--region", "masks").err
    )
