"""Every setting that is declared to change no pixel, run at two values: the pixels are the same."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from settings.examples import EXAMPLES

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
    "text": PICTURES,
    "batches": PICTURES,
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
# Values that this machine and these runs can have, and what else makes them matter.
INSTEAD: dict[str, dict[str, Any]] = {
    "batching_max_size": {"batching_max_size": 1},
    "prefix_cache_mb": {"prefix_cache_mb": 0},
    "prefix_cache_host_mb": {"prefix_cache_host_mb": 100, "prefix_cache_mb": 0},
    "disk_cache_mb": {"disk_cache_mb": 0},
    "checkpoint_every": {"checkpoint_every": 1},
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


RUN = [name for name, row in SETTINGS.items() if row.pixels is None and name not in CANNOT]


def test_reasons_are_of_settings_without_pixels() -> None:
    assert {name for name in (*CANNOT, *INSTEAD) if SETTINGS[name].pixels is not None} == set()


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
        for name in RUN
    ],
)
def test_two_values_same_pixels(
    plain: dict[str, str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = MANIFESTS[SETTINGS[name].only]
    chosen = INSTEAD.get(name, {name: EXAMPLES[name]})
    said = {n: ",".join(v) if isinstance(v, tuple) else str(v) for n, v in chosen.items()}
    other = pixels(tmp_path, lines, said, monkeypatch)
    assert other
    assert other == {job: plain[job] for job in other}
