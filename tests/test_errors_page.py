"""The pages of errors have a row for each code of the package, and the index names its page."""

import re
from pathlib import Path
from typing import Any

import pytest
from error_codes import error_codes

DOCS = Path(__file__).parents[1] / "docs"
PAGES = {path.name: path.read_text() for path in DOCS.glob("errors-*.md")}


def rows(page: str) -> list[tuple[list[str], str, str]]:
    """The codes, cause and remedy of each row of a page's tables."""
    cells = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    return [(re.findall(r"`([^`]+)`", codes), cause, remedy) for codes, cause, remedy in cells]


ROWS = [(name, *row) for name, page in PAGES.items() for row in rows(page)]


def test_the_pages_have_a_row_for_each_code_and_no_other() -> None:
    certain, by_value = error_codes()
    listed = [code for _, codes, _, _ in ROWS for code in codes]
    assert len(listed) == len(set(listed))
    assert not sorted(certain - set(listed))
    assert not [codes for codes in by_value if codes.isdisjoint(listed)]
    beforehand = {code.replace("job.", "manifest.") for code in certain if code.startswith("job.")}
    assert not sorted(set(listed) - certain - beforehand - set().union(*by_value))


def test_the_index_names_the_page_of_each_code() -> None:
    index = (DOCS / "errors.md").read_text()
    cells = re.findall(r"^\| (`.+`) \| \[.*\]\(([\w-]+\.md)(?:#[\w-]+)?\) \|$", index, re.M)
    indexed = {(root, page) for roots, page in cells for root in re.findall(r"`([^`]+)`", roots)}
    assert indexed == {(code.split(".")[0], page) for page, codes, _, _ in ROWS for code in codes}


def test_each_row_says_a_cause_and_what_to_do() -> None:
    for _, codes, cause, remedy in ROWS:
        assert codes
        assert len(cause.split()) > 2
        assert len(remedy.rstrip(" |")) > 2


def test_explain_prints_the_row_of_each_code(run_cli: Any) -> None:
    codes = [code for _, codes, _, _ in ROWS for code in codes]
    rows = run_cli("explain", *codes, "--json").json_lines
    assert [row["code"] for row in rows] == codes
    assert all(len(row["cause"].split()) > 2 and row["remedy"] and row["group"] for row in rows)
    assert not [row for row in rows if "](" in row["remedy"] or "`" in row["cause"]]
    listed = [line[2:] for line in run_cli("explain").out.splitlines() if line[:2] == "  "]
    assert sorted(listed) == sorted(codes)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("error[job.size]:", "job.size: "),
        ("[job.size]", "job.size: "),
        ("JOB.SIZE", "job.size: "),
        ("lora", "lora.missing: "),
        ("job.sise", "did you mean job.size?"),
        ("machine.size", "did you mean job.size or manifest.size?"),
        ("everything is wrong", "hyimg explain lists all codes"),
        ("", "hyimg explain lists all codes"),
    ],
)
def test_explain_takes_a_code_as_messages_show_it(run_cli: Any, word: str, said: str) -> None:
    ran = run_cli("explain", word)
    assert said in ran.out + ran.err
    assert ran.code == (0 if said.endswith(": ") else 2)
