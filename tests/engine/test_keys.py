"""What is part of a job's key, and what a machine without torch is taken to run."""

from dataclasses import replace
from pathlib import Path

from engine.fake_video import video_job

from hyimg_cli.engine.keys import key_of
from hyimg_cli.spec.job import ImageJob
from hyimg_cli.spec.run import BatchConfig, ModelChoice, OutputConfig, RunConfig

CONFIG = RunConfig(OutputConfig(Path()), ModelChoice(device="cpu"))


def test_pixels_that_depend_on_the_batch_have_keys_of_their_own(job: ImageJob) -> None:
    small, variant = (
        replace(CONFIG, batch=BatchConfig(max_size=size, is_invariant=is_invariant))
        for size, is_invariant in ((2, True), (16, False))
    )
    assert key_of(job, [], small) == key_of(job, [], CONFIG)
    assert key_of(job, [], variant) != key_of(job, [], CONFIG)
    # Videos are made one at a time.
    assert key_of(video_job(), [], variant) == key_of(video_job(), [], CONFIG)
