"""Runs of manifests with a server's engine: the bits of `hyimg generate`, whatever other work
there is, and each resumes the other's runs.
"""

import json
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from served_batch import PATIENCE_S, ServedBatch, serving

from hyimg_cli.errors import Interrupted
from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.models.hunyuan_image3.family import HunyuanImage3
from hyimg_cli.models.hunyuan_image3.model import HunyuanImage3ForCausalMM
from hyimg_cli.settings.run import BatchConfig

# What depends on company, time and what was done before.
OF_THE_MOMENT = {
    *("timings_s", "share_s", "overlapped_s", "cache", "peak_memory_mb", "batch", "kv_reuse"),
}
LINES: list[dict[str, Any]] = [
    {"custom_id": "thinks", "prompt": "a red circle", "max_new_tokens": 7, "steps": 3},
    {"custom_id": "same-text", "prompt": "a red circle", "max_new_tokens": 7, "steps": 5},
    {"custom_id": "plain", "url": "/v1/images/generations"}
    | {"body": {"prompt": "a blue square", "bot_task": "none", "steps": 4, "style": "vivid"}},
    {"custom_id": "edit", "prompt": "make it blue", "images": ["source.png"], "steps": 3}
    | {"bot_task": "recaption", "max_new_tokens": 5},
    {"custom_id": "kept", "prompt": "a dot", "images": ["source.png"], "bot_task": "none"}
    | {"steps": 2, "keep_outside": True},
    {"custom_id": "broken", "prompt": "make it blue", "images": ["broken.png"]},
]


def facts(out: Path) -> dict[str, dict[str, Any]]:
    """What a folder's lines say, but for the moment."""
    lines = RunFolder(out).results()
    return {
        name: {key: value for key, value in line.items() if key not in OF_THE_MOMENT}
        for name, line in lines.items()
    }


def count_lines(out: Path) -> int:
    return len((out / "results.jsonl").read_text().splitlines())


@pytest.fixture
def manifest(
    write_manifest: Callable[..., Path], write_picture: Callable[..., Path], tmp_path: Path
) -> Path:
    write_picture()
    (tmp_path / "broken.png").write_bytes(b"no picture")
    return write_manifest(*LINES)


def test_a_served_batch_is_what_generate_makes_whoever_is_at_work_beside_it(
    manifest: Path, run_cli: Callable[..., Any], tmp_path: Path
) -> None:
    assert run_cli("generate", manifest, "-o", "alone").code == 1, "one source is no picture"
    with serving(tmp_path) as service:
        # The same ids three times at once.
        batches = [ServedBatch(service, manifest, tmp_path / name) for name in "abc"]
        for one in batches:
            assert one.ended().error is None
            assert (one.summary.done, one.summary.failed) == (5, 1)
    expected = facts(tmp_path / "alone")
    assert expected["plain"]["warnings"] == ['style "vivid" has no effect']
    for name in "abc":
        assert facts(tmp_path / name) == expected
        assert count_lines(tmp_path / name) == len(LINES)
    again = run_cli("generate", manifest, "-o", "b")
    assert (again.code, count_lines(tmp_path / "b")) == (1, len(LINES)), "nothing is done twice"


def test_generate_finishes_what_a_server_began_and_the_other_way_round(
    write_manifest: Callable[..., Path], run_cli: Callable[..., Any], tmp_path: Path
) -> None:
    lines = [
        {"custom_id": f"j{n}", "prompt": f"a red circle {n}", "bot_task": "none", "steps": 2 + n}
        for n in range(6)
    ]
    manifest = write_manifest(*lines)
    assert run_cli("generate", manifest, "-o", "alone").code == 0
    assert run_cli("generate", manifest, "-o", "begun", "--limit", "2").code == 0
    with serving(tmp_path, batch=BatchConfig(max_size=2, prewarm=False)) as service:
        served = ServedBatch(service, manifest, tmp_path / "served")
        begun = ServedBatch(service, manifest, tmp_path / "begun")
        assert begun.ended().error is None
        assert (begun.summary.done, begun.summary.skipped) == (4, 2)
        assert served.ended().error is None
        left = ServedBatch(service, manifest, tmp_path / "left")
        assert left.has_line.wait(PATIENCE_S)
        service.stop(0.0)
        assert isinstance(left.ended().error, Interrupted)
    done = count_lines(tmp_path / "left")
    assert 1 <= done < 6
    resumed = run_cli("generate", manifest, "-o", "left")
    assert resumed.code == 0
    for name in ("begun", "served", "left"):
        assert facts(tmp_path / name) == facts(tmp_path / "alone")
        assert count_lines(tmp_path / name) == 6


