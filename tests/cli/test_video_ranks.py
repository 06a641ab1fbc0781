"""--vae-patch-parallel-size and --cfg-parallel-size through the command: the same pixels and keys,
what each rank did, and what the plan says beforehand.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

Run = Callable[..., Any]
Write = Callable[..., Path]
VAE, CFG = "--vae-patch-parallel-size", "--cfg-parallel-size"


@pytest.fixture
def manifest(write_manifest: Write) -> Path:
    """Four tiles; two, and one branch; one tile."""
    base = {"task": "t2v", "prompt": "a dog", "num_inference_steps": 2, "num_frames": 1}
    return write_manifest(
        base | {"custom_id": "four", "size": "320x288"},
        base | {"custom_id": "two", "size": "48x272", "num_frames": 5, "guidance_scale": 1},
        base | {"custom_id": "one", "size": "96x64"},
    )


@pytest.mark.thorough
def test_pixels_do_not_depend_on_the_ranks(run_cli: Run, manifest: Path, tmp_path: Path) -> None:
    alone = run_cli("generate", manifest, "-o", "alone", "--no-prewarm", "--json")
    assert alone.code == 0, alone.err
    spread = run_cli("generate", manifest, "-o", "spread", VAE, "2", CFG, "2", "--json")
    assert spread.code == 0, spread.err
    assert not dist.is_initialized()
    assert "2 ranks" in spread.err
    plain, found = (
        {line["custom_id"]: line for line in ran.json_lines[:-1]} for ran in (alone, spread)
    )
    for name, line in plain.items():
        assert line["parallel"] is None
        assert found[name]["key"] == line["key"]
        assert found[name]["outputs"][0]["pixel_sha256"] == line["outputs"][0]["pixel_sha256"]
    assert [found[name]["parallel"]["branch_ranks"] for name in plain] == [2, 1, 2]
    assert found["one"]["parallel"]["decode"] is None
    (group, *_) = run_cli("plan", manifest, VAE, "2", "--force", "--json").json_lines[0]["groups"]
    told, ranks = group["decode"], found["four"]["parallel"]["decode"]["ranks"]
    assert [one["area"] for one in ranks] == [share["area"] for share in told["shares"]]
    assert [one["tiles"] for one in ranks] == [len(share["tiles"]) for share in told["shares"]]
    assert ranks[0]["received_bytes"] == told["received_bytes"] > 0
    assert all(one["busy_s"] > 0 for one in ranks)
    timings = found["four"]["timings_s"]
    assert max(one["busy_s"] for one in ranks) <= timings["decode_latents"]
    parts = sum(seconds for phase, seconds in timings.items() if phase != "total")
    assert parts == pytest.approx(timings["total"], abs=1e-4)
    flags = json.loads((tmp_path / "spread" / "run.json").read_text())["flags"]
    assert flags["vae_patch_parallel_size"] == {"value": 2, "origin": "flag"}
    # A folder that was begun with ranks goes on without them.
    again = run_cli("generate", manifest, "-o", "spread", "--json")
    assert again.json_lines[-1]["summary"]["skipped"] == 3


def test_the_plan_says_what_ranks_can_save(run_cli: Run, write_manifest: Write) -> None:
    line = {"task": "t2v", "prompt": "a dog", "size": "848x480", "num_frames": 121}
    path = write_manifest(line, line | {"size": "1280x720"}, line | {"guidance_scale": 1})
    *_, last = groups(run_cli("plan", path, VAE, "4", "--json"))
    assert last["decode"]["speed_up_limit"] == pytest.approx(3.8, abs=0.03)
    first, *_ = groups(run_cli("plan", path, VAE, "4", CFG, "2", "--json"))
    decode = first["decode"]
    assert (decode["down"], decode["across"], len(decode["shares"])) == (3, 5, 4)
    assert decode["speed_up_limit"] == pytest.approx(3.8, abs=0.03)
    assert sum(share["area"] for share in decode["shares"]) > 30 * 53
    assert (first["branches"], first["branch_ranks"]) == (2, 2)
    single = groups(run_cli("plan", path, "--json"))[0]
    assert (single["decode"]["speed_up_limit"], single["branch_ranks"]) == (1, 1)
    assert single["decode"]["received_bytes"] == 0
    text = run_cli("plan", path, VAE, "4", CFG, "2").out
    assert "decode on 4 ranks: " in text
    assert "speed-up limit 3.8" in text
    assert "guidance: 2 branches on 2 ranks" in text
    one_branch = run_cli("plan", write_manifest(line | {"guidance_scale": 1}), CFG, "2").out
    assert "guidance: 1 branch on 1 rank" in one_branch


def groups(ran: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ran.json_lines[0]["groups"]
    return found


@pytest.mark.parametrize(
    "flags", [(CFG, "3"), (CFG, "0"), (VAE, "0"), (VAE, "65"), (VAE, "two"), (VAE, "-1")]
)
def test_nonsense_is_refused(run_cli: Run, manifest: Path, flags: tuple[str, str]) -> None:
    for command in ("check", "plan", "generate"):
        ran = run_cli(command, manifest, *flags)
        assert (ran.code, ran.out) == (2, "")
        assert flags[0] in ran.err


def test_a_recipe_and_the_environment_ask_for_ranks(
    run_cli: Run, manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "ranks.toml"
    recipe.write_text("[parallel]\nvae_patch_parallel_size = 2\ncfg_parallel_size = 2\n")
    monkeypatch.setenv("HYIMG_VAE_PATCH_PARALLEL_SIZE", "3")
    first = groups(run_cli("plan", manifest, "--recipe", recipe, "--json"))[0]
    assert (len(first["decode"]["shares"]), first["branch_ranks"]) == (3, 2)
