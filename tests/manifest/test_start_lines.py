"""Lines of i2v: tasks that are the checkpoint's, pictures that it takes, sizes; and LoRAs of it."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tiny_video import WAN_CARD

from hyimg_cli.errors import HyimgError
from hyimg_cli.manifest.manifest import read_manifest
from hyimg_cli.manifest.planner import make_plan
from hyimg_cli.manifest.resolve import resolve_jobs
from hyimg_cli.manifest.resolved import job_to_json
from hyimg_cli.settings.config import settle
from hyimg_cli.spec.card import StartRule, VideoCard
from hyimg_cli.spec.job import Size, VideoJob
from hyimg_cli.spec.options import Lora

T2V = WAN_CARD
I2V = replace(T2V, start=StartRule(1, 1, "stretch"), needs_start=True)
BOTH = replace(I2V, needs_start=False)
LAST = replace(I2V, start=StartRule(2, 2, "stretch"))
PAIR = replace(
    I2V,
    start=StartRule(1, 2, "stretch"),
    defaults=replace(I2V.defaults, guidance_scale_2=3.5),
    follows=I2V.follows | {"guidance_scale_2"},
)
CROPS = replace(I2V, start=StartRule(1, 1, "crop", (Size(64, 64), Size(48, 80), Size(80, 48))))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a wide picture and two LoRA files."""
    Image.new("RGB", (320, 160), "red").save(tmp_path / "wide.png")
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors").write_bytes(name.encode())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def resolved(card: VideoCard, *lines: dict[str, Any], **flags: Any) -> tuple[list[VideoJob], Any]:
    base = {"prompt": "it moves"}
    texts = (json.dumps(base | {"custom_id": f"v{n}"} | line) for n, line in enumerate(lines))
    manifest = read_manifest("-", io.StringIO("".join(f"{text}\n" for text in texts)))
    jobs, faults = resolve_jobs(
        manifest, settle(flags, {}, {}), lambda name: pytest.fail(name), lambda model: card
    )
    return [job for job in jobs if isinstance(job, VideoJob)], [*manifest.faults, *faults]


def only(card: VideoCard, **line: Any) -> VideoJob:
    (job,), faults = resolved(card, {"task": "i2v", "images": "wide.png"} | line)
    assert not faults
    return job


def fault(card: VideoCard, **line: Any) -> HyimgError:
    jobs, faults = resolved(card, line)
    assert (len(jobs), len(faults)) == (0, 1), faults
    found: HyimgError = faults[0]
    return found


@pytest.mark.parametrize(
    ("card", "task", "images", "field", "word"),
    [
        (T2V, "i2v", ["wide.png"], "task", "from a prompt only"),
        (I2V, "t2v", [], "task", "a start image as well as a prompt"),
        (LAST, "t2v", [], "task", "a start image as well as a prompt"),
        (I2V, "i2v", ["wide.png", "wide.png"], "images", "takes the first frame"),
        (BOTH, "i2v", ["wide.png", "wide.png"], "images", "takes the first frame"),
        (PAIR, "i2v", ["wide.png"] * 3, "images", "the first and the last frame"),
        (LAST, "i2v", ["wide.png"], "images", "the last one is missing"),
        (I2V, "i2v", [], "images", "i2v needs images"),
        (BOTH, "t2v", ["wide.png"], "images", "from a prompt only"),
    ],
)
def test_what_the_checkpoint_cannot_do_is_refused(
    card: VideoCard, task: str, images: list[str], field: str, word: str
) -> None:
    found = fault(card, task=task, **({"images": images} if images else {}))
    assert (found.where, word in found.what) == (f"stdin:1: {field}", True)


def test_a_model_of_both_tasks_takes_both() -> None:
    jobs, faults = resolved(BOTH, {"task": "t2v"}, {"task": "i2v", "images": "wide.png"})
    assert (faults, [job.images for job in jobs]) == ([], [(), ("wide.png",)])
    assert [job.size for job in jobs] == [Size(480, 832), Size(448, 896)]


@pytest.mark.parametrize(
    ("card", "line", "size"),
    [
        # About the default's area, in the picture's ratio, on the model's grid.
        (I2V, {}, Size(448, 896)),
        (I2V, {"size": "64x64"}, Size(64, 64)),
        (I2V, {"size": "1:2"}, Size(896, 448)),
        (I2V, {"images": "missing.png"}, Size(480, 832)),
        (CROPS, {}, Size(48, 80)),
        (CROPS, {"size": "1:1"}, Size(64, 64)),
        (CROPS, {"size": "96x96"}, Size(96, 96)),
    ],
)
def test_the_size_is_the_pictures_unless_given(
    card: VideoCard, line: dict[str, Any], size: Size
) -> None:
    assert only(card, **line).size == size


def test_how_a_picture_is_fitted_is_recorded() -> None:
    found = [only(I2V), only(CROPS), only(I2V, fit="crop")]
    assert [job_to_json(job)["fit"] for job in found] == ["stretch", "crop", "crop"]
    assert fault(T2V, task="t2v", fit="crop").where == "stdin:1: fit"
    (job,), _ = resolved(T2V, {"task": "t2v"}, fit="crop", lora="")
    assert not {"fit", "images", "lora", "scheduler"} & job_to_json(job).keys()


def test_a_line_read_back_is_the_same_job(folder: Path) -> None:
    job = only(PAIR, images=["wide.png", "wide.png"], lora="high=a.safetensors@0.5;low=none")
    assert job.lora == (Lora(str(Path("a.safetensors")), 0.5, "high"), Lora("", 0.0, "low"))
    line = job_to_json(job)
    assert line["lora"] == "high=a.safetensors@0.5;low=none@0"
    (again,), faults = resolved(PAIR, line)
    assert not faults
    assert replace(again, user_fields=job.user_fields) == job


@pytest.mark.parametrize(
    ("text", "weight"), [("@-0.5", -0.5), ("@-2", -2.0), ("@0", 0.0), ("", 1.0)]
)
def test_a_weight_is_the_one_that_is_written(text: str, weight: float) -> None:
    job = only(I2V, lora=f"a.safetensors{text}")
    assert job.lora == (Lora("a.safetensors", weight),)
    assert only(I2V, lora=job_to_json(job)["lora"]).lora == job.lora


@pytest.mark.parametrize(
    ("card", "lora", "word"),
    [
        (PAIR, "a.safetensors", "a pair of LoRA files"),
        (PAIR, "high=a.safetensors", "a pair of LoRA files"),
        (I2V, "low=a.safetensors", "one transformer"),
        (I2V, "missing.safetensors", "LoRA file not found: missing.safetensors"),
        (I2V, "a.bin", "is not FILE.safetensors"),
    ],
)
def test_half_a_pair_and_other_files_are_refused(card: VideoCard, lora: str, word: str) -> None:
    found = fault(card, task="i2v", images="wide.png", lora=lora)
    assert (found.where, word in found.what) == ("stdin:1: lora", True)


def test_jobs_of_one_lora_stand_together() -> None:
    line = {"task": "i2v", "images": "wide.png"}
    loras = ["a.safetensors", "", "a.safetensors", "b.safetensors", ""]
    jobs, _ = resolved(I2V, *(line | {"lora": lora} for lora in loras))
    plan = make_plan(jobs, lambda model: pytest.fail(model))
    assert [job.custom_id for job in plan.jobs] == ["v0", "v2", "v1", "v4", "v3"]
    (flagged,), faults = resolved(I2V, line, lora="a.safetensors@2")
    assert (faults, flagged.lora) == ([], (Lora("a.safetensors", 2.0),))
