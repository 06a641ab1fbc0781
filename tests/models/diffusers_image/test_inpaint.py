"""Masks into the model: the bits of diffusers' own inpaint pipelines."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from conftest import thorough_but
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from library_weights import copy_weights
from models.diffusers_image.classic import Checkpoint, line, pixels_of, results
from models.diffusers_image.conftest import shrink_references
from models.diffusers_image.test_settings import begun, draw, editor
from PIL import Image
from torch import Tensor

from hyimg_cli.models.registry import model_card
from hyimg_cli.pipelines.latents_checkpoint import LatentsCheckpoint
from hyimg_cli.spec.job import ImageJob, Size, SizeRequest
from hyimg_cli.spec.options import KeepOutside, Region
from hyimg_cli.spec.step_cache import StepCache

# A size to which the library's editors bring their references in these tests.
WIDTH, HEIGHT, STEPS = 128, 64, 5
# Without a pattern of whole cells.
BOX = (13, 21, 61, 50)


@pytest.fixture
def edit(tmp_path: Path, job: ImageJob) -> Callable[[float], ImageJob]:
    """A job that draws in a box of its source only."""
    numbers = np.random.default_rng(3)
    path = tmp_path / "source.png"
    Image.fromarray(numbers.integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8)).save(path)

    def of(strength: float) -> ImageJob:
        region = Region(",".join(map(str, BOX)))
        outside = KeepOutside(region=region, region_mode="inpaint", strength=strength)
        return replace(
            job,
            images=(str(path),),
            size=SizeRequest(HEIGHT, WIDTH),
            num_inference_steps=STEPS,
            outside=outside,
        )

    return of


def masked(size: tuple[int, int] = (WIDTH, HEIGHT)) -> Image.Image:
    pixels = np.zeros(size[::-1], np.uint8)
    left, top, right, bottom = BOX
    pixels[top:bottom, left:right] = 255
    return Image.fromarray(pixels)


def with_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Posteriors give their mode where the classic pipelines sample them."""
    monkeypatch.setattr(
        DiagonalGaussianDistribution, "sample", lambda self, generator=None: self.mode()
    )


@pytest.mark.parametrize("strength", thorough_but([0.6], [0.3, 0.6, 1.0]))
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("klein", "Flux2KleinInpaintPipeline"),
        ("klein-base", "Flux2KleinInpaintPipeline"),
        ("kontext", "FluxKontextInpaintPipeline"),
        ("qwen-image-edit", "QwenImageEditInpaintPipeline"),
        ("qwen-image", "QwenImageInpaintPipeline"),
        ("z-image", "ZImageInpaintPipeline"),
        ("flux-dev", "FluxInpaintPipeline"),
        ("flux-schnell", "FluxInpaintPipeline"),
    ],
)
def test_pixels_are_the_inpaint_pipelines(
    checkpoint: Checkpoint,
    edit: Callable[[float], ImageJob],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    name: str,
    strength: float,
) -> None:
    """Where they sample the source's latents, from their mode.

    Z-Image's ends with latents in another order of memory, in which its VAE rounds otherwise.
    """
    folder, job = checkpoint(kind), edit(strength)
    if kind.startswith("qwen"):
        job = replace(job, negative_prompt=" ")
    with_modes(monkeypatch)
    shrink_references(monkeypatch)
    pipeline: Any = copy_weights(getattr(diffusers, name).from_pretrained(folder))
    pipeline.set_progress_bar_config(disable=True)
    given: dict[str, Any] = {"guidance_scale": job.guidance_scale}
    if kind == "kontext":
        given |= {"max_area": WIDTH * HEIGHT, "_auto_resize": False}
    if kind.startswith("qwen"):
        given = {"true_cfg_scale": job.guidance_scale, "negative_prompt": job.negative_prompt}
    if kind == "flux-schnell":
        given["max_sequence_length"] = 256
    if kind == "z-image":
        given["output_type"] = "latent"
    expected = pipeline(
        prompt=job.prompt,
        image=Image.open(job.images[0]),
        mask_image=masked(),
        strength=strength,
        width=WIDTH,
        height=HEIGHT,
        num_inference_steps=STEPS,
        generator=torch.Generator().manual_seed(job.seed),
        **given,
    ).images
    expected = expected if kind == "z-image" else expected[0]
    model = editor(folder)
    job = replace(job, flow_shift=model.card.defaults.flow_shift)
    latents = draw(model, job)
    if kind == "z-image":
        assert torch.equal(latents, expected)
        return
    assert np.array_equal(model.decode_latents(job, latents)[0], np.asarray(expected))


