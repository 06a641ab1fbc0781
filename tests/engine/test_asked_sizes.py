"""A picture in another size than its job asks for: a note in its line, and before the run."""

from dataclasses import replace
from pathlib import Path

from event_kinds import is_done

from hyimg_cli.engine.session import Session
from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.manifest.planner import make_plan
from hyimg_cli.models import registry
from hyimg_cli.settings.run import BatchConfig, OutputConfig, RunConfig
from hyimg_cli.spec.job import ImageJob, SizeRequest


def test_a_size_that_the_model_does_not_make_is_in_the_line(job: ImageJob, tmp_path: Path) -> None:
    plain = replace(job, bot_task="none", num_inference_steps=2)
    sizes = {
        "own": SizeRequest(64, 64),
        "other": SizeRequest(300, 500),  # the released model makes no such size either
        "large": SizeRequest(1024, 1024),
        "auto": SizeRequest(),
        "ratio": SizeRequest(1, 1, is_ratio=True),
    }
    jobs = [replace(plain, custom_id=name, size=size) for name, size in sizes.items()]
    config = RunConfig(OutputConfig(tmp_path), batch=BatchConfig(prewarm=False))
    with RunFolder(tmp_path) as folder:
        events = Session(config).run(make_plan(jobs, registry.model_card), folder)
        notes = {one.outcome.custom_id: one.outcome.notes for one in events if is_done(one)}
    assert notes == {
        "own": (),
        "other": ("500x300 fitted to 64x64: tiny-image makes 64x64",),
        "large": ("1024x1024 fitted to 64x64",),
        "auto": (),
        "ratio": (),
    }
