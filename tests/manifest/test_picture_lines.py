"""Lines that ask for pictures of a model that cannot make them: a fault of the line."""

from dataclasses import replace

import pytest

from hyimg_cli.manifest.manifest import manifest_of
from hyimg_cli.manifest.resolve import resolve_jobs
from hyimg_cli.settings.config import Setting
from hyimg_cli.spec.card import ModelCard


@pytest.mark.parametrize(
    ("suffix", "data", "bad"),
    [
        (".txt", "make it red\nmake it blue\n", [1, 2]),
        (".csv", "prompt,images\nred,a.png\nblue,\n", [3]),
        (".tsv", "prompt\nred\n", [2]),
        (".jsonl", '{"prompt": "x"}\n{"prompt": "x", "task": "t2i"}\n', [1, 2]),
        (".jsonl", '{"prompt": "x", "matrix": {"seed": [1, 2]}}\n', [1]),
        (".jsonl", '{"url": "/v1/images/generations", "body": {"prompt": "x"}}\n', [1]),
    ],
)
def test_a_line_without_a_picture_is_a_fault_for_a_model_that_only_edits(
    card: ModelCard, settings: dict[str, Setting], suffix: str, data: str, bad: list[int]
) -> None:
    manifest = manifest_of(data.encode(), f"jobs{suffix}", suffix=suffix)
    only_edits = replace(card, fewest_images=1)
    _, faults = resolve_jobs(manifest, settings, lambda model: only_edits)
    assert {one.code for one in faults} == {"manifest.task"}
    lines = {int(one.where.split(":")[1].split(" ")[0]) for one in faults}
    assert lines == set(bad)
    assert all(one.where.endswith(": task") for one in faults)