@pytest.mark.parametrize(
    "kind",
    thorough_but(
        ["klein-kv", "krea2"],
        [
            *("klein-kv", "qwen-image-edit-plus", "longcat-edit", "qwen-image-2.1", "flux2-dev"),
            *("krea2", "krea2-turbo", "longcat", "flux3", "flux3-base"),
        ],
    ),
)
def test_latents_outside_the_mask_are_the_sources(
    checkpoint: Checkpoint,
    edit: Callable[[float], ImageJob],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """Of kinds for which the library has no such pipeline."""
    shrink_references(monkeypatch)
    model, job = editor(checkpoint(kind)), edit(0.6)
    kept = model.card.kept_size(Size(HEIGHT, WIDTH))
    job = replace(job, size=SizeRequest(kept.height, kept.width))
    denoiser = begun(model, job)
    made = denoiser._inpainting
    assert made is not None
    drawn = list[Tensor]()
    blend = made.blend

    def seen(latents: Tensor, index: int) -> Tensor:
        drawn.append(blend(latents, index))
        return drawn[-1]

    made.blend = seen  # type: ignore[method-assign]
    latents = denoiser.latents
    for index in range(denoiser.steps):
        latents = denoiser.step(index, latents)
    assert len(drawn) == denoiser.steps == 3
    outside, source = made._mask == 0, made._source
    assert 0 < outside.float().mean() < 1
    assert torch.equal(drawn[-1][outside], source[outside])
    assert not torch.equal(drawn[-1][made._mask == 1], source[made._mask == 1])


def test_a_source_that_no_network_sees_is_its_posteriors_mode(
    checkpoint: Checkpoint, edit: Callable[[float], ImageJob]
) -> None:
    model, job = editor(checkpoint("z-image")), edit(1.0)
    made, vae = begun(model, job)._inpainting, model.have("vae")
    levels = torch.from_numpy(np.array(Image.open(job.images[0]))).permute(2, 0, 1)[None] / 255
    with torch.no_grad():
        mode = vae.encode(levels * 2 - 1).latent_dist.mode()
    assert made is not None
    expected = (mode - vae.config.shift_factor) * vae.config.scaling_factor
    assert torch.allclose(made._source, expected, atol=1e-5)


def test_a_run_draws_in_the_region_only(
    run_cli: Any, write_manifest: Any, tmp_path: Path, checkpoint: Checkpoint, sources: list[str]
) -> None:
    """Its steps, its key and what is told; the source is kept outside."""
    one = line("a", "red", "s0.png", size="auto", num_inference_steps=STEPS, strength=0.6)
    manifest = str(write_manifest(one | {"region": "10,10,50,40", "region_mode": "inpaint"}))
    model, out = str(checkpoint("klein-base")), tmp_path / "out"
    done = run_cli("generate", manifest, "--model", model, "-o", str(out))
    assert "1 done, 0 failed" in done.err, done.err
    found = results(out)["a"]
    assert found["denoise_steps"] == 3
    assert (found["edit"]["region_mode"], found["edit"]["strength"]) == ("inpaint", 0.6)
    assert "the model drew in the region only (inpaint, strength 0.6)" in found["notes"]
    made, source = pixels_of(out)["a"], np.asarray(Image.open(tmp_path / "s0.png"))
    outside = np.ones(source.shape[:2], bool)
    outside[10:40, 10:50] = False
    assert np.array_equal(made[outside], source[outside])
    assert not np.array_equal(made, source)
    again = run_cli("generate", manifest, "--model", model, "-o", str(out))
    assert "0 done, 0 failed, 1 skipped" in again.err
    # Another region or strength is another drawing.
    for more in ({"region": "10,10,50,41"}, {"region": "10,10,50,40", "strength": 0.8}):
        other = str(write_manifest(one | {"region_mode": "inpaint"} | more))
        refused = run_cli("generate", other, "--model", model, "-o", str(out))
        assert refused.code == 2, refused.err
        assert [*more][-1] in refused.err


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"region_mode": "inpaint"}, "inpainting needs a region"),
        ({"region": "1,1,9,9", "strength": 0.5}, "region_mode is limit"),
        ({"region": "1,1,9,9", "region_mode": "inpaint", "strength": 0}, "strength"),
    ],
)
def test_what_cannot_be_inpainted_is_refused(
    run_cli: Any, write_manifest: Any, checkpoint: Checkpoint, sources: list[str],
    more: dict[str, Any], expected: str,
) -> None:  # fmt: skip
    one = line("a", "red", "s0.png", size="auto", num_inference_steps=5, keep_outside=True, **more)
    manifest, model = str(write_manifest(one)), str(checkpoint("klein-base"))
    for command in ("check", "generate"):
        said = run_cli(command, manifest, "--model", model)
        assert expected in said.out + said.err
        assert said.code


def test_a_model_that_cannot_inpaint_says_so(
    run_cli: Any, write_manifest: Any, sources: list[str]
) -> None:
    more = {"region": "1,1,9,9", "region_mode": "inpaint"}
    manifest = str(write_manifest(line("a", "red", "s0.png", size="auto", **more)))
    said = run_cli("check", manifest)
    assert "cannot draw in a region only" in said.out + said.err


