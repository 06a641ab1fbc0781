"""A family is a folder and a record: one registration adds a new one, and every command works
with it.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_family
from safetensors.torch import save_file

from hyimg_cli.models import registry

WORDS = ("a red ball", "a red barn", "a blue ball")


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A checkpoint of the family, which is known for as long as the test runs."""
    monkeypatch.setattr(registry, "_REGISTERED", [])
    registry.register(toy_family.TOY)
    folder = tmp_path / "toy"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "toy"}')
    rows, width = toy_family.END + 1, toy_family.WIDTH
    table = torch.randn(rows, width, generator=torch.Generator().manual_seed(0))
    save_file({"table": table}, folder / "model.safetensors")
    return str(folder)


@pytest.fixture
def manifest(write_manifest: Any) -> str:
    lines = [{"custom_id": f"j{n}", "prompt": text, "seed": n} for n, text in enumerate(WORDS)]
    lines.append({**lines[0], "custom_id": "silent", "bot_task": "none"})
    return str(write_manifest(*lines))


def _results(folder: Path) -> dict[str, Any]:
    lines = map(json.loads, (folder / "results.jsonl").read_text().splitlines())
    return {line["custom_id"]: line for line in lines}


def test_check_and_plan(run_cli: Any, manifest: str, toy: str) -> None:
    assert run_cli("check", manifest, "--model", toy).code == 0
    planned = run_cli("plan", manifest, "--model", toy, "--json").json_lines[0]
    assert planned["total"]["jobs"] == 4


def test_pictures_are_made_resumed_and_equal_alone(
    run_cli: Any, manifest: str, toy: str, tmp_path: Path
) -> None:
    first = run_cli("generate", manifest, "--model", toy, "-o", str(tmp_path / "o"), "--limit", "2")
    assert "2 done, 0 failed" in first.err
    rest = run_cli("generate", manifest, "--model", toy, "-o", str(tmp_path / "o"))
    assert "2 done, 0 failed, 2 skipped" in rest.err
    alone = ("--batching-max-size", "1", "--no-prewarm", "--prefix-cache-mb", "0")
    run_cli("generate", manifest, "--model", toy, "-o", str(tmp_path / "alone"), *alone)
    together, apart = _results(tmp_path / "o"), _results(tmp_path / "alone")
    assert len(together) == 4
    for name, line in together.items():
        assert line["outputs"][0]["pixel_sha256"] == apart[name]["outputs"][0]["pixel_sha256"]
        assert line["cot_token_ids"] == apart[name]["cot_token_ids"]
    assert together["j0"]["kv_reuse"]["status"] in ("hit", "partial")
    assert together["silent"]["kv_reuse"]["status"] == "none"


def test_bench(run_cli: Any, manifest: str, toy: str, tmp_path: Path) -> None:
    ran = run_cli(
        *("bench", "--compare", "kv-reuse", "--manifest", manifest, "--model", toy),
        *("--repeats", "1", "-o", str(tmp_path / "bench")),
    )
    assert ran.code == 0, ran.err


def test_a_negative_prompt_is_of_families_that_have_one(
    run_cli: Any, write_manifest: Any, toy: str, tmp_path: Path
) -> None:
    line = {"custom_id": "plain", "prompt": "a red ball", "seed": 1}
    against = {**line, "custom_id": "against", "negative_prompt": "blur"}
    lines = str(write_manifest(line, against))
    run_cli("generate", lines, "--model", toy, "-o", str(tmp_path / "o"))
    plain, held = _results(tmp_path / "o").values()
    assert plain["outputs"][0]["pixel_sha256"] != held["outputs"][0]["pixel_sha256"]
    alone = str(write_manifest({**line, "custom_id": "against"}))
    flag = ("--negative-prompt", "blur")
    again = run_cli("generate", alone, "--model", toy, *flag, "-o", str(tmp_path / "o"))
    assert "0 done, 0 failed, 1 skipped" in again.err


@pytest.mark.parametrize("task", [{}, {"task": "t2i"}])
def test_a_family_without_a_negative_prompt_says_why(
    run_cli: Any, write_manifest: Any, task: dict[str, str]
) -> None:
    line = {"prompt": "a red ball", **task}
    refused = run_cli("check", str(write_manifest({**line, "negative_prompt": "blur"})))
    assert refused.code == 2
    why = "it guides away from an empty prompt"
    assert f"tiny-image does not follow negative_prompt: {why}" in refused.err
    assert "video" not in refused.err
    assert "t2v" not in refused.err
    # Of a whole run it may be meant for other lines.
    noted = run_cli("check", str(write_manifest(line)), "--negative-prompt", "blur")
    assert noted.code == 0
    assert (
        "note: --negative-prompt applies to models that take a negative prompt only;" in noted.err
    )
