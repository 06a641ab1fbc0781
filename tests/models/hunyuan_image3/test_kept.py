"""Quantised weights kept in the disk cache: the bits of a first start, or quantised anew."""

import errno
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from hyimg_cli.cache import disk
from hyimg_cli.cache.disk import QUANTIZED_WEIGHTS, DiskStore
from hyimg_cli.kernels.formats import Fp8Rows, Nf4Blocks
from hyimg_cli.loading import kept
from hyimg_cli.models.hunyuan_image3.sharded import Share
from hyimg_cli.models.hunyuan_image3.weights import load
from hyimg_cli.settings.run import CacheConfig


@pytest.fixture
def folder(small_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_folder, tmp_path / "checkpoint"))


@pytest.fixture
def cache(tmp_path: Path) -> CacheConfig:
    return CacheConfig(tmp_path / "cache", budget_mb=100, keeps_weights=True)


@pytest.fixture
def quantised(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of every matrix that is quantised, its expert."""
    done: list[int] = []
    for kind in (Fp8Rows, Nf4Blocks):
        own = kind.put

        def put(self: Any, expert: int, *given: Any, own: Any = own, **named: Any) -> None:
            done.append(expert)
            own(self, expert, *given, **named)

        monkeypatch.setattr(kind, "put", put)
    return done


def _bits(network: Any) -> list[bytes]:
    return [t.view(torch.uint8).numpy().tobytes() for t in network.buffers()]


@pytest.mark.parametrize("form", ["fp8", "nf4"])
def test_a_second_start_quantises_nothing_and_has_the_same_bits(
    folder: Path, cache: CacheConfig, quantised: list[int], form: Any
) -> None:
    anew = _bits(load(folder, dtype=torch.float32, quantization=form))
    first = _bits(load(folder, dtype=torch.float32, quantization=form, cache=cache))
    made = len(quantised)
    again = _bits(load(folder, dtype=torch.bfloat16, quantization=form, cache=cache))
    assert len(quantised) == made, "the other tensors' dtype is of no account"
    assert anew == first == again


def test_a_rank_finds_its_own_share(folder: Path, cache: CacheConfig, quantised: list[int]) -> None:
    def share(number: int) -> list[bytes]:
        return _bits(
            load(
                folder,
                share=Share(number, 2),
                dtype=torch.float32,
                quantization="fp8",
                cache=cache,
            )
        )

    first = share(0), share(1)
    made = len(quantised)
    assert (share(0), share(1)) == first
    assert len(quantised) == made
    assert first[0] != first[1]


@pytest.mark.parametrize("damage", ["a bit", "its length", "another's bytes"])
def test_what_is_damaged_is_quantised_again_and_told(
    folder: Path,
    cache: CacheConfig,
    quantised: list[int],
    caplog: pytest.LogCaptureFixture,
    damage: str,
) -> None:
    first = _bits(load(folder, dtype=torch.float32, quantization="fp8", cache=cache))
    assert cache.folder is not None
    entries = sorted((cache.folder / QUANTIZED_WEIGHTS).iterdir())
    if damage == "a bit":
        data = bytearray(entries[0].read_bytes())
        data[-5] ^= 1
        entries[0].write_bytes(data)
    elif damage == "its length":
        os.truncate(entries[0], entries[0].stat().st_size - 3)
    else:
        store = DiskStore(cache.folder, cache.budget_bytes)
        store.write(QUANTIZED_WEIGHTS, entries[0].name, b"whole, and of no matrix")
    quantised.clear()
    assert _bits(load(folder, dtype=torch.float32, quantization="fp8", cache=cache)) == first
    assert len(set(quantised)) == 1
    assert "damaged entry of the disk cache (quantized-weights)" in caplog.text
    caplog.clear(), quantised.clear()
    load(folder, dtype=torch.float32, quantization="fp8", cache=cache)
    assert not quantised
    assert not caplog.text


def test_weights_that_were_written_to_are_never_taken_for_those_before(
    folder: Path, cache: CacheConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where size, name, the ends of each matrix and the time of change are as before."""
    monkeypatch.setattr(kept, "_SAMPLE_BYTES", 1)
    first = _bits(load(folder, dtype=torch.float32, quantization="fp8", cache=cache))
    path = folder / "model.safetensors"
    status = path.stat()
    data = bytearray(path.read_bytes())
    middle = torch.frombuffer(data, dtype=torch.uint8)[8 + int.from_bytes(data[:8], "little") :: 61]
    middle ^= 0x80
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    other = _bits(load(folder, dtype=torch.float32, quantization="fp8", cache=cache))
    assert other == _bits(load(folder, dtype=torch.float32, quantization="fp8"))
    assert other != first


def test_what_the_cache_cannot_hold_is_not_kept_and_told(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = CacheConfig(tmp_path / "cache", budget_mb=0, keeps_weights=True)
    load(folder, dtype=torch.float32, quantization="fp8", cache=small)
    assert "quantized weights are not cached" in caplog.text
    assert not (tmp_path / "cache").exists()


def test_other_bits_are_other_entries(
    folder: Path, cache: CacheConfig, quantised: list[int]
) -> None:
    load(folder, dtype=torch.float32, quantization="fp8", cache=cache)
    made = len(quantised)
    held = _bits(load(folder, dtype=torch.float32, quantization="nf4", cache=cache))
    assert len(quantised) > made
    assert held == _bits(load(folder, dtype=torch.float32, quantization="nf4"))


def test_a_full_disk_is_told_and_what_it_took_is_read(
    folder: Path,
    cache: CacheConfig,
    quantised: list[int],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Five entries are whole; of the sixth a part is left, as by a process that was killed."""
    own, numbers = disk._write_whole, count()

    def write(path: Path, *parts: bytes) -> None:
        if next(numbers) >= 5:
            path.with_name(f".{path.name}.1.ab.tmp").write_bytes(parts[0])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        own(path, *parts)

    monkeypatch.setattr(disk, "_write_whole", write)
    first = _bits(load(folder, dtype=torch.float32, quantization="fp8", cache=cache))
    assert (
        "the disk cache is read-only for the rest of this run: No space left on device"
        in caplog.text
    )
    assert first == _bits(load(folder, dtype=torch.float32, quantization="fp8"))
    assert cache.folder is not None
    entries = [p for p in (cache.folder / QUANTIZED_WEIGHTS).iterdir() if p.suffix != ".tmp"]
    assert len(entries) == 5
    monkeypatch.setattr(disk, "_write_whole", own)
    assert _bits(load(folder, dtype=torch.float32, quantization="fp8", cache=cache)) == first


def test_two_that_write_at_once_leave_whole_entries(
    folder: Path, cache: CacheConfig, quantised: list[int]
) -> None:
    def start(_: int) -> list[bytes]:
        return _bits(load(folder, dtype=torch.float32, quantization="fp8", cache=cache))

    with ThreadPoolExecutor(2) as both:
        one, other = both.map(start, range(2))
    quantised.clear()
    assert start(0) == one == other
    assert not quantised
    assert cache.folder is not None
    assert not list((cache.folder / QUANTIZED_WEIGHTS).glob(".*"))
