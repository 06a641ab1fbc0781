"""`infer_align_image_size`: nothing is cut off the source, and the picture gets its shape."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine.conftest import studio_of
from event_kinds import is_done
from PIL import Image

from hyimg_cli.engine.forecast import forecast
from hyimg_cli.engine.session import Session
from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.kv.tree import KVTree
from hyimg_cli.manifest.planner import make_plan
from hyimg_cli.media.images import read_image, stretch
from hyimg_cli.memory.footprint import Together
from hyimg_cli.models import registry
from hyimg_cli.pipelines.clock import PhaseClock
from hyimg_cli.pipelines.image.admission import WholeBatches
from hyimg_cli.pipelines.image.batch import ContinuousBatch
from hyimg_cli.pipelines.image.stages import ImageRequest, aligned
from hyimg_cli.pipelines.queue import Ticket
from hyimg_cli.settings.run import BatchConfig, OutputConfig, RunConfig
from hyimg_cli.spec.card import Bucket, ModelCard
from hyimg_cli.spec.job import ImageJob, Size, SizeRequest

WIDE = Size(47, 88)  # 48 x 90, at the area of 64 x 64


@pytest.fixture
def edit(job: ImageJob, sources: tuple[str, ...]) -> ImageJob:
    """An edit of the 90 x 48 picture."""
    plain = replace(job, task="it2i", images=sources[1:2], bot_task="none")
    return replace(plain, size=SizeRequest(64, 64), infer_align_image_size=True)


def _drawn(jobs: list[ImageJob], family: Any, size: int) -> dict[str, ImageRequest]:
    run = ContinuousBatch(
        WholeBatches(
            map(Ticket, jobs),
            studio_of(family, tree=KVTree(10**9)),
            lambda since: PhaseClock(since, lambda: None),
        ),
        Together(size, size),
    )
    return {event.job.custom_id: event for event in run.run() if isinstance(event, ImageRequest)}


def _card(*buckets: tuple[int, int]) -> ModelCard:
    card = registry.model_card(registry.EMBEDDED)
    known = tuple(Bucket(n, Size(*size)) for n, size in enumerate(buckets))
    return replace(card, buckets=known, base_size=1024)


@pytest.mark.parametrize(
    ("drawn", "sources", "expected"),
    [
        (0, [Size(1000, 1300)], Size(898, 1168)),  # the source's bucket, another ratio
        (1, [Size(1000, 1300)], None),  # another bucket
        (0, [Size(768, 1024)], None),  # its bucket, its ratio
        (0, [Size(768, 1030)], None),  # less than 0.01 apart
        (0, [Size(900, 900), Size(1000, 1300)], Size(898, 1168)),  # the second shares it
        (0, [Size(768, 1024), Size(1000, 1300)], None),  # the first shares it, and decides
        (0, [], None),
    ],
)
def test_which_pictures_are_resized(drawn: int, sources: list[Size], expected: Size | None) -> None:
    card = _card((768, 1024), (1024, 1024))
    size = card.buckets[drawn].size
    pixels = np.random.default_rng(0).integers(0, 256, (size.height, size.width, 3), np.uint8)
    result = aligned(pixels, card.buckets[drawn], sources, card)
    if expected is None:
        assert result is pixels
    else:
        assert np.array_equal(result, stretch(pixels, expected))


def test_stretching_is_pillows_lanczos() -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (48, 90, 3), np.uint8)
    expected = Image.fromarray(pixels).resize((64, 32), Image.Resampling.LANCZOS)
    assert np.array_equal(stretch(pixels, Size(32, 64)), np.array(expected))


def test_the_vae_sees_the_whole_source(family: Any, sources: tuple[str, ...]) -> None:
    image = read_image(Path(sources[1]))
    cut = family.encode_source(image.pixels, "same")
    whole = family.encode_stretched(image.pixels, "same")
    by_hand = family.encode_source(stretch(image.pixels, Size(64, 64)), "same")
    assert np.array_equal(whole.rows.vae_SM, by_hand.rows.vae_SM)
    assert not np.array_equal(whole.rows.vae_SM, cut.rows.vae_SM)
    assert np.array_equal(whole.rows.vit_SM, cut.rows.vit_SM), "the ViT's view is as ever"


def test_both_kinds_of_one_source_together(family: Any, edit: ImageJob) -> None:
    """Each as alone: no row, no prefix and no picture is taken for the other's."""
    jobs = [
        replace(edit, custom_id="aligned"),
        replace(edit, custom_id="cut", infer_align_image_size=False),
        replace(edit, custom_id="again", seed=9),
    ]
    together = _drawn(jobs, family, 3)
    for job in jobs:
        alone = _drawn([job], family, 1)[job.custom_id]
        assert np.array_equal(alone.pixels, together[job.custom_id].pixels)
    shapes = {name: end.pixels.shape[:2] for name, end in together.items()}
    wide = WIDE.height, WIDE.width
    assert shapes == {"aligned": wide, "again": wide, "cut": (64, 64)}


@pytest.mark.parametrize("prefetches_sources", [False, True])
def test_line_file_and_plan_agree(edit: ImageJob, tmp_path: Path, prefetches_sources: bool) -> None:
    jobs = [
        replace(edit, custom_id="aligned"),
        replace(edit, custom_id="cut", infer_align_image_size=False),
        replace(edit, custom_id="again", seed=9),
    ]
    batch = BatchConfig(max_size=1, prefetches_sources=prefetches_sources)
    config = RunConfig(OutputConfig(tmp_path), batch=batch)
    plan = make_plan(jobs, registry.model_card)
    with RunFolder(tmp_path) as folder:
        events = Session(config).run(plan, folder)
        lines = {e.outcome.custom_id: e.outcome for e in events if is_done(e)}
    (output,) = lines["aligned"].outputs
    assert (output.height, output.width) == (WIDE.height, WIDE.width)
    with Image.open(tmp_path / output.path) as picture:
        assert picture.size == (WIDE.width, WIDE.height)
    encodes = max(line.cache["source_images"]["misses"] for line in lines.values())
    assert encodes == forecast(plan, config, assumed_think=0).total.image_encodes == 2
    keys = {name: line.key for name, line in lines.items()}
    assert len(set(keys.values())) == 3


def test_a_line_or_a_flag_asks_for_it(
    run_cli: Callable[..., Any], tmp_path: Path, sources: tuple[str, ...]
) -> None:
    edit = {"custom_id": "e", "prompt": "blue", "images": [sources[1]]}
    new = {"custom_id": "n", "prompt": "a red circle"}
    manifest = tmp_path / "jobs.jsonl"
    manifest.write_text("\n".join(map(json.dumps, (edit, new))) + "\n")
    assert run_cli("check", manifest, "--infer-align-image-size").code == 0
    manifest.write_text(json.dumps(edit | {"infer_align_image_size": True}) + "\n")
    assert run_cli("check", manifest).code == 0
    manifest.write_text(json.dumps(new | {"infer_align_image_size": True}) + "\n")
    refused = run_cli("check", manifest)
    assert refused.code == 2
    assert "no source image to align with" in refused.err
