"""The page of errors has a row for each code of the package, and none for another."""

import re
from pathlib import Path

from error_codes import error_codes

PAGE = Path(__file__).parents[1] / "docs" / "errors.md"


def rows() -> list[tuple[list[str], str, str]]:
    """The codes, cause and remedy of each row of the page's tables."""
    cells = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return [(re.findall(r"`([^`]+)`", codes), cause, remedy) for codes, cause, remedy in cells]


def test_the_page_has_a_row_for_each_code_and_no_other() -> None:
    certain, by_value = error_codes()
    on_page = [code for codes, _, _ in rows() for code in codes]
    assert len(on_page) == len(set(on_page))
    assert not sorted(certain - set(on_page))
    assert not [codes for codes in by_value if codes.isdisjoint(on_page)]
    beforehand = {code.replace("job.", "manifest.") for code in certain if code.startswith("job.")}
    assert not sorted(set(on_page) - certain - beforehand - set().union(*by_value))


def test_each_row_says_a_cause_and_what_to_do() -> None:
    for codes, cause, remedy in rows():
        assert codes
        assert len(cause.split()) > 2
        assert len(remedy.rstrip(" |")) > 2
