"""A file's id depends on its name alone, is valid on any disk, and is unique."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyimg_cli.manifest.source_ids import ids_of_files, in_id, names_of_files
from hyimg_cli.media.kinds import SUFFIXES
from hyimg_cli.settings.kinds import is_custom_id
from hyimg_cli.settings.name_template import fault_of, fold_name

ENDINGS = sorted({suffix for one in SUFFIXES for suffix in (one, one.upper())})
# What is hard: case, marks, digests, accents, dots, bytes that are no text, what looks like ids.
PIECES = st.sampled_from(
    (
        *("cat", "Cat", "a", "b", "a_b", "-", ".", " ", "ä", "a\u0308", "日本", "\udcff", "\n"),
        *("-png", ".png", "-webp", "-0123456789", "IMG_0001", "x" * 70, "(1)", "😀", "~", "'"),
    )
)
PARTS = st.lists(PIECES, min_size=1, max_size=3).map("".join).filter(lambda part: part != "..")
NAMES = st.builds(
    lambda folders, stem, suffix: "/".join([*folders, stem + suffix]),
    st.lists(PARTS.filter(lambda part: part != "."), max_size=3),
    PARTS,
    st.sampled_from(ENDINGS),
)
FILES = st.lists(NAMES, unique=True, max_size=12)


def ids(*names: str) -> list[str]:
    found = ids_of_files(names, SUFFIXES)
    return [found[name] for name in names]


@given(FILES)
def test_ids_are_fit_and_no_other_files(names: list[str]) -> None:
    found = ids_of_files(names, SUFFIXES)
    assert found.keys() == set(names)
    assert all(is_custom_id(name) for name in found.values())
    assert len({name.casefold() for name in found.values()}) == len(names)


@given(FILES, st.data())
def test_ids_stay_when_files_come_or_go(names: list[str], data: st.DataObject) -> None:
    """All but those of names that differ from an earlier one in case only."""
    some = data.draw(st.lists(st.sampled_from(names), unique=True) if names else st.just([]))
    whole, part = ids_of_files(names, SUFFIXES), ids_of_files(some, SUFFIXES)
    in_any_case = [name.casefold() for name in names]
    for name in some:
        if in_any_case.count(name.casefold()) == 1:
            assert part[name] == whole[name]


def names(*files: str, recorded: Mapping[str, str] | None = None) -> list[str]:
    found = names_of_files(ids_of_files(files, SUFFIXES), recorded or {})
    return [found[file] for file in files]


@given(FILES)
def test_results_have_names_of_their_own_that_any_disk_takes(files: list[str]) -> None:
    found = names(*files)
    assert not [name for name in found if fault_of(name)]
    assert len({fold_name(name) for name in found}) == len(files)


@given(FILES, st.data())
def test_names_of_results_that_are_there_stay(files: list[str], data: st.DataObject) -> None:
    """Whichever pictures came first; those that come later get other names."""
    ids = ids_of_files(files, SUFFIXES)
    some = data.draw(st.lists(st.sampled_from(files), unique=True) if files else st.just([]))
    first = names_of_files({file: ids[file] for file in some}, {})
    later = names_of_files(ids, {ids[file]: name for file, name in first.items()})
    assert {file: later[file] for file in some} == first
    assert len({fold_name(name) for name in later.values()}) == len(files)


def test_results_are_called_as_people_called_their_pictures() -> None:
    assert names("Größe A\u0308.png", "Foto ä (1).jpg", "日本/b c.webp", "red-circle.png") == [
        *("Größe \u00c4", "Foto ä (1)", "日本/b c", "red-circle")
    ]
    assert names('a"b?.jpg', "-rf.jpg", "x/-y.jpg", "tab\there.jpg") == [
        *("a_b_", "_rf", "x/_y", "tab_here")
    ]
    assert names("Tom & Jerry's $5;.jpg", "`ls`!.jpg", "con.jpg", "a/NUL.x.jpg", "cone.jpg") == [
        *("Tom _ Jerry_s _5_", "_ls__", "con_", "a/NUL_.x", "cone")
    ]
    assert names("a&b.jpg", "a;b.jpg")[0].startswith("a_b-jpg-")
    assert names("cat.jpg", "cat.png", "Cat.webp", "CAT.JPG") == [
        *("cat-jpg", "cat-png", "Cat-webp", "CAT")
    ]
    (long,) = names(f"{'ä' * 150}.jpg")
    assert len(long) < 100


def test_names_of_an_earlier_version_and_of_several_results_stay() -> None:
    (own,) = ids("Größe.png")
    assert names("Größe.png", recorded={own: own}) == [own]
    assert names("Größe.png", recorded={f"{own}-0": "Größe-0", f"{own}-1": "Größe-1"}) == ["Größe"]
    assert names("a.jpg", "a.png", recorded={"a-png": "a"}) == ["a-jpg", "a"]
    assert names("a.jpg", recorded={"another": "A"}) == ["a-jpg"]


@given(FILES)
def test_their_order_does_not_matter(names: list[str]) -> None:
    assert ids_of_files(names, SUFFIXES) == ids_of_files(reversed(names), SUFFIXES)


def test_names_stay_readable() -> None:
    assert ids("cat.jpg", "cat.png", "IMG_0001.JPG", "a/b.jpg", "a_b.jpg", "v1.2.jpg") == [
        *("cat", "cat-png", "IMG_0001", "a/b", "a_b", "v1.2")
    ]
    (photo,) = ids("Foto ä (1).jpg")
    assert photo.startswith("Foto-a-1-")
    (nameless,) = ids("日本.webp")
    assert nameless.startswith("x-")
    (folder,) = ids("2024.05/é/cat.jpg")
    assert folder.startswith("2024-05-")
    assert folder.endswith("/cat")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Foto ä.jpg", "Foto a.jpg"),
        ("Foto ä.jpg", "Foto a\u0308.jpg"),
        ("cat.png", "cat-png.jpg"),
        ("cat.jpg", "Cat.JPG"),
        ("a b/c.jpg", "a-b/c.jpg"),
        ("a.b/c.jpg", "a b/c.jpg"),
        (f"{'x' * 200}.jpg", f"{'x' * 201}.jpg"),
        (f"{'d/' * 60}a.jpg", f"{'d/' * 61}a.jpg"),
    ],
)
def test_likely_twins_are_told_apart(one: str, other: str) -> None:
    mine, others = ids(one, other)
    assert mine.casefold() != others.casefold()


def test_the_id_that_another_files_digest_makes_is_taken() -> None:
    (made,) = ids("ä.jpg")
    assert len({*ids("ä.jpg", f"{made}.jpg")}) == 2


def test_a_text_in_an_id() -> None:
    assert in_id("2.5") == "2.5"
    assert in_id("16:9") != in_id("16-9") == "16-9"
    assert is_custom_id(in_id("\udcff" * 300))
