"""Jobs that are denoised together: within rounding of jobs alone, and which ones are joined."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_editors
import torch
from conftest import thorough_but
from models.diffusers_image.classic import Checkpoint, Line, line, pixels_of, results
from models.diffusers_image.test_settings import begun, editor
from PIL import Image
from served_batch import ServedBatch, serving

from hyimg_cli.journal.keys import source_digest
from hyimg_cli.memory.videos import most_joined, needs_of
from hyimg_cli.models import registry
from hyimg_cli.models.diffusers_image.joined import form_of
from hyimg_cli.models.diffusers_image.model import BlockDenoiser, LatentImageModel
from hyimg_cli.pipelines.latents_checkpoint import Kept, LatentsCheckpoint
from hyimg_cli.settings.run import BatchConfig, ModelChoice, OutputConfig, RunConfig
from hyimg_cli.spec.job import ImageJob, SizeRequest

JOIN = "--no-batch-invariant"
KEPT_ROWS = ("klein-kv", "qwen-image-2.1", "qwen-image-2.1-turbo")
JOINED = [kind for kind in sorted(tiny_editors.PIPELINES) if kind not in KEPT_ROWS]
QUICK = ("klein", "z-image", "qwen-image-edit-plus", "kontext")
Draws = Callable[..., dict[str, Line]]


@pytest.fixture
def jobs(job: ImageJob, tmp_path: Path) -> list[ImageJob]:
    """Three jobs of one size, whose rows are no multiple of four."""
    numbers, found = np.random.default_rng(2), list[ImageJob]()
    for seed in range(3):
        path = tmp_path / f"own{seed}.png"
        Image.fromarray(numbers.integers(0, 256, (80, 112, 3), np.uint8)).save(path)
        size = SizeRequest(80, 112)
        found.append(replace(job, custom_id=str(seed), images=(str(path),), seed=seed, size=size))
    return found


def fitted(model: LatentImageModel, job: ImageJob) -> ImageJob:
    """The job for a kind that takes no pictures, or draws layers."""
    given = job if model.kind.most else replace(job, task="t2i", images=())
    return replace(given, layers=2) if model.kind.layers else given


def denoised(denoiser: BlockDenoiser) -> torch.Tensor:
    while not denoiser.is_done:
        denoiser.advance()
    return denoiser.latents


def joined(model: LatentImageModel, jobs: list[ImageJob]) -> BlockDenoiser:
    for one in jobs:
        begun(model, one)  # encodes
    known: Any = model.__dict__["known"]

    def embedded(one: ImageJob) -> Any:
        names = [view.path for view in one.views]
        return {
            condition: made
            for condition, made in known.items()
            if all(view.path in names for view, _ in condition.images)
        }

    return model.denoiser_of([(one, embedded(one)) for one in jobs])


@pytest.mark.parametrize("kind", thorough_but(QUICK, JOINED))
def test_joined_jobs_are_within_rounding_of_jobs_alone(
    checkpoint: Checkpoint, jobs: list[ImageJob], kind: str
) -> None:
    model = editor(checkpoint(kind))
    given = [fitted(model, one) for one in jobs]
    alone = [denoised(begun(model, one)) for one in given]
    assert len({model.batch_key(one) for one in given}) == 1
    apart = (denoised(joined(model, given)) - torch.cat(alone)).abs().max()
    assert apart < 1e-5
    assert apart < (alone[0] - alone[1]).abs().max() / 1e3


@pytest.mark.parametrize("kind", KEPT_ROWS)
def test_a_model_that_keeps_rows_joins_no_jobs(
    checkpoint: Checkpoint, job: ImageJob, kind: str
) -> None:
    assert editor(checkpoint(kind)).batch_key(job) is None


def test_jobs_of_other_steps_sizes_and_schedules_are_not_joined(
    checkpoint: Checkpoint, jobs: list[ImageJob], job: ImageJob
) -> None:
    model, (one, *_) = editor(checkpoint("klein")), jobs
    others = [
        replace(one, num_inference_steps=3),
        replace(one, size=SizeRequest(64, 96)),
        replace(one, images=(*one.images, one.images[0])),
        replace(one, images=job.images),
        replace(one, guidance_scale=2.0),
        replace(one, flow_shift=3.0),
    ]
    keys = {model.batch_key(other) for other in [one, *others]}
    assert None not in keys
    assert len(keys) == len(others) + 1
    assert model.batch_key(replace(one, prompt="blue", seed=9)) == model.batch_key(one)


def test_texts_of_two_lengths_have_two_forms(checkpoint: Checkpoint, job: ImageJob) -> None:
    """But those of klein, which fills each up to 512 rows."""
    counts = dict[str, int]()
    for kind in ("klein", "qwen-image-edit-plus"):
        model, forms = editor(checkpoint(kind)), set()
        for prompt in ("red", "a red cat and a dog"):
            digests = [source_digest(path) for path in job.images]
            conditions = model.conditions(replace(job, prompt=prompt), digests)
            forms.add(form_of({one: model.encoder.encode(one) for one in conditions}))
        counts[kind] = len(forms)
    assert counts == {"klein": 1, "qwen-image-edit-plus": 2}


@pytest.fixture
def draws(
    run_cli: Any, write_manifest: Any, tmp_path: Path, checkpoint: Checkpoint, sources: list[str]
) -> Draws:
    """Results of a run of klein."""
    model = str(checkpoint("klein"))

    def run(lines: list[Line], out: str, *flags: str, code: int = 0) -> dict[str, Line]:
        words = ("generate", write_manifest(*lines), "--model", model, "-o", out, *flags)
        assert run_cli(*words, "--no-report").code == code
        return drawn(tmp_path / out)

    return run


@pytest.fixture
def edits(sources: list[str]) -> list[Line]:
    prompts = ("red", "a blue cat", "green", "red")
    lines = [line(f"j{n}", text, "s0.png", seed=n) for n, text in enumerate(prompts)]
    return [*lines, line("other", "red", "s1.png", seed=9)]


def drawn(folder: Path) -> dict[str, Line]:
    """Result lines, with the pixels of their pictures."""
    pixels = pixels_of(folder)
    return {name: one | {"pixels": pixels.get(name)} for name, one in results(folder).items()}


def same_pixels(found: dict[str, Line], expected: dict[str, Line]) -> bool:
    """True if all pictures are equal but for rounding, which moves a level by one."""
    assert found.keys() == expected.keys()
    pairs = [(found[name]["pixels"], expected[name]["pixels"]) for name in found]
    return all(np.abs(one.astype(int) - other.astype(int)).max() <= 1 for one, other in pairs)


def sizes(found: dict[str, Line]) -> list[int]:
    return [found[name].get("batch", {}).get("denoise", 1) for name in sorted(found)]


def test_a_run_joins_on_request_and_draws_the_same(draws: Draws, edits: list[Line]) -> None:
    alone = draws(edits, "alone")
    assert sizes(alone) == [1, 1, 1, 1, 1]
    found = draws(edits, "joined", JOIN)
    assert sizes(found) == [4, 4, 4, 4, 1]
    assert same_pixels(found, alone)
    assert not any(one.get("warnings") for one in found.values())
    limited = draws(edits, "limited", JOIN, "--batching-max-size", "3")
    assert sizes(limited) == [3, 3, 3, 1, 1]
    assert same_pixels(limited, alone)


def test_joined_jobs_say_that_bits_may_differ(draws: Draws, edits: list[Line]) -> None:
    found = draws(edits, "joined", JOIN)
    said = ["denoised together with other jobs" in " ".join(one.get("notes", ()))
            for _, one in sorted(found.items())]  # fmt: skip
    assert said == [True, True, True, True, False]


def test_short_memory_halves_a_batch_and_limits_later_ones(
    draws: Draws, edits: list[Line], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, join, asked = draws(edits, "alone"), BlockDenoiser.join, list[int]()

    def too_many(self: BlockDenoiser, others: list[BlockDenoiser]) -> None:
        asked.append(1 + len(others))
        if asked[-1] > 2:
            raise torch.OutOfMemoryError
        join(self, others)

    monkeypatch.setattr(BlockDenoiser, "join", too_many)
    edits += [line(f"l{n}", "red", "s1.png", seed=n, num_inference_steps=2) for n in range(3)]
    found = draws(edits, "joined", JOIN)
    # The other line and the three new ones are the second group.
    assert asked == [4, 2, 2, 2, 2], "the second group has learnt from the first"
    assert same_pixels({name: found[name] for name in alone}, alone)
    assert ["a batch of 4 failed (out of memory)" in " ".join(found[name].get("warnings", ()))
            for name in ("j0", "j3", "l0")] == [True, True, False]  # fmt: skip


def test_a_fault_of_one_job_is_its_own(
    draws: Draws, edits: list[Line], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, begin = draws(edits, "alone"), BlockDenoiser.__init__

    def breaks(self: BlockDenoiser, model: Any, job: ImageJob, *rest: Any) -> None:
        if job.custom_id == "j1":
            raise RuntimeError("planted")
        begin(self, model, job, *rest)

    monkeypatch.setattr(BlockDenoiser, "__init__", breaks)
    found = draws(edits, "joined", JOIN, "--max-retries", "0", code=1)
    assert "planted" in found.pop("j1")["error"]["message"]
    del alone["j1"]
    assert same_pixels(found, alone)
    assert sizes(found) == [1, 2, 2, 1]


@pytest.mark.parametrize(("last", "expected"), [("j3", [4, 4, 4, 4, 1]), ("j1", [2, 2, 2, 2, 1])])
def test_an_interrupted_batch_goes_on_as_a_batch(
    draws: Draws, edits: list[Line], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    last: str, expected: list[int],
) -> None:  # fmt: skip
    """Jobs that were saved after one step, together; nothing of a step is done twice."""
    whole, keep = draws(edits, "whole", JOIN), LatentsCheckpoint.keep

    def keep_and_end(self: LatentsCheckpoint, kept: Kept) -> None:
        keep(self, kept)
        if (self.path.stem, kept.step) == (last, 2):
            raise KeyboardInterrupt

    often = (JOIN, "--checkpoint-every", "1")
    with monkeypatch.context() as patched:
        patched.setattr(LatentsCheckpoint, "keep", keep_and_end)
        assert draws(edits, "killed", *often, code=130) == {}
    found = draws(edits, "killed", *often)
    assert sizes(found) == expected
    assert [found[name]["denoise_steps"] for name in ("j0", "j3")] == [1, 1 + (last == "j1")]
    assert same_pixels(found, whole)
    assert not (tmp_path / "killed" / "latents").exists()


def test_inpainting_and_candidates_are_joined(draws: Draws, sources: list[str]) -> None:
    inpaint = {"keep_outside": True, "region": "16,16,64,48", "region_mode": "inpaint"}
    lines = [line("in", "red", "s0.png", n=3, **inpaint), line("n", "red", "s0.png", n=2)]
    for one in lines:
        del one["size"]
    found, alone = draws(lines, "joined", JOIN), draws(lines, "alone")
    assert sizes(found) == [3, 3, 3, 2, 2]
    assert same_pixels(found, alone)


def test_as_many_are_joined_as_fit(checkpoint: Checkpoint, job: ImageJob) -> None:
    model = str(checkpoint("klein"))
    config = RunConfig(model=ModelChoice(model), output=OutputConfig(Path("out")))
    known, networks = replace(job, model=model), registry.model_card(model).networks
    assert networks is not None
    work = needs_of(known, networks, config)["denoise"].work
    # 85 % of what is free are used.
    fitting = [
        most_joined(known, networks, config, int(n * work / 0.85) + 1) for n in (0.5, 1, 3.5)
    ]
    assert fitting == [1, 1, 3]
    assert most_joined(known, networks, config) == config.batch.max_size


def test_a_plan_counts_batches_and_their_memory(
    run_cli: Any, write_manifest: Any, checkpoint: Checkpoint, edits: list[Line]
) -> None:
    words = ("plan", write_manifest(*edits), "--model", str(checkpoint("klein")), "--json")

    def group(*flags: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(run_cli(*words, *flags).out)["groups"][0]
        return found

    alone, together = group(), group(JOIN)
    assert (alone["joined"], alone["joined_forwards"]) == (1, 15)
    assert (together["joined"], together["joined_forwards"]) == (4, 6)
    assert together["forwards"] == alone["forwards"] == 15
    works = [one["memory"]["denoise"]["work"] for one in (alone, together)]
    assert works[1] == 4 * works[0]


@pytest.mark.parametrize(
    ("kind", "flags", "told"),
    [
        ("klein", (JOIN, "--batching-max-size", "2"), ""),
        ("klein", ("--batching-max-size", "2"), "models with --no-batch-invariant only"),
        ("klein-kv", (JOIN,), f"{JOIN} applies to models that draw jobs together only"),
    ],
)
def test_a_setting_that_joins_nothing_says_so(
    run_cli: Any, write_manifest: Any, checkpoint: Checkpoint, sources: list[str],
    kind: str, flags: tuple[str, ...], told: str,
) -> None:  # fmt: skip
    manifest = write_manifest(line("a", "red", "s0.png"))
    ran = run_cli("check", manifest, "--model", str(checkpoint(kind)), *flags)
    assert ran.code == 0
    assert told in ran.err
    assert ("applies to" in ran.err) is bool(told)


def test_a_server_joins_requests_that_wait(
    draws: Draws, write_manifest: Any, tmp_path: Path, checkpoint: Checkpoint, edits: list[Line]
) -> None:
    alone, manifest = draws(edits, "alone"), write_manifest(*edits)
    served: dict[str, Any] = {"model": ModelChoice(str(checkpoint("klein")))}
    served |= {"output": OutputConfig(tmp_path), "batch": BatchConfig(is_invariant=False)}
    with serving(tmp_path, **served) as service:
        first, second = (ServedBatch(service, manifest, tmp_path / name) for name in "ab")
        assert first.ended().error is second.ended().error is None
    for name in "ab":
        assert same_pixels(drawn(tmp_path / name), alone)
    assert max(sizes(results(tmp_path / "a")) + sizes(results(tmp_path / "b"))) > 1
    assert len(pixels_of(tmp_path / "a")) == len(edits)
