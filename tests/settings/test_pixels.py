"""Every setting that is declared to change no pixel, run at two values: the pixels are the same."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hyimg_cli.cli import app
from hyimg_cli.settings.table import SETTINGS, TABLES

SOURCE = Path(__file__).parents[2] / "recipes" / "quickstart" / "red-circle.png"
# Two edits of one picture share a prefix; the third picture has no text, and another batch.
PICTURES: tuple[dict[str, Any], ...] = (
    {"custom_id": "edit", "prompt": "make the circle blue", "images": ["circle.png"], "n": 2},
    {"custom_id": "plain", "prompt": "a red square", "bot_task": "none"},
)
VIDEOS: tuple[dict[str, Any], ...] = (
    {"custom_id": "video", "task": "t2v", "prompt": "a red square moves left", "num_frames": 5},
)
MANIFESTS = {
    "pictures": PICTURES,
    "videos": VIDEOS,
    "latents": VIDEOS,
    None: (PICTURES[1], *VIDEOS),
}
COMMON = {
    "device": "cpu",
    "num_inference_steps": "2",
    "max_new_tokens": "6",
    "prewarm": "off",
    "seed": "3",
    "fps": "8",
}
# A value off that of the first run, with what else makes it matter.
OTHER: dict[str, dict[str, str]] = {
    "allow_model": {"allow_model": "other"},
    "require_kv_reuse": {"require_kv_reuse": "on"},
    "prompt_cache": {"prompt_cache": "off"},
    "batching_max_size": {"batching_max_size": "1"},
    "prefix_cache_mb": {"prefix_cache_mb": "0"},
    "prefix_cache_host_mb": {"prefix_cache_host_mb": "100", "prefix_cache_mb": "0"},
    "prewarm": {"prewarm": "on"},
    "memory_gb": {"memory_gb": "1"},
    "cache_dir": {"cache_dir": "elsewhere"},
    "disk_cache": {"disk_cache": "off"},
    "disk_cache_mb": {"disk_cache_mb": "0"},
    "vae_patch_parallel_size": {"vae_patch_parallel_size": "2"},
    "cfg_parallel_size": {"cfg_parallel_size": "2"},
    "replicas": {"replicas": "2"},
    "output_dir": {"output_dir": "others"},
    "metadata": {"metadata": "off"},
    "keep_gps": {"keep_gps": "on"},
    "frames": {"frames": "png"},
    "checkpoint_every": {"checkpoint_every": "1"},
    "report": {"report": "off"},
    "fail_fast": {"fail_fast": "on"},
    "max_consecutive_errors": {"max_consecutive_errors": "1"},
    "max_retries": {"max_retries": "3"},
    "skip_invalid": {"skip_invalid": "on"},
    "name": {"name": "{seed}/{custom_id}"},
}
# `tests/cli/test_replicas.py` and `test_video_ranks.py` compare the pixels of these too.
SEVERAL_PROCESSES = ("cfg_parallel_size", "replicas", "vae_patch_parallel_size")
# What cannot be varied here, with the reason; other tests do (`tests/engine/test_gpu.py`).
CANNOT = {
    "device": "another device than the CPU has to be there",
    "ray_address": "a cluster has to be there: `tests/engine/test_replicas.py` has one",
    "cpu_offload": "it is refused where everything is in main memory as it is",
    "enable_cpu_offload": "it is refused where everything is in main memory as it is",
    "offload_experts": "it is refused there, too: `tests/kernels/test_offload.py`",
    "background_pass": "of a server: `tests/engine/test_service.py` has its pixels",
    "tokens_between_steps": "the same",
    "gpu_memory_utilization": "it is refused where there is no GPU",
    **dict.fromkeys(TABLES["candidates"], "it chooses among pictures: `tests/scoring`"),
    "keep_quantized": "of quantised weights: `tests/models/hunyuan_image3/test_kept.py`",
}


def test_every_setting_without_pixels_is_run_or_has_a_reason() -> None:
    assert {name for name, row in SETTINGS.items() if row.pixels is None} == {*OTHER, *CANNOT}
    assert not OTHER.keys() & CANNOT.keys()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Pixels of every job under the defaults."""
    with pytest.MonkeyPatch.context() as patch:
        return pixels(tmp_path_factory.mktemp("plain"), (*PICTURES, *VIDEOS), {}, patch)


def pixels(
    folder: Path,
    lines: tuple[dict[str, Any], ...],
    environ: dict[str, str],
    patch: pytest.MonkeyPatch,
) -> dict[str, str]:
    """Digest of the pixels by job, of a run in `folder` under variables."""
    shutil.copy(SOURCE, folder / "circle.png")
    manifest = folder / "jobs.jsonl"
    manifest.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    patch.chdir(folder)
    chosen = {"output_dir": "out", "cache_dir": "cache"} | COMMON | environ
    for name, value in chosen.items():
        patch.setenv(f"HYIMG_{name.upper()}", value)
    assert app.run(["generate", str(manifest), "-q"]) == 0
    return dict(found(Path(chosen["output_dir"])))


def found(out: Path) -> Iterator[tuple[str, str]]:
    for line in map(json.loads, (out / "results.jsonl").read_text().splitlines()):
        yield line["custom_id"], line["outputs"][0]["pixel_sha256"]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.thorough] if name in SEVERAL_PROCESSES else [])
        for name in OTHER
    ],
)
def test_two_values_same_pixels(
    plain: dict[str, str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = MANIFESTS[SETTINGS[name].only]
    other = pixels(tmp_path, lines, OTHER[name], monkeypatch)
    assert other
    assert other == {job: plain[job] for job in other}
