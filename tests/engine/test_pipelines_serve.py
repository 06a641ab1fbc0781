"""Pipelines that serve a queue from a thread of their own: pictures join each other, videos come
one at a time; sources of one scope are not there for another.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
from engine.fake_video import Studios, video_job
from engine.test_short_memory import ran

from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.models import registry
from hyimg_cli.pipelines.image.admission import ONLINE_PLACES
from hyimg_cli.pipelines.image.pipeline import ImagePipeline
from hyimg_cli.pipelines.image.stages import ImageRequest
from hyimg_cli.pipelines.pipeline import Pipeline
from hyimg_cli.pipelines.queue import Dropped, Ticket, TicketQueue
from hyimg_cli.pipelines.request import Lost, Request
from hyimg_cli.pipelines.video.pipeline import VideoPipeline
from hyimg_cli.settings.run import BatchConfig, CacheConfig, ModelChoice, OutputConfig, RunConfig
from hyimg_cli.spec.events import Progress
from hyimg_cli.spec.job import ImageJob, Job, SizeRequest


class Caller:
    """What one ticket was told, from another thread."""

    def __init__(self, queue: TicketQueue, job: Job, scope: str, folder: Any = None) -> None:
        self._queue, self._told = queue, Queue[Any]()
        self.ticket = Ticket(job, scope, scope, True, folder, self._told.put)
        queue.put([self.ticket])

    def heard(self, until: Callable[[Any], bool]) -> Any:
        """The first event that is meant."""
        while not until(event := self._told.get(timeout=60)):
            pass
        return event

    def end(self) -> Any:
        return self.heard(lambda event: isinstance(event, Request | Dropped))

    def drop(self) -> None:
        self._queue.drop([self.ticket])


@contextmanager
def serving(pipeline: Pipeline[Any, Any, Any]) -> Iterator[TicketQueue]:
    queue = TicketQueue()
    engine = threading.Thread(target=lambda: deque(pipeline.work(queue), maxlen=0))
    engine.start()
    try:
        yield queue
    finally:
        queue.close()
        engine.join(60)
        assert not engine.is_alive()


def test_pictures_are_those_of_a_run(
    family: Any, job: ImageJob, sources: tuple[str, ...], tmp_path: Path
) -> None:
    """Whose sources another scope has encoded are encoded again, and their lines can be written."""
    config = RunConfig(
        OutputConfig(tmp_path),
        model=ModelChoice(device="cpu", dtype="float32"),
        cache=CacheConfig(folder=tmp_path / "cache"),
        batch=BatchConfig(prewarm=False),
    )
    edits = [
        replace(
            job, custom_id=f"{n}", seed=n, images=sources[:1], task="it2i", size=SizeRequest(64, 64)
        )
        for n in range(3)
    ]
    lines = ran(config, family, edits, tmp_path / "plain")
    pipeline = ImagePipeline(config, lambda *_, **__: family)
    list(pipeline.use(registry.EMBEDDED, edits, None))
    list(pipeline.prepare_to_serve(edits[:1]))
    places = config.batch.max_size + ONLINE_PLACES
    assert pipeline._together == (places, places)
    misses = []
    with serving(pipeline) as queue, RunFolder(tmp_path / "served") as folder:
        for scope in "ab":
            callers = [Caller(queue, edit, scope) for edit in edits]
            ends = [caller.end() for caller in callers]
            for edit, end in zip(edits, ends, strict=True):
                assert isinstance(end, ImageRequest)
                named = replace(edit, custom_id=f"{scope}-{edit.custom_id}")
                end.job = named
                (output,) = pipeline.write(end, folder)
                (expected,) = lines[edit.custom_id].outputs
                assert output.pixel_sha256 == expected.pixel_sha256
                assert pipeline.line_fields(end)["batch"]["denoise"] >= 1
                assert end.clock.share_s()["total"] > 0
            misses.append(pipeline.cache_counts()["source_images"]["misses"])
    # One came from the run's disk cache to nobody: each scope has its own there, too.
    assert misses == [1, 2]


def test_a_closed_queue_lets_what_is_at_work_end(
    family: Any, job: ImageJob, tmp_path: Path
) -> None:
    config = RunConfig(OutputConfig(tmp_path), batch=BatchConfig(prewarm=False))
    pipeline = ImagePipeline(config, lambda *_, **__: family)
    list(pipeline.use(registry.EMBEDDED, [job], None))
    list(pipeline.prepare_to_serve([job]))
    long = replace(job, size=SizeRequest(64, 64), num_inference_steps=20, bot_task="none")
    with serving(pipeline) as queue:
        stays, leaves = Caller(queue, long, "a"), Caller(queue, long, "b")
        leaves.heard(lambda event: isinstance(event, Progress) and event.phase == "denoise")
        leaves.drop()
        queue.close()
        late = Caller(queue, long, "a")
        assert [type(one.end()) for one in (stays, leaves, late)] == [
            ImageRequest,
            Dropped,
            Dropped,
        ]


def test_videos_come_one_at_a_time_and_a_dropped_one_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "load_video", Studios())
    config = RunConfig(OutputConfig(tmp_path), batch=BatchConfig(prewarm=False))
    pipeline = VideoPipeline(config)
    jobs = [video_job(f"{n}", seed=n, num_inference_steps=200) for n in range(3)]
    list(pipeline.use("tiny-video", jobs[:1], None))
    list(pipeline.prepare_to_serve(jobs[:1]))
    with RunFolder(tmp_path) as folder, serving(pipeline) as queue:
        first = Caller(queue, jobs[0], "a", folder)
        first.heard(lambda event: isinstance(event, Progress) and event.phase == "denoise")
        second = Caller(queue, replace(jobs[1], num_inference_steps=3), "b", folder)
        first.drop()
        assert isinstance(first.end(), Dropped)
        done = second.end()
        assert not isinstance(done, Lost), done.error
        (output,) = pipeline.write(done, folder)
        assert (tmp_path / output.path).is_file()
