"""A tiny checkpoint, made by its recipe, through the commands."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_bagel

from hyimg_cli.doctor.models import image_checkpoint, image_memory
from hyimg_cli.media.images import read_image
from hyimg_cli.models import registry
from hyimg_cli.settings.run import ModelChoice, OutputConfig, RunConfig

from .conftest import noise_picture, pixels_of

SHORT = {"bot_task": "think", "max_new_tokens": 5}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny") / "bagel"
    tiny_bagel.write(folder)
    return str(folder)


@pytest.fixture
def manifest(write_manifest: Any, tmp_path: Path) -> str:
    noise_picture(tmp_path / "a.png", 70, 50)
    common = {"steps": 3, "seed": 1}
    lines: list[dict[str, Any]] = [
        {"custom_id": "new", "prompt": "a red house", "size": "96x64"},
        {"custom_id": "thought", "prompt": "a red house", "size": "96x64", **SHORT},
        {"custom_id": "edit", "prompt": "make it blue", "images": ["a.png"]},
        {"custom_id": "edit-2", "prompt": "make it red", "images": ["a.png"], **SHORT},
        {"custom_id": "kept", "prompt": "make it red", "images": ["a.png"], "keep_outside": True},
    ]
    return str(write_manifest(*[line | common for line in lines]))


def _lines(folder: Path) -> dict[str, Any]:
    found = map(json.loads, (folder / "results.jsonl").read_text().splitlines())
    return {line["custom_id"]: line for line in found}


def test_from_check_to_replay(run_cli: Any, manifest: str, tiny: str, tmp_path: Path) -> None:
    """All commands that one manifest goes through; pixels are equal alone and together."""
    assert run_cli("check", manifest, "--model", tiny).code == 0
    plan = run_cli("plan", manifest, "--model", tiny, "--json").json_lines[0]
    assert plan["total"]["denoise_steps"] == 5 * 2
    out, alone = tmp_path / "out", tmp_path / "alone"
    first = run_cli("generate", manifest, "--model", tiny, "-o", str(out), "--limit", "2")
    assert "2 done, 0 failed" in first.err
    rest = run_cli("generate", manifest, "--model", tiny, "-o", str(out))
    assert "3 done, 0 failed, 2 skipped" in rest.err
    apart = ("--batching-max-size", "1", "--no-prewarm", "--prefix-cache-mb", "0")
    run_cli("generate", manifest, "--model", tiny, "-o", str(alone), *apart)
    assert pixels_of(out) == pixels_of(alone)
    lines = _lines(out)
    assert len(lines) == 5
    assert {line["denoise_steps"] for line in lines.values()} == {2}
    assert [len(lines[n]["kv_reuse"]["branches"]) for n in ("new", "thought", "edit")] == [2, 3, 3]
    assert lines["new"]["kv_reuse"]["ar_decode_tokens"] == 0
    assert (lines["edit"]["outputs"][0]["width"], lines["edit"]["outputs"][0]["height"]) == (64, 96)
    kept = lines["kept"]
    assert (kept["outputs"][0]["width"], kept["outputs"][0]["height"]) == (50, 70)
    assert read_image(out / kept["edit"]["shown"]).pixels.shape == (64, 48, 3)
    assert kept["edit"]["kind"] == "global", "random weights keep nothing"
    again = ("--model", tiny, "-o", str(tmp_path / "again"))
    replayed = run_cli("replay", str(out / "outputs" / "edit.png"), *again)
    assert replayed.code == 0
    assert "equal" in replayed.err + replayed.out


def test_bench(run_cli: Any, write_manifest: Any, tiny: str, tmp_path: Path) -> None:
    line = {"custom_id": "a", "prompt": "a red house", "size": "32x32", "steps": 2, **SHORT}
    ran = run_cli(
        *("bench", "--compare", "kv-reuse", "--manifest", str(write_manifest(line))),
        *("--model", tiny, "--repeats", "1", "--steps", "3", "-o", str(tmp_path / "bench")),
    )
    assert ran.code == 0, ran.err


def test_doctor(tiny: str) -> None:
    """Its two checks of a picture model; the others are the machine's."""
    choice = ModelChoice(tiny, device="cpu")
    subject = RunConfig(OutputConfig(Path("out")), model=choice)
    found = image_checkpoint(subject)
    assert "complete, 1.7 M weights (model" in found.found
    assert image_memory(subject).status == "ok"


def test_fields_of_guidance(run_cli: Any, write_manifest: Any, tiny: str) -> None:
    """They are read by BAGEL, and refused where nothing reads them: in a line, or by a flag."""
    own = {
        "image_guidance_scale": 2.5,
        "guidance_interval": [0.2, 0.9],
        "guidance_renorm": "channel",
        "guidance_renorm_min": 0.5,
    }
    manifest = str(write_manifest({"custom_id": "a", "prompt": "a house", **own}))
    assert run_cli("check", manifest, "--model", tiny).code == 0
    refused = run_cli("check", manifest)
    assert refused.code == 2
    assert "4 faults" in refused.err
    assert all(f"jobs.jsonl:1: {name}" in refused.err for name in own)
    plain = str(write_manifest({"custom_id": "a", "prompt": "a house"}))
    by_flag = run_cli("check", plain, "--guidance-interval", "0.2,0.9")
    assert by_flag.code == 2
    assert "flag: guidance_interval" in by_flag.err
    assert run_cli("check", plain, "--model", tiny, "--guidance-interval", "0.9,0.2").code == 2


def test_edits_and_new_pictures_have_other_defaults(tiny: str) -> None:
    card = registry.model_card(tiny)
    assert card.edit_defaults is not None
    assert (card.defaults.guidance_renorm, card.edit_defaults.guidance_renorm) == (
        "global",
        "text_channel",
    )
    assert (card.defaults.image_guidance_scale, card.edit_defaults.image_guidance_scale) == (1.5, 2)


def test_experts_that_the_model_has_not_do_not_wait_in_main_memory(
    run_cli: Any, manifest: str, tiny: str
) -> None:
    found = run_cli("plan", manifest, "--model", tiny, "--offload-experts", "--device", "cuda")
    assert found.code == 2
    assert "only routed experts can be offloaded or quantized" in found.err