@pytest.mark.parametrize(
    ("images", "more", "expected"),
    [
        (1, {}, "give a region and --region-mode inpaint"),
        (1, {"region": "1,1,9,9"}, "z-image sees no source image; it can only draw in a region"),
        (1, {"region": "1,1,9,9", "region_mode": "instead"}, "--region-mode inpaint"),
        (1, {"region_mode": "inpaint", "keep_outside": True}, "inpainting needs a region"),
        (2, {"region": "1,1,9,9", "region_mode": "inpaint"}, "takes at most 1"),
        (1, {"region": "1,1,9,9", "region_mode": "inpaint"}, ""),
    ],
)
def test_a_model_without_sources_takes_one_to_inpaint_it(
    run_cli: Any, write_manifest: Any, checkpoint: Checkpoint, sources: list[str], tmp_path: Path,
    images: int, more: dict[str, Any], expected: str,
) -> None:  # fmt: skip
    one = line("a", "red", *sources[:images], size="auto", num_inference_steps=2, **more)
    manifest, model = str(write_manifest(one)), checkpoint("z-image")
    assert model_card(str(model)).most_sources == 1
    for command in ("check", "generate"):
        said = run_cli(command, manifest, "--model", str(model), "-o", str(tmp_path / "out"))
        assert expected in said.out + said.err
        assert said.code == (2 if expected else 0), said.err


@pytest.mark.parametrize(
    ("kind", "mode"), [("klein-base", "inpaint"), ("z-image", "inpaint"), ("", "instead")]
)
def test_a_mask_of_openais_is_given_to_models_that_inpaint(
    run_cli: Any, write_manifest: Any, tmp_path: Path, checkpoint: Checkpoint, sources: list[str],
    kind: str, mode: str,
) -> None:  # fmt: skip
    clear = Image.new("RGBA", (96, 64), (0, 0, 0, 255))
    clear.paste((0, 0, 0, 0), (10, 10, 50, 40))
    clear.save(tmp_path / "mask.png")
    body = {"prompt": "red", "image": "s0.png", "mask": "mask.png", "seed": 7}
    request = {"custom_id": "a", "method": "POST", "url": "/v1/images/edits", "body": body}
    model = ["--model", str(checkpoint(kind))] if kind else []
    out = tmp_path / "out"
    done = run_cli("generate", str(write_manifest(request)), *model, "-o", str(out), "--steps", "2")
    assert "1 done" in done.err, done.err
    (asked,) = (
        json.loads(one) for one in (out / "manifest.resolved.jsonl").read_text().splitlines()
    )
    assert asked["region_mode"] == mode
    assert (results(out)["a"]["edit"].get("region_mode") == "inpaint") == bool(kind)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("klein-base", {}),
        ("klein-base", {"step_cache": str(StepCache(interval=2, first=1))}),
        pytest.param("qwen-image", {}, marks=pytest.mark.thorough),
        ("z-image", {"step_cache": str(StepCache(interval=2, first=1))}),
    ],
)
def test_inpainting_goes_on_behind_any_step_and_is_replayed(
    run_cli: Any, write_manifest: Any, tmp_path: Path, checkpoint: Checkpoint, sources: list[str],
    monkeypatch: pytest.MonkeyPatch, kind: str, more: dict[str, Any],
) -> None:  # fmt: skip
    one = line("a", "red", "s0.png", size="auto", num_inference_steps=25, strength=0.6, **more)
    manifest = str(write_manifest(one | {"region": "10,10,50,40", "region_mode": "inpaint"}))
    model, whole, out = str(checkpoint(kind)), tmp_path / "whole", tmp_path / "out"
    often = ("--model", model, "--checkpoint-every", "1", "--cache-dir", str(tmp_path / "cache"))
    run_cli("generate", manifest, "-o", str(whole), *often)
    keep = LatentsCheckpoint.keep

    def keep_and_end(self: LatentsCheckpoint, kept: Any) -> None:
        keep(self, kept)
        if kept.step == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LatentsCheckpoint, "keep", keep_and_end)
        run_cli("generate", manifest, "-o", str(out), *often)
    assert not list(out.glob("outputs/*.png"))
    done = run_cli("generate", manifest, "-o", str(out), *often)
    assert "1 done" in done.err, done.err
    assert results(out)["a"]["denoise_steps"] == 13
    assert np.array_equal(pixels_of(out)["a"], pixels_of(whole)["a"])
    picture = str(out / "outputs" / "a.png")
    given = ("--model", model, "--expect-equal", "-o", str(tmp_path / "again"))
    again = run_cli("replay", picture, *given)
    assert not again.code, again.err
