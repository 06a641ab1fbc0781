"""Edits in one process, in shards, by replicas and in a bucket: the same files. Also with other
kinds of models in one run, whichever leaves memory.
"""

from pathlib import Path
from typing import Any

import pytest
from models.diffusers_image.classic import Checkpoint, line
from store_server import addresses_at, s3_endpoint

from hyimg_cli import remote
from hyimg_cli.engine import session

QUIET = ("-q", "--no-report", "--no-prewarm")


@pytest.fixture
def whole(
    run_cli: Any, write_manifest: Any, tmp_path: Path, checkpoint: Checkpoint, sources: list[str]
) -> tuple[str, tuple[str, ...], dict[str, bytes]]:
    """A manifest, what it is run with, and its files by one process."""
    lines = [line(f"{n}", "red", sources[n % 2], seed=n, num_inference_steps=2) for n in range(4)]
    manifest = str(write_manifest(*lines))
    flags = ("--model", str(checkpoint("klein")), "--cache-dir", str(tmp_path / "cache"), *QUIET)
    assert run_cli("generate", manifest, "-o", str(tmp_path / "whole"), *flags).code == 0
    return manifest, flags, files_of(tmp_path / "whole")


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "outputs").iterdir()}


def test_shards_joined(run_cli: Any, tmp_path: Path, whole: Any) -> None:
    manifest, flags, files = whole
    parts = [str(tmp_path / f"part-{n}") for n in (1, 2)]
    for n, part in enumerate(parts, 1):
        assert run_cli("generate", manifest, "-o", part, "--shard", f"{n}/2", *flags).code == 0
    assert run_cli("merge", *parts, "-o", str(tmp_path / "joined")).code == 0
    assert files_of(tmp_path / "joined") == files


@pytest.mark.thorough
def test_two_replicas(run_cli: Any, tmp_path: Path, whole: Any) -> None:
    manifest, flags, files = whole
    out = tmp_path / "out"
    assert run_cli("generate", manifest, "-o", str(out), "--replicas", "2", *flags).code == 0
    assert files_of(out) == files


@pytest.mark.thorough
@pytest.mark.ray
def test_two_replicas_of_a_ray_cluster(
    run_cli: Any, tmp_path: Path, whole: Any, ray_cluster: str
) -> None:
    manifest, flags, files = whole
    out = tmp_path / "out"
    how = ("--replicas", "2", "--ray-address", ray_cluster, "--device", "cpu")
    ran = run_cli("generate", manifest, "-o", str(out), *how, *flags)
    assert ran.code == 0, ran.err
    assert files_of(out) == files


def test_a_bucket_has_the_same_files(
    run_cli: Any, tmp_path: Path, whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, flags, files = whole
    with s3_endpoint() as served, addresses_at(served, monkeypatch):
        system, _ = remote.locate("s3://bucket")
        for path in (manifest, *tmp_path.glob("s*.png")):
            system.put_file(str(path), f"bucket/in/{Path(path).name}")
        name = f"s3://bucket/in/{Path(manifest).name}"
        ran = run_cli("generate", name, "-o", "s3://bucket/run", *flags)
        assert ran.code == 0, ran.err
        found = {Path(one).name: system.cat_file(one) for one in system.find("bucket/run/outputs")}
        assert found == files
        # All of it is found there again.
        again = run_cli("generate", name, "-o", "s3://bucket/run", *flags[:-3])
        assert f"0 done, 0 failed, {len(files)} skipped" in again.err


@pytest.mark.parametrize("fits", [True, False])
def test_other_models_of_a_run_stay_where_there_is_room(
    run_cli: Any, write_manifest: Any, tmp_path: Path, checkpoint: Checkpoint, sources: list[str],
    monkeypatch: pytest.MonkeyPatch, fits: bool,
) -> None:  # fmt: skip
    """The embedded picture model, an editor and a video model, in any order the same files."""
    edit = line("edit", "red", sources[0], model=str(checkpoint("klein")))
    lines = [
        {"custom_id": "shape", "task": "t2i", "prompt": "a circle", "num_inference_steps": 2,
         "bot_task": "none", "seed": 1},
        edit,
        {"custom_id": "film", "task": "t2v", "prompt": "a dog", "steps": 2, "size": "48x32",
         "num_frames": 1, "seed": 1},
    ]  # fmt: skip
    monkeypatch.setattr(session, "fits", lambda *_: fits)
    files = []
    for order in (lines, lines[::-1]):
        out = tmp_path / f"out-{len(files)}"
        ran = run_cli("generate", str(write_manifest(*order)), "-o", str(out), "--no-report",
                      "--no-prewarm", "--cache-dir", str(tmp_path / "cache"))  # fmt: skip
        assert ran.code == 0, ran.err
        assert ran.err.count(", in addition to ") == (2 if fits else 0), ran.err
        assert ran.err.count("unloaded") == (0 if fits else 2), ran.err
        files.append(files_of(out))
    assert files[0] == files[1]
