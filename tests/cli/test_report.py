"""`hyimg report`: the page of folders in any state, as files or as one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from report.folders import asked, done, picture, write_run
from report.test_run_page import index

from hyimg_cli.journal.journal import RunFolder

Run = Callable[..., Any]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    picture(tmp_path / "in.png", 1)
    picture(tmp_path / "out/outputs/a.png", 2)
    return write_run(tmp_path / "out", [done("a")], [asked("a"), asked("b")])


def test_it_makes_the_page_of_a_folder(run_cli: Run, out: Path) -> None:
    ran = run_cli("report", out)
    assert (ran.code, ran.out, ran.err) == (0, "", f"report: {out}/report.html\n")
    assert (index(out)["left"], index(out)["running"]) == (1, False)
    assert run_cli("report", out, "-q").err == ""


def test_of_a_run_that_goes_on_it_says_so_and_leaves_it_alone(run_cli: Run, out: Path) -> None:
    with RunFolder(out) as folder:
        assert run_cli("report", out).code == 0
        assert index(out)["running"]
        folder.confirm()
    run_cli("report", out)
    assert not index(out)["running"]


def test_one_file_goes_where_it_is_wanted(run_cli: Run, out: Path, tmp_path: Path) -> None:
    assert run_cli("report", out, "--single-file").code == 0
    page = (out / "report-single.html").read_bytes()
    assert b"data:image/png" in page
    assert not (out / "report").exists()
    ran = run_cli("report", out, "--single-file", "-o", tmp_path / "page.html")
    assert (ran.code, (tmp_path / "page.html").read_bytes()) == (0, page)
    run_cli("report", out, "--single-file", "--max-mb", "0", "-o", tmp_path / "page.html")
    assert "2 pictures were left out" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["nowhere"], 2, "this is not the output folder of a run"),
        (["."], 2, "this is not the output folder of a run"),
        (["s3://bucket/run"], 2, "hyimg merge s3://bucket/run -o FOLDER"),
        (["out", "-o", "page.html"], 2, "add --single-file"),
        (["out", "--single-file", "-o", "nowhere/page.html"], 3, "the folder does not exist"),
    ],
)
def test_what_cannot_be_done_is_said(
    run_cli: Run, out: Path, arguments: list[str], code: int, says: str
) -> None:
    ran = run_cli("report", *arguments)
    assert ran.code == code
    assert says in ran.err