def test_edits_are_put_back_on_their_sources_again_without_the_model(
    write_manifest: Callable[..., Path],
    write_picture: Callable[..., Path],
    run_cli: Callable[..., Any],
    tmp_path: Path,
) -> None:
    write_picture()
    line = {"custom_id": "kept", "prompt": "a dot", "images": ["source.png"], "bot_task": "none"}
    line |= {"steps": 2, "keep_outside": True}
    with serving(tmp_path) as service:
        first = ServedBatch(service, write_manifest(line), tmp_path / "out").ended()
        assert (first.error, first.summary.done) == (None, 1)
        service.stop(0.0)
        manifest = write_manifest(line | {"region": "4,4,20,20"})
        again = ServedBatch(service, manifest, tmp_path / "out").ended()
    assert (again.error, again.summary.done) == (None, 1), "no engine was asked"
    assert run_cli("generate", manifest, "-o", "alone").code == 0
    pixels = [
        RunFolder(tmp_path / name).results()["kept"]["outputs"][0]["pixel_sha256"]
        for name in ("out", "alone")
    ]
    assert pixels[0] == pixels[1]


def test_a_run_that_is_stopped_before_its_work_begins_does_none(
    manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path) as service:
        entered, going = threading.Event(), threading.Event()
        session = service.session

        def late(*given: Any, **named: Any) -> Any:
            entered.set()
            going.wait(PATIENCE_S)
            return session(*given, **named)

        monkeypatch.setattr(service, "session", late)
        batch = ServedBatch(service, manifest, tmp_path / "out")
        assert entered.wait(PATIENCE_S)
        batch.request_stop()
        going.set()
        assert isinstance(batch.ended().error, Interrupted)
    results = RunFolder(tmp_path / "out").results()
    assert list(results) == ["broken"], json.dumps(list(results))


def test_a_server_short_of_memory_draws_the_same_pixels(
    write_manifest: Callable[..., Path],
    run_cli: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two batches and single requests at work at once, and memory for two of them in each stage."""
    lines = [
        {"custom_id": f"j{n}", "prompt": f"a red circle {n}", "steps": 3, "seed": n}
        | ({"max_new_tokens": 6} if n % 2 else {"bot_task": "none"})
        for n in range(8)
    ]
    manifest = write_manifest(*lines)
    assert run_cli("generate", manifest, "-o", "alone").code == 0
    short, refused = torch.OutOfMemoryError("tried to allocate 80 GiB"), Counter[str]()

    def limit(name: str) -> None:
        original = getattr(HunyuanImage3ForCausalMM, name)

        def limited(self: Any, items: Any) -> Any:
            if len(items) > 2:
                refused[name] += 1
                raise short
            return original(self, items)

        monkeypatch.setattr(HunyuanImage3ForCausalMM, name, limited)

    with serving(tmp_path, batch=BatchConfig(max_size=6, prewarm=False)) as service:
        limit("velocity")
        limit("feed")
        batches = [ServedBatch(service, manifest, tmp_path / name) for name in "ab"]
        single = [ServedBatch(service, manifest, tmp_path / name, is_online=True) for name in "cd"]
        for one in batches + single:
            assert one.ended().error is None
            assert (one.summary.done, one.summary.failed) == (8, 0)
    assert min(refused["velocity"], refused["feed"]) > 0, "memory was short in both stages"
    expected = {name: line["outputs"] for name, line in facts(tmp_path / "alone").items()}
    notes = list[str]()
    for name in "abcd":
        found = facts(tmp_path / name)
        assert {job: line["outputs"] for job, line in found.items()} == expected
        notes += [note for line in found.values() for note in line["warnings"]]
    assert any("out of memory" in note for note in notes), "the lines say so"


def test_a_job_that_never_fits_fails_alone_in_a_server(
    write_manifest: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [{"prompt": f"a dot {n}", "bot_task": "none", "steps": 2} for n in range(4)]
    lines = [{"custom_id": f"j{n}"} | job for n, job in enumerate(jobs)]
    canvas = HunyuanImage3.canvas

    def full(self: Any, job: Any, *rest: Any) -> Any:
        if job.prompt == "a dot 2":
            raise torch.OutOfMemoryError("tried to allocate 80 GiB")
        return canvas(self, job, *rest)

    monkeypatch.setattr(HunyuanImage3, "canvas", full)
    with serving(tmp_path) as service:
        name, other = write_manifest(*lines), tmp_path / "other"
        short = ServedBatch(service, name, tmp_path / "out")
        alone = ServedBatch(service, name, other, is_online=True)
        for one in (short.ended(), alone.ended()):
            assert (one.error, one.summary.done, one.summary.failed) == (None, 3, 1)
        assert service.fault is None
    error = RunFolder(other).results()["j2"]["error"]
    assert (error["code"], error["retryable"]) == ("job.out-of-memory", True)
