"""The batch size that memory allows."""

from dataclasses import replace
from typing import Any

import pytest

from hyimg_cli.engine import memory
from hyimg_cli.engine.memory import batch_size, job_bytes
from hyimg_cli.spec.job import ImageJob, SizeRequest
from hyimg_cli.spec.run import BatchConfig


def test_counts_the_context_and_both_branches(family: Any, job: ImageJob) -> None:
    plain = replace(job, bot_task="none", size=SizeRequest(64, 64))
    layout = family.layout(plain, [], None, family.bucket(plain, None)[0])
    live = 2 * (layout.live_stop - layout.live_start)
    kv = (3 * layout.live_start + live) * family.card.kv_bytes_per_token
    expected = kv + live * family.card.activation_bytes_per_row
    assert job_bytes(plain, family) == 2 * expected  # float32 is twice the stored bfloat16


def test_text_to_write_needs_room(family: Any, job: ImageJob) -> None:
    short = replace(job, text=replace(job.text, max_new_tokens=5))
    long = replace(job, text=replace(job.text, max_new_tokens=105))
    assert job_bytes(long, family) > job_bytes(short, family)


@pytest.mark.parametrize(("fits", "expected"), [(100, 16), (16, 16), (5, 5), (1, 1), (0, 1)])
def test_a_group_larger_than_memory_splits(
    family: Any, job: ImageJob, monkeypatch: pytest.MonkeyPatch, fits: int, expected: int
) -> None:
    needed = job_bytes(job, family)
    monkeypatch.setattr(memory, "free_bytes", lambda _model: int(needed * fits / 0.6) + 2)
    assert batch_size([job] * 40, family, BatchConfig(max_size=16), None) == expected


def test_a_job_that_cannot_be_counted_takes_nothing(family: Any, job: ImageJob) -> None:
    assert job_bytes(replace(job, prompt="<img>"), family) == 1
    assert memory.free_bytes(family) > 0
    assert memory.peak_memory_mb(family.layer_devices) > 10
