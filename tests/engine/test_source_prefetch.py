"""Encoding while the model works: the same rows and counts as in turn; faults stall nothing."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hyimg_cli.engine.session import Session
from hyimg_cli.manifest.planner import make_plan
from hyimg_cli.media.images import SourceImage, read_image
from hyimg_cli.memory.footprint import prefetches_sources
from hyimg_cli.models import registry
from hyimg_cli.models.hunyuan_image3.family import HunyuanImage3
from hyimg_cli.pipelines.image.sources import EncodedSources
from hyimg_cli.settings.run import BatchConfig, CacheConfig, ModelChoice, OutputConfig, RunConfig
from hyimg_cli.spec.events import JobEnded, Outcome
from hyimg_cli.spec.job import ImageJob, SizeRequest

Run = Callable[..., dict[str, Outcome]]


@pytest.fixture
def encoders(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the threads that encoded, in order."""
    names: list[str] = []
    encode = HunyuanImage3.encode_source

    def noted(self: Any, pixels: Any, digest: str) -> Any:
        names.append(threading.current_thread().name)
        return encode(self, pixels, digest)

    monkeypatch.setattr(HunyuanImage3, "encode_source", noted)
    return names


@pytest.fixture
def run(
    job: ImageJob, sources: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Run:
    """Edits of three pictures, one picture twice and one missing, one after another."""
    missing = str(tmp_path / "missing.png")
    given = [sources[:1], sources[1:2], (missing,), sources[:1], sources[2:], sources[1:]]
    edits = [
        replace(
            job,
            custom_id=f"{n}",
            task="it2i",
            images=images,
            bot_task="none",
            size=SizeRequest(64, 64),
            seed=n,
        )
        for n, images in enumerate(given)
    ]

    def drawn(
        prefetches_sources: bool | None, cache: CacheConfig | None = None
    ) -> dict[str, Outcome]:
        config = RunConfig(
            OutputConfig(tmp_path),
            model=ModelChoice(device="cpu", dtype="float32"),
            batch=BatchConfig(max_size=2, prewarm=False, prefetches_sources=prefetches_sources),
            cache=cache or CacheConfig(),
        )
        with monkeypatch.context() as patch:
            if prefetches_sources:
                _ask_late(patch)
            events = list(Session(config).run(make_plan(edits, registry.model_card)))
        ends = [event.outcome for event in events if isinstance(event, JobEnded)]
        return {end.custom_id: end for end in ends}

    return drawn


def _ask_late(patch: pytest.MonkeyPatch) -> None:
    """Each image is asked for when it is prefetched, however late the thread gets to it."""
    done: dict[str, threading.Event] = {}
    prefetch, ask = EncodedSources.prefetch, EncodedSources.encode

    def noted(self: EncodedSources, image: SourceImage) -> None:
        prefetch(self, image)
        done.setdefault(image.digest, threading.Event()).set()

    def waits(self: EncodedSources, image: SourceImage) -> Any:
        assert done.setdefault(image.digest, threading.Event()).wait(60)
        return ask(self, image)

    patch.setattr(EncodedSources, "prefetch", noted)
    patch.setattr(EncodedSources, "encode", waits)


def test_a_cpu_encodes_in_turn_unless_told(run: Run, encoders: list[str]) -> None:
    assert not prefetches_sources(RunConfig(ModelChoice(device="cpu")))
    run(None)
    assert set(encoders) == {"MainThread"}


def test_rows_and_counts_are_those_of_encoding_in_turn(
    run: Run, encoders: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, with a missing picture among them that stalls nothing."""
    rows: list[dict[str, bytes]] = []
    encode = EncodedSources.encode

    def kept(self: EncodedSources, image: SourceImage) -> Any:
        encoded, beside_s = encode(self, image)
        rows[-1][encoded.digest] = b"".join(
            part.numpy().tobytes() for part in vars(encoded.rows).values()
        )
        return encoded, beside_s

    monkeypatch.setattr(EncodedSources, "encode", kept)
    ends = []
    for is_ahead in (False, True):
        rows.append({})
        ends.append(run(is_ahead))
    in_turn, ahead = ends
    assert rows[0] == rows[1]
    assert len(rows[0]) == 3
    assert len(encoders) == 6
    assert encoders[:3] == ["MainThread"] * 3
    assert "MainThread" not in encoders[3:]
    assert {name: end.status for name, end in ahead.items()} == {
        name: end.status for name, end in in_turn.items()
    }
    assert [name for name, end in ahead.items() if end.status == "failed"] == ["2"]
    last = [max(end.values(), key=lambda o: sum(o.cache["source_images"].values())) for end in ends]
    assert last[0].cache["source_images"] == last[1].cache["source_images"]
    assert last[0].cache["source_images"] == {"memory_hits": 3, "disk_hits": 0, "misses": 3}


def test_seconds_beside_are_told_apart(family: Any, sources: tuple[str, ...]) -> None:
    kept = EncodedSources(CacheConfig())
    kept.use(family, "print")
    images = [read_image(Path(path)) for path in sources[:2]]
    kept.prefetch(images[0])
    _, beside_s = kept.encode(images[0])
    assert beside_s > 0
    assert kept.encode(images[0])[1] == 0, "told once"
    assert kept.encode(images[1])[1] == 0, "nothing was done ahead"


def test_lines_count_what_was_encoded_beside(run: Run) -> None:
    outcomes = run(True)
    told = [o.overlapped_s.get("encode", 0) for o in outcomes.values()]
    assert sum(told) > 0
    assert all("encode" not in o.overlapped_s for o in run(False).values())


def test_what_fails_ahead_is_made_in_turn(
    family: Any, sources: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = EncodedSources(CacheConfig())
    kept.use(family, "print")
    image = read_image(Path(sources[0]))
    with monkeypatch.context() as patch:
        patch.setattr(family, "encode_source", lambda *_: 1 / 0, raising=False)
        kept.prefetch(image)
        with pytest.raises(ZeroDivisionError):
            kept.encode(image)
    assert kept.encode(image)[0].digest == image.digest
    assert tuple(kept.counts().values()) == (0, 0, 1)


def test_asking_waits_for_what_is_under_way(
    family: Any, sources: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One image is encoded once, also where it is asked for in the middle of it."""
    begun, calls, encode = threading.Event(), [], family.encode_source

    def slow(pixels: Any, digest: str) -> Any:
        calls.append(digest)
        begun.set()
        time.sleep(0.2)
        return encode(pixels, digest)

    monkeypatch.setattr(family, "encode_source", slow, raising=False)
    kept = EncodedSources(CacheConfig())
    kept.use(family, "print")
    image = read_image(Path(sources[0]))
    thread = threading.Thread(target=kept.prefetch, args=(image,))
    thread.start()
    assert begun.wait(60)
    kept.encode(image)
    thread.join()
    assert len(calls) == 1
    assert tuple(kept.counts().values()) == (0, 0, 1)
