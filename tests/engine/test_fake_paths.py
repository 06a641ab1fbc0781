"""Ways through the engine on a fake GPU that a first run would take: no device is mixed up, nothing
waits in a loop, and memory of one stream is never another's.
"""

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_gpu.bench import Bench
from fake_gpu.device import fake_gpu

from hyimg_cli.media.images import SourceImage
from hyimg_cli.memory.footprint import Together
from hyimg_cli.models.hunyuan_image3.vae import TiledPicture
from hyimg_cli.models.protocols import Prefill
from hyimg_cli.pipelines.image import sources
from hyimg_cli.pipelines.image.sources import EncodedSources
from hyimg_cli.pipelines.image.stages import ImageRequest
from hyimg_cli.settings.run import CacheConfig
from hyimg_cli.spec.job import SizeRequest

pytest.importorskip("triton", reason="what runs on a GPU is written in Triton")
# Once a job: whether the picture is finite, and the picture on its way back.
READS = "pipelines.image.stages.decode"
WAITS = "models.hunyuan_image3.family.decode_latents"


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with fake_gpu() as gpu:
        yield Bench(gpu, tmp_path_factory.mktemp("bench"), "fp8", layers=1)
        gc.collect()


def _noted(gpu: Any) -> None:
    for found in (gpu.reads, gpu.waits, gpu.strays):
        found.clear()


def _ran(bench: Any, jobs: list[Any], *also: str) -> None:
    """The jobs through the engine's loop; what is read and waited for is once a job, or `also`."""
    _noted(bench.gpu)
    bench.model.has_vae = True
    assert bench._run(jobs, Together(2, 2)) == {ImageRequest: len(jobs)}
    assert bench.gpu.reads == {READS: len(jobs)}
    assert set(bench.gpu.waits) == {WAITS, *also}
    assert not bench.gpu.strays


def test_a_distilled_network(tmp_path: Path) -> None:
    """Guidance and the next timestep are tokens, and there is no negative branch.

    The first of all: one fake GPU is there at a time.
    """
    with fake_gpu() as gpu:
        bench = Bench(gpu, tmp_path, "fp8", layers=1, cfg_distilled=True, use_meanflow=True)
        assert bench.load.layout.target.special_count == 3
        _ran(bench, [bench.load.request(n, steps=2, guidance=2.5) for n in range(2)])
        del bench
        gc.collect()


@pytest.mark.thorough
def test_groups_of_two_sizes_and_one_to_three_sources(bench: Any) -> None:
    for size, images in ((SizeRequest(1024, 1024), ("a",)), (SizeRequest(768, 1280), ("b", "c"))):
        jobs = [
            replace(bench.load.request(n, steps=2, guidance=2.5), size=size, images=images)
            for n in range(2)
        ]
        _ran(bench, jobs)
    three = replace(bench.load.request(0, steps=2, guidance=1.0), images=("a", "b", "c"))
    _ran(bench, [three])


def test_a_picture_in_tiles(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.model, "_tiled", TiledPicture(bench.network.vae))
    # Tiles' fading is sent once for each shape, and kept.
    _ran(bench, [bench.load.request(0, steps=2, guidance=2.5)], "tiling.blend.<genexpr>")


def test_keys_and_values_go_to_main_memory_and_come_back(bench: Any) -> None:
    """Nothing waits copy by copy, and what comes back is on the layers' devices."""
    _noted(bench.gpu)
    buffer = bench.network.new_buffer()
    arena = bench.network.arena
    buffer.reserve(arena.page)
    buffer.commit(arena.page)
    arena.shrink()
    held = buffer.rows(0, arena.page)
    before = bench.gpu.live
    host = held.to_host()
    assert arena.storage.host_bytes == host.nbytes == held.nbytes
    del held, buffer
    arena.shrink()
    assert bench.gpu.live == before - host.nbytes
    back = host.to_device()
    assert bench.gpu.live == before
    bench.network.new_buffer().extend(back)
    assert not bench.gpu.waits
    assert not bench.gpu.reads


def _encoded_beside(bench: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    def encoded(_pixels: Any, digest: str) -> Any:
        return bench.model.encoded(digest, bench.load)

    monkeypatch.setattr(bench.model, "encode_source", encoded)
    kept = EncodedSources(CacheConfig())
    kept.use(bench.model, "model")
    image = SourceImage(np.zeros((8, 8, 3), dtype=np.uint8), digest="image", notes=())
    _noted(bench.gpu)
    kept.prefetch(image)
    found, _ = kept.encode(image)
    layout = bench.load.layout
    buffer = bench.network.new_buffer()
    bench.network.prefill([Prefill(layout, layout.ids, [found.rows], buffer, layout.live_start)])
    return bench.gpu.strays


def test_an_image_encoded_beside_is_kept_for_the_streams_that_read_it(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not _encoded_beside(bench, monkeypatch)
    assert not bench.gpu.reads


def test_memory_of_another_stream_would_be_found(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_belongs_here", lambda encoded: None)
    assert _encoded_beside(bench, monkeypatch)


def test_one_stream_encodes_for_good() -> None:
    """Each stream keeps the memory that it let go of."""
    encoded = EncodedSources(CacheConfig())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Stream", _Stream)
        patch.setattr(torch.cuda, "current_stream", _Stream)
        first = encoded.stream_on(torch.device("cuda:0"))
        encoded.clear()
        assert encoded.stream_on(torch.device("cuda:0")) is first
        assert encoded.stream_on(torch.device("cuda:1")) is not first


def test_the_encoding_stream_waits_for_the_weights_of_each_model() -> None:
    encoded, device = EncodedSources(CacheConfig()), torch.device("cuda:0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Stream", _Stream)
        patch.setattr(torch.cuda, "current_stream", _Stream)
        encoded.use(SimpleNamespace(), "first")  # type: ignore[arg-type]
        stream: Any = encoded.stream_on(device)
        assert stream.waited == [device]
        encoded.use(SimpleNamespace(), "second")  # type: ignore[arg-type]
        assert encoded.stream_on(device) is stream
        assert stream.waited == [device, device]


class _Stream:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.waited: list[torch.device] = []

    def wait_stream(self, other: Any) -> None:
        self.waited.append(other.device)
