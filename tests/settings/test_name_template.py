"""Templates of names: what they may hold, what they give, and which of them may meet."""

import os
import re
import unicodedata
from pathlib import PurePosixPath
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hyimg_cli.settings.name_template import (
    FIELDS,
    clashes,
    fault_of,
    fill_template,
    fit,
    read_template,
    template_of,
)
from hyimg_cli.settings.values import BadValue

VALUES: dict[str, str | int] = {
    "custom_id": "cat-001",
    "stem": "IMG_12",
    "folder": "a/b",
    "index": 7,
    "seed": 42,
}
READ = read_template


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{custom_id}", "cat-001"),
        ("{stem}-{seed}", "IMG_12-42"),
        ("{folder}/{stem}", "a/b/IMG_12"),
        ("{index}", "7"),
        ("{index:04}-{seed:03d}", "0007-042"),
        ("{seed}/é {stem}", "42/é IMG_12"),
        ("{{{stem}}}", "{IMG_12}"),
        ("night", "night"),
        ("night//{stem}", "night/IMG_12"),
    ],
)
def test_what_a_template_gives(template: str, name: str) -> None:
    assert fill_template(READ(template), VALUES) == name


@pytest.mark.parametrize(
    ("template", "what", "hint"),
    [
        ("{steam}", "{steam} is not a field", "did you mean {stem}?"),
        ("{width}", "{width} is not a field", "its fields are"),
        ("{custom_id}-{height:04}", "{height:04} is not a field", "its fields are"),
        ("{}", "{} is not a field", "its fields are {custom_id}, {stem}"),
        ("{0}", "{0} is not a field", "its fields"),
        ("{stem.upper}", "is not a field", "{stem}"),
        ("{stem[0]}", "is not a field", "{stem}"),
        ("{stem!r}", "{stem!r} is not a field", "{index:04}"),
        ("{stem:>9}", "{stem:>9} is not a field", "{index:04}"),
        ("{index:,}", "{index:,} is not a field", "{index:04}"),
        ("{index:{seed}}", "{index:{seed} is not a field", "{index:04}"),
        ("{stem", "{stem is not a field", "{{"),
        ("stem}", "} is not a field", "{{"),
        ("../{stem}", "begins with a dot", "outputs"),
        ("a/../{stem}", "begins with a dot", "outputs"),
        ("./{stem}", "begins with a dot", "outputs"),
        (".{stem}", "begins with a dot", "outputs"),
        ("/tmp/{stem}", "a part of it is empty", "outputs"),
        ("{stem}/", "a part of it is empty", "outputs"),
        ("C:{stem}", 'it contains ":"', "outputs"),
        ("a\\{stem}", "which not every disk allows", "outputs"),
        ("{stem}?", 'it contains "?"', "outputs"),
        ("a\nb", "which not every disk allows", "outputs"),
        ("a\u202eb", "which not every disk allows", "outputs"),
        ("a./{stem}", "a folder in it ends with a dot", "outputs"),
        ("a.frames/{stem}", "named like a file of a run", "outputs"),
        ("a" * 201, "it is too long", "outputs"),
        ("a/" * 501 + "a", "it is too long", "outputs"),
        ("", "is empty", "name"),
        (7, "is not text", "name"),
    ],
)
def test_what_is_no_template(template: Any, what: str, hint: str) -> None:
    with pytest.raises(BadValue) as caught:
        READ(template)
    assert what in caught.value.what
    assert hint in caught.value.hint


def test_a_job_without_a_source_folder_leaves_no_slash() -> None:
    assert fill_template("{folder}/{stem}", VALUES | {"folder": ""}) == "IMG_12"
    assert fill_template("x/{folder}/{stem}", VALUES | {"folder": ""}) == "x/IMG_12"


def test_a_finished_name_can_be_a_template_of_itself() -> None:
    name = fill_template("{stem}-{index:05}", {"stem": "a{b}", "index": 64})
    assert name == fill_template(template_of(name), {}) == "a{b}-00064"


TEXTS = st.text(st.characters(exclude_characters="\0"), max_size=40)
# A file's stem, or the path of its folder, as a disk has them.
STEMS = TEXTS.filter(lambda text: text and "/" not in text)
TEMPLATES = st.lists(
    st.one_of(st.sampled_from([f"{{{name}}}" for name in FIELDS] + ["/", "..", "-", "{{"]), TEXTS),
    max_size=6,
).map("".join)


@given(TEMPLATES, STEMS, TEXTS)
@example("{folder}/{stem}", "..", "../..")
@example("{folder}{stem}", "b", "a/")
@example("{stem}", "\udce4", "")
@example("{stem}", "con\u202egnp", "")
def test_nothing_leads_out_of_the_outputs(template: str, stem: str, folder: str) -> None:
    """Whatever is written, and however the user's files are called."""
    values = VALUES | {"stem": fit(stem), "folder": fit(folder)}
    try:
        name = fill_template(READ(template), values)
    except BadValue:
        return
    if fault_of(name):
        return
    path = PurePosixPath("outputs") / f"{name}.png"
    assert os.path.normpath(path) == str(path)
    assert path.parts[0] == "outputs"
    assert not any(part.startswith(".") for part in path.parts)
    assert not set(name) & set('\0\\:*?"<>|\n\r\t')
    assert re.sub("[\u200c\u200d\U000e0020-\U000e007f]", "", name).isprintable()
    name.encode()
    assert all(len(part.encode()) < 220 for part in path.parts)


@given(STEMS)
@example("Foto ä (1)")
@example(unicodedata.normalize("NFD", "ä"))
def test_a_users_name_stays_where_it_can(stem: str) -> None:
    clean = fit(stem)
    assert fit(clean) == clean
    assert clean
    assert fault_of(clean) == ""
    if re.fullmatch(r"[\w(-][\w ()-]*[\w)-]", unicodedata.normalize("NFC", stem)):
        assert clean == unicodedata.normalize("NFC", stem)


@pytest.mark.parametrize(
    "name",
    [
        "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645",
        "\U0001f468\u200d\U0001f4bb",
        "\u0915\u094d\u200d\u0937",
    ],
)
def test_joiners_of_words_and_emoji_are_kept(name: str) -> None:
    assert fit(name) == name
    assert fault_of(name) == ""
    assert fit("\u200d\u200c") == "_"  # nothing to see


# --- names that meet ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "meet"),
    [
        ("a.png", "a.png", True),
        ("a.png", "A.PNG", True),
        ("straße.png", "STRASSE.png", True),
        ("\u00e4.png", "a\u0308.png", True),
        ("\u00c4.png", "a\u0308.png", True),
        ("a.png", "a.jpg", False),
        ("a1.png", "a2.png", False),
        ("a01.png", "a1.png", False),
    ],
)
def test_which_names_meet(a: str, b: str, meet: bool) -> None:
    assert list(clashes([a, b])) == ([(1, 0)] if meet else [])


PARTS = st.sampled_from(["a", "A", "1", "0", "-", "ß", "ss"])


@given(st.lists(st.lists(PARTS, min_size=1, max_size=4).map("".join), max_size=7))
def test_every_pair_that_meets_is_found(paths: list[str]) -> None:
    found = dict(clashes(paths))
    folded = [path.casefold() for path in paths]
    kept = [n for n in range(len(paths)) if n not in found]
    assert len({folded[n] for n in kept}) == len(kept) == len(set(folded))
    assert all(folded[later] == folded[earlier] for later, earlier in found.items())
    assert all(later > earlier for later, earlier in found.items())
