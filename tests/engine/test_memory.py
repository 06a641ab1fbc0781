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
    per_row = 2 * family.card.kv_bytes_per_token  # float32 is twice the stored bfloat16
    rows = job_bytes(plain, family) / per_row
    layout = family.layout(plain, [], None, family.bucket(plain, None)[0])
    live = layout.live_stop - layout.live_start
    assert rows == 3 * layout.live_start + 2 * live


def test_text_to_write_needs_room(family: Any, job: ImageJob) -> None:
    short = replace(job, text=replace(job.text, max_new_tokens=5))
    long = replace(job, text=replace(job.text, max_new_tokens=105))
    assert job_bytes(long, family) > job_bytes(short, family)


@pytest.mark.parametrize(("fits", "expected"), [(100, 16), (16, 16), (5, 5), (1, 1), (0, 1)])
def test_a_group_larger_than_memory_splits(
    family: Any, job: ImageJob, monkeypatch: pytest.MonkeyPatch, fits: int, expected: int
) -> None:
    needed = job_bytes(job, family)
    monkeypatch.setattr(memory, "free_bytes", lambda: int(2 * needed * fits) + 2)
    assert batch_size([job] * 40, family, BatchConfig(max_size=16)) == expected


def test_a_job_that_cannot_be_counted_takes_nothing(family: Any, job: ImageJob) -> None:
    assert job_bytes(replace(job, prompt="<img>"), family) == 1
    assert memory.free_bytes() > 0
