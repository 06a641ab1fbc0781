"""Prompts of the command line and of files with a prompt per line."""

from pathlib import Path

import pytest

from hyimg_cli.manifest.edits import manifest_of_prompts, prompts_of
from hyimg_cli.manifest.manifest import read_manifest

SEPARATORS = "\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e"


@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n", "\n\ufeff", " \r\n\t"])
def test_a_file_of_prompts_has_the_same_jobs_both_ways(tmp_path: Path, end: str) -> None:
    prompts = [f"a{mark}b" for mark in SEPARATORS] + ["last\r one"]
    path = tmp_path / "prompts.txt"
    path.write_bytes(f"\ufeff{end.join(prompts)}{end}".encode())
    given = manifest_of_prompts(None, prompts_of([str(path)]))
    assert [line.fields["prompt"] for line in given.lines] == prompts
    assert [line.fields["prompt"] for line in read_manifest(path).lines] == prompts
    assert not given.faults
