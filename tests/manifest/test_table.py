"""A table's rows are the jobs that the same JSON lines are; each fault is at its record's line."""

import csv
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyimg_cli.manifest.manifest import Manifest, failed_lines, read_manifest
from hyimg_cli.manifest.table import read_table
from hyimg_cli.spec.job import SizeRequest

Read = Callable[..., Manifest]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Reads a text or bytes as jobs.csv, or by another name."""

    def of(text: str | bytes, name: str = "jobs.csv") -> Manifest:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_manifest(path)

    return of


def found(manifest: Manifest) -> list[tuple[str, str]]:
    return [(one.code.removeprefix("manifest."), one.where) for one in manifest.faults]


def fields(manifest: Manifest) -> list[dict[str, Any]]:
    assert not manifest.faults, [str(one) for one in manifest.faults]
    return [line.fields for line in manifest.lines]


def test_cells_are_typed_by_their_fields(read: Read) -> None:
    header = "id,prompt,images,seed,size,guidance_scale,drop_think,bot_task,seeds,n,metadata,x_a"
    rows = (
        'a,"make it red, please",in/a.png; in/b.png ,7,64:64,2.5,yes,think,,,"{""sku"": 1}",A17',
        "b,5,,,,,,,1;2 3,,some text,",
    )
    manifest = read("\n".join((header, *rows)))
    first, second = manifest.lines
    like = {"id": "a", "prompt": "make it red, please", "images": ["in/a.png", "in/b.png"]}
    like |= {"seed": 7, "size": "64:64", "guidance_scale": 2.5, "drop_think": True}
    like |= {"bot_task": "think", "metadata": {"sku": 1}}
    (same,) = fields(read(json.dumps(like), "jobs.jsonl"))
    assert first.fields == same
    assert first.extra_json == '{"x_a": "A17"}'
    assert second.fields["prompt"] == "5"
    assert second.fields["seeds"] == (1, 2, 3)
    assert second.fields["metadata"] == '"some text"'
    assert not {"images", "seed", "n"} & second.given


def test_what_spreadsheets_write(read: Read) -> None:
    expected = [("ä; b", 1), ("c\nd", 2)]
    comma = '\ufeffprompt,seed,\r\n"ä; b",1,\r\n,,\r\n"c\nd",2,\r\n'
    semicolon = '\ufeffprompt;seed\r\n"ä; b";1\r\n;\r\n"c\nd";2\r\n'
    tab = 'prompt\tseed\nä; b\t1\n\n"c\nd"\t2'
    for text, name in ((comma, "a.csv"), (semicolon, "a.CSV"), (tab, "a.tsv")):
        manifest = read(text, name)
        assert [(line["prompt"], line["seed"]) for line in fields(manifest)] == expected
        assert [line.line_number for line in manifest.lines] == [2, 4]
    assert manifest.lines[1].fields["custom_id"] == "a-0004"


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        # where the decimal separator is a comma
        ("prompt;guidance_scale\nx;2,5\n", "a.csv", {"guidance_scale": 2.5}),
        ("prompt;guidance_scale\nx;1,500\n", "a.csv", {"guidance_scale": 1.5}),
        (
            "prompt;flow_shift;temperature\nx;3,0;,7\n",
            "a.csv",
            {"flow_shift": 3, "temperature": 0.7},
        ),
        ("prompt\tguidance_scale\nx\t2,5\n", "a.tsv", {"guidance_scale": 2.5}),
        ('prompt;seeds\nx;"1,2"\n', "a.csv", {"seeds": (1, 2)}),
        ("prompt;steps\nx;42,0\n", "a.csv", {"num_inference_steps": 42}),
        # pandas: a column of numbers with an empty cell, and the numbers of the rows
        ("prompt,seed\nx,42.0\n", "a.csv", {"seed": 42}),
        (",prompt,seeds\n0,x,1.0 2.0\n", "a.csv", {"seeds": (1, 2)}),
        ("Unnamed: 0,prompt,width,height\n0,x,64.0,64.0\n", "a.csv", {"size": SizeRequest(64, 64)}),
        # a spreadsheet program's own line
        ("sep=;\nprompt;seed\nx;1\n", "a.csv", {"seed": 1}),
        ('"sep=\t"\r\nprompt\tseed\r\nx\t1\r\n', "a.csv", {"seed": 1}),
        ("prompt\tseed\nx\t1\n", "a.csv", {"seed": 1}),
        ("prompt;seed\nx;1\n", "a.tsv", {"seed": 1}),
        # tables that were joined
        ("prompt,seed\nx,1\n\ufeffPrompt,seed\n", "a.csv", {"seed": 1}),
    ],
)
def test_tables_as_programs_write_them(
    read: Read, text: str, name: str, expected: dict[str, Any]
) -> None:
    manifest = read(text, name)
    (only,) = fields(manifest)
    assert only.items() >= expected.items()
    assert manifest.lines[0].line_number == text[: text.index("x")].count("\n") + 1


def test_columns_are_known_in_any_case(read: Read) -> None:
    manifest = read("Custom ID,Prompt,IMAGE,x_Shelf\na,make it red,a.png,A17\n")
    (line,) = manifest.lines
    assert line.fields == {
        "custom_id": "a", "prompt": "make it red", "images": ("a.png",), "task": "it2i"
    }  # fmt: skip
    assert line.extra_json == '{"x_Shelf": "A17"}'
    assert found(read("Prompt,prompt\nx,y\n"))[0][0] == "duplicate-field"


def test_a_columns_fault_is_of_the_whole_file(read: Read) -> None:
    manifest = read("prompt,sede\nx,\n,\ny,1\n")
    (fault,) = manifest.faults
    assert "seed" in fault.hint
    assert failed_lines(manifest, manifest.faults) == {}
    row = read("custom_id,prompt,seed\na,x,y\n")
    assert failed_lines(row, row.faults) == {"a": list(row.faults)}


@given(st.text(max_size=60), st.sampled_from([",", "\t"]))
def test_no_text_raises(text: str, delimiter: str) -> None:
    for table in (text, f"prompt{delimiter}seed\n{text}"):
        list(read_table(table.encode("utf-8", "surrogatepass"), "t", delimiter, []))


@given(st.lists(st.text(min_size=1).filter(str.strip), min_size=1, max_size=5))
def test_whatever_csv_writes_comes_back(prompts: list[str]) -> None:
    out = io.StringIO(newline="")
    writer = csv.writer(out)
    writer.writerows([["prompt", "seed"], *([prompt, 1] for prompt in prompts)])
    try:
        data = out.getvalue().encode()
    except UnicodeEncodeError:
        return
    found = list(read_table(data, "t", ",", []))
    fit = [None if "\0" in prompt else prompt for prompt in prompts]
    assert [line.fields.get("prompt") for _, line in found] == fit
    lines, numbers = re.split("\r\n|\r|\n", out.getvalue()), [number for number, _ in found]
    assert numbers == sorted(set(numbers))
    assert all(1 < number <= len(lines) for number in numbers)


def test_a_long_cell(read: Read) -> None:
    text = "word " * 100_000
    assert fields(read(f"prompt\n{text}\n"))[0]["prompt"] == text
