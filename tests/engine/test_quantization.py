"""Experts in fewer bits from the knob to the picture: close to what it was, and never mistaken for
it.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.conftest import studio_of
from released import released

from hyimg_cli.errors import UsageError
from hyimg_cli.journal.keys import key_of
from hyimg_cli.loading import packed
from hyimg_cli.loading.checkpoint import TensorInfo
from hyimg_cli.measure.bench.harness import Bench
from hyimg_cli.measure.bench.scenario import read_scenario
from hyimg_cli.memory.footprint import Together, footprint, needs
from hyimg_cli.models import registry
from hyimg_cli.models.hunyuan_image3 import card as card_module
from hyimg_cli.models.hunyuan_image3.config import architecture
from hyimg_cli.models.hunyuan_image3.weights import expected_shapes, load
from hyimg_cli.pipelines.clock import PhaseClock
from hyimg_cli.pipelines.image.admission import WholeBatches
from hyimg_cli.pipelines.image.batch import ContinuousBatch
from hyimg_cli.pipelines.image.stages import ImageRequest
from hyimg_cli.pipelines.queue import Ticket
from hyimg_cli.quality.metrics import psnr
from hyimg_cli.settings.run import BatchConfig, ModelChoice, OutputConfig, RunConfig
from hyimg_cli.spec.card import PICTURE_BYTES
from hyimg_cli.spec.job import ImageJob, SizeRequest

FORMS = ("none", "fp8", "nf4")


def _config(quantization: Any, **batch: Any) -> RunConfig:
    choice = ModelChoice(device="cpu", dtype="float32", quantization=quantization)
    return RunConfig(OutputConfig(Path()), model=choice, batch=BatchConfig(**batch))


@pytest.mark.parametrize(("form", "least"), [("fp8", 30), ("nf4", 18)])
def test_a_picture_stays_close(
    drawn: Callable[..., Any], family: Any, job: ImageJob, form: Any, least: float
) -> None:
    """The embedded model at 64x64, 8 steps: other pixels, the same picture."""
    job = replace(job, bot_task="none", size=SizeRequest(64, 64), num_inference_steps=8)
    released = drawn(job).picture.pixels
    model = registry.load(ModelChoice(device="cpu", dtype="float32", quantization=form))
    assert model.parameter_count == family.parameter_count
    ours = drawn(job, model=model).picture.pixels
    assert least < psnr(ours, released) < 70


@pytest.mark.parametrize("form", ["fp8", "nf4"])
def test_a_picture_is_the_same_to_the_bit_alone_and_together(job: ImageJob, form: Any) -> None:
    """Texts of several lengths think together, so rows come and go."""
    model = registry.load(ModelChoice(device="cpu", dtype="float32", quantization=form))
    jobs = [
        replace(
            job, custom_id=str(n), seed=n, ar_seed=n, text=replace(job.text, max_new_tokens=2 + n)
        )
        for n in range(4)
    ]
    together = _pixels(jobs, model, size=4)
    assert len(set(together.values())) == 4
    assert together == _pixels(jobs, model, size=1)


def _pixels(jobs: list[ImageJob], model: Any, *, size: int) -> dict[str, bytes]:
    run = ContinuousBatch(
        WholeBatches(
            map(Ticket, jobs), studio_of(model), lambda since: PhaseClock(since, lambda: None)
        ),
        Together(size, size),
    )
    ends = [end for end in run.run() if isinstance(end, ImageRequest)]
    return {end.job.custom_id: end.pixels.tobytes() for end in ends}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", FORMS)
def test_the_plan_says_the_bytes_of_the_weights(form: Any, dtype: Any) -> None:
    folder = registry.resolve_model(registry.EMBEDDED)
    network = load(folder, dtype=getattr(torch, dtype), quantization=form)
    held = sum(t.nbytes for t in (*network.parameters(), *network.buffers()))
    assert registry.model_card(registry.EMBEDDED).loaded_bytes(dtype, form) == held


def test_the_released_model_in_8_bits_takes_about_90_gb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """77.3e9 of 83.0e9 weights are experts: 77.4 GB in fp8. The rest takes 11.5 GB in bfloat16, and
    the VAE 2.5 GB more in float32.
    """
    small = Path(__file__).parent.parent / "parity" / "tiny" / "checkpoint"
    config = released(json.loads((small / "config.json").read_text()))
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(small / "generation_config.json", tmp_path)
    shapes = expected_shapes(architecture(config))
    infos = {name: TensorInfo(shape, "BF16", "headers alone") for name, shape in shapes.items()}
    monkeypatch.setattr(packed, "tensor_index", lambda _folder: infos)
    card = card_module.model_card(tmp_path, "released")
    assert card.weights.experts == 32 * 64 * 3 * 3072 * 4096
    by_form = {form: card.loaded_bytes("bfloat16", form) / 1e9 for form in FORMS}
    assert by_form["none"] == pytest.approx(168.6, abs=0.2)
    assert by_form["fp8"] == pytest.approx(91.4, abs=0.2)
    assert by_form["nf4"] == pytest.approx(57.4, abs=0.2)


def test_without_its_files_a_checkpoint_is_estimated_by_its_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hub id that was not fetched yet: its index says how many bytes there are in all."""
    embedded = registry.resolve_model(registry.EMBEDDED)
    for name in ("config.json", "generation_config.json"):
        shutil.copy(embedded / name, tmp_path)
    known = registry.model_card(registry.EMBEDDED)
    index = {"metadata": {"total_size": known.weight_bytes}, "weight_map": {"a": "absent"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    guessed = card_module.model_card(tmp_path, "not fetched")
    assert guessed.weights.experts == known.weights.experts
    assert guessed.weights.expert_rows == known.weights.expert_rows
    # The VAE and the router come in float32: of the index' bytes in 16 bits, twice as many.
    assert guessed.weights.wide == pytest.approx(known.weights.wide, rel=0.02)
    of_index = known.weight_bytes + 2 * guessed.weights.wide
    assert guessed.loaded_bytes("bfloat16") == of_index


def test_memory_counts_the_jobs_that_work_together(job: ImageJob) -> None:
    card = replace(registry.model_card(registry.EMBEDDED), vae_bytes_per_pixel=1)
    jobs = [replace(job, custom_id=str(n)) for n in range(5)]
    one = needs([job], card, _config("fp8")).share
    alone, together = (footprint(jobs, card, _config("fp8", max_size=n)) for n in (1, 4))
    assert (alone.thinking, alone.drawing) == (1, 1)
    assert (together.thinking, together.drawing) == (4, 4)
    assert alone.kv == one.branches, "they share the context"
    # Four draw, one waits.
    assert together.kv == one.context + 4 * one.branches
    assert together.activations == 4 * (one.step + one.joined)
    assert together.total == together.weights + together.kv + together.activations
    least = 3 * one.context + one.branches + one.step + one.joined
    assert together.least == together.weights + least


def test_tiles_bound_the_memory_of_the_vae(job: ImageJob) -> None:
    card = replace(registry.model_card(registry.EMBEDDED), tile_pixels=32)
    config = _config("none", max_size=1)
    tiled = replace(config, model=replace(config.model, vae_use_tiling=True))
    rowless = replace(card, activations={}, kv_bytes_per_token=0)
    whole, pieces = (footprint([job], rowless, each).activations for each in (config, tiled))
    beside = 2 * 64 * 64 * PICTURE_BYTES
    assert (pieces - beside) * 4 == whole


def test_quantization_is_part_of_a_jobs_key(job: ImageJob) -> None:
    keys = {form: key_of(job, [], _config(form)) for form in FORMS}
    assert len(set(keys.values())) == 3
    # A run without any keeps the key that it had before there was one.
    assert keys["none"] == key_of(
        job, [], RunConfig(OutputConfig(Path()), model=_config("none").model)
    )


def test_a_comparison_is_not_undone_by_a_flag(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the variants of quantization differ in it"):
        Bench(
            read_scenario("quantization"),
            None,  # type: ignore[arg-type]
            {"quantization": "fp8"},
            folder=tmp_path,
            metrics=(),
            tell=lambda _text: None,
        ).run()
