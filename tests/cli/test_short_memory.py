"""Out of memory through the command: every remedy of `pipelines.out_of_memory`, to the bit."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hyimg_cli.models.hunyuan_image3.family import HunyuanImage3
from hyimg_cli.pipelines.image.stages import ImageStages
from hyimg_cli.pipelines.video.pipeline import VideoPipeline

Run = Callable[..., Any]
FULL = "tried to allocate 80 GiB"
FLAGS = ("--device", "cpu", "--no-prewarm", "--no-report", "--no-disk-cache", "--json")
PICTURES = [
    {
        "custom_id": name, "prompt": f"a red circle {name}", "seed": n, "num_inference_steps": 2,
        "size": "64x64", "bot_task": "recaption", "max_new_tokens": 3 + n,
    }
    for n, name in enumerate(["later", "first", "again", "lost"])
]  # fmt: skip
FILMS = [
    {
        "custom_id": name, "task": "t2v", "prompt": f"a dog {name}", "seed": 1, "steps": 2,
        "size": "48x32", "num_frames": 5,
    }
    for name in ("again", "lost")
]  # fmt: skip


def _lines(ran: Any) -> dict[str, Any]:
    return {line["custom_id"]: line for line in ran.json_lines if "custom_id" in line}


def _files(lines: dict[str, Any]) -> dict[str, Any]:
    return {name: line["outputs"] for name, line in lines.items() if line["status"] == "done"}


def _refuse_more_than(
    monkeypatch: pytest.MonkeyPatch, method: str, most: int, refused: Counter[str]
) -> None:
    """A forward of the picture model that has memory for `most` rows."""
    inner = getattr(HunyuanImage3, method)

    def small(self: Any, rows: Any) -> Any:
        if len(rows) > most:
            refused[method] += 1
            raise torch.OutOfMemoryError(FULL)
        return inner(self, rows)

    monkeypatch.setattr(HunyuanImage3, method, small)


def _refuse_first(
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    stage: str,
    times: dict[str, int],
    refused: Counter[str],
) -> None:
    """A stage, `owner`'s method or function, that has no memory the first times, by job."""
    inner, left = getattr(owner, stage), Counter(times)

    def short(*given: Any) -> Any:
        (name,) = (one.job.custom_id for one in given if hasattr(one, "job"))
        if left[name]:
            left[name] -= 1
            refused[f"{stage} {name}"] += 1
            raise torch.OutOfMemoryError(FULL)
        return inner(*given)

    monkeypatch.setattr(owner, stage, short)


def test_pictures_go_on_in_less_memory_and_only_what_never_fits_is_lost(
    run_cli: Run, write_manifest: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = write_manifest(*PICTURES)
    plain = _files(_lines(run_cli("generate", manifest, "-o", "plain", *FLAGS)))
    refused: Counter[str] = Counter()
    with monkeypatch.context() as patch:
        _refuse_more_than(patch, "feed", 3, refused)
        _refuse_more_than(patch, "velocities", 1, refused)
        _refuse_more_than(patch, "prefill", 2, refused)
        # Alone it fails the third time: first in a batch of four, then of two.
        _refuse_first(patch, ImageStages, "prefill", {"again": 3}, refused)
        _refuse_first(patch, ImageStages, "build_branches", {"again": 1}, refused)
        _refuse_first(patch, ImageStages, "decode", {"later": 2, "lost": 99}, refused)
        ran = run_cli("generate", manifest, "-o", "short", *FLAGS)
    lines = _lines(ran)
    assert ran.code == 1
    assert _files(lines) == {name: plain[name] for name in ("first", "again", "later")}
    assert lines["lost"]["error"]["code"] == "job.out-of-memory"
    assert "--vae-use-tiling" in lines["lost"]["error"]["hint"]
    told = {name: " / ".join(line["warnings"]) for name, line in lines.items()}
    assert "a batch of 4 failed (out of memory); continued in halves" in told["first"]
    assert "continued after dropping the prefixes kept for other jobs" in told["again"]
    assert (
        "not enough memory to decode together with other jobs; decoded after them" in told["later"]
    )
    met = {"feed", "velocities", "prefill", "prefill again", "build_branches again"}
    assert met < refused.keys()
    assert "out of memory" in ran.err
    after = _lines(run_cli("generate", manifest, "-o", "short", "--retry-failed", *FLAGS))
    assert _files(after) == {"lost": plain["lost"]}


def test_videos_go_on_when_all_else_is_dropped_and_only_what_never_fits_is_lost(
    run_cli: Run, write_manifest: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = write_manifest(*FILMS)
    plain = _files(_lines(run_cli("generate", manifest, "-o", "plain", *FLAGS)))
    refused: Counter[str] = Counter()
    with monkeypatch.context() as patch:
        _refuse_first(patch, VideoPipeline, "encode", {"again": 1}, refused)
        _refuse_first(patch, VideoPipeline, "denoise", {"again": 1}, refused)
        _refuse_first(patch, VideoPipeline, "decode", {"again": 1, "lost": 99}, refused)
        ran = run_cli("generate", manifest, "-o", "short", *FLAGS)
    lines = _lines(ran)
    once = dict.fromkeys(("encode again", "denoise again", "decode again"), 1)
    assert (ran.code, refused) == (1, once | {"decode lost": 2})
    assert _files(lines) == {"again": plain["again"]}
    dropped = "continued after dropping the text encoders and the prefixes of pictures"
    assert any(dropped in warning for warning in lines["again"]["warnings"])
    assert lines["lost"]["error"]["code"] == "job.out-of-memory"
    assert "--enable-cpu-offload" in lines["lost"]["error"]["hint"]
    after = _lines(run_cli("generate", manifest, "-o", "short", "--retry-failed", *FLAGS))
    assert _files(after) == {"lost": plain["lost"]}
