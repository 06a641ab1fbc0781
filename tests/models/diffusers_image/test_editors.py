"""Picture editors of diffusers: the classic pipelines' pixels, whatever a run shares."""

import json
import shutil
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import tiny_editors
import torch
from conftest import thorough_but
from models.diffusers_image.classic import (
    STEPS,
    Checkpoint,
    Line,
    drawn_by_library,
    line,
    pixels_of,
    results,
)
from PIL import Image

from hyimg_cli.errors import CheckpointError, OutputError
from hyimg_cli.loading.checkpoint import parts_index
from hyimg_cli.models.diffusers_image import longcat
from hyimg_cli.models.diffusers_image.record import EditorFolder
from hyimg_cli.models.diffusers_image.table import KINDS
from hyimg_cli.pipelines.latents_checkpoint import LatentsCheckpoint
from hyimg_cli.pipelines.request import confirm_visible

# These take the same path as another of them, with other numbers.
ALIKE = {"klein-base", "qwen-image-edit-2511", "longcat", "krea2-turbo"}
# Of each way to read a text, and with guidance as an input.
NEW = ("flux2-dev", "flux3", "flux-dev", "flux-schnell", "krea2", "krea2-turbo")
DISTILLED = {"klein", "flux3", "flux-schnell", "krea2-turbo"}
LAYERED = "qwen-image-layered"  # see test_layers
UNSHARED = {kind for kind in tiny_editors.PIPELINES if "2.1" not in kind} - {"klein-kv", LAYERED}


@pytest.mark.parametrize("kind", thorough_but(UNSHARED - ALIKE, sorted(UNSHARED)))
def test_pixels_are_the_librarys_whatever_is_shared(
    run_cli: Any, write_manifest: Any, tmp_path: Path, checkpoint: Checkpoint, sources: list[str],
    kind: str,
) -> None:  # fmt: skip
    """In one run, in the other order, and by the classic pipeline called job by job."""
    folder = checkpoint(kind)
    sets: list[tuple[str, ...]] = {
        "qwen-image-edit": [("s0.png",), ("s1.png",)],
        "qwen-image-edit-plus": [("s0.png",), ("s1.png", "s0.png", "s1.png")],
        "qwen-image-edit-2511": [("s1.png", "s0.png")],
        "klein": [(), ("s0.png",), ("s1.png", "s0.png")],
        "klein-base": [(), ("s0.png", "s1.png")],
        "flux2-dev": [(), ("s0.png",), ("s1.png", "s0.png")],
        "flux3": [(), ("s0.png",), ("s1.png",), ("s1.png", "s0.png")],
        "flux3-base": [(), ("s1.png",), ("s0.png", "s1.png")],
        "kontext": [(), ("s0.png",), ("s1.png",)],
        "longcat-edit": [("s0.png",), ("s1.png",)],
    }.get(kind, [()])
    lines = [line(f"{number}", "red", *images) for number, images in enumerate(sets)]
    if kind not in DISTILLED:
        # Z-Image and FLUX.3 refuse other sizes, and Krea 2 rounds them up.
        odd = "160x128" if kind in ("z-image", "krea2", "flux3-base") else "107x90"
        lines.append(line("plain", "blue", *sets[0], guidance_scale=1, seed=8, size=odd))
    if kind.startswith(("krea2", "flux-")):
        scale = {} if kind in DISTILLED else {"guidance_scale": 0}
        lines += [line(f"seed-{seed}", "a blue dog", seed=seed, **scale) for seed in (3, 4)]
    if not kind.startswith(("klein", "kontext", "flux-", "flux2")) and kind not in DISTILLED:
        lines += [
            line(f"away-{text}", "red", *sets[0], negative_prompt=text) for text in ("", "green")
        ]
    without = {
        "longcat-edit": lines,
        "klein": lines[1:],
        "flux3": lines[1:],
        "flux3-base": lines[1:3],
    }
    for one in without.get(kind, ()):
        del one["size"]
    out, back = tmp_path / "out", tmp_path / "back"
    manifest = str(write_manifest(*lines))
    first = run_cli("generate", manifest, "--model", str(folder), "-o", str(out))
    assert f"{len(lines)} done, 0 failed" in first.err
    turned = str(write_manifest(*lines[::-1]))
    second = run_cli("generate", turned, "--model", str(folder), "-o", str(back))
    assert f"{len(lines)} done, 0 failed" in second.err
    found, again = pixels_of(out), pixels_of(back)
    for one in lines:
        name = one["custom_id"]
        assert np.array_equal(found[name], drawn_by_library(folder, one, tmp_path)), name
        assert np.array_equal(found[name], again[name]), name


def test_attention_has_no_mask_that_masks_nothing(
    run_cli: Any, write_manifest: Any, tmp_path: Path, checkpoint: Checkpoint, sources: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """As in the classic pipeline: pixels are the same with one, and each step takes longer."""
    network: Any = diffusers.QwenImageTransformer2DModel
    masks, forward = list[Any](), network.forward

    def seen(self: Any, *arguments: Any, **named: Any) -> Any:
        masks.append(named["encoder_hidden_states_mask"])
        return forward(self, *arguments, **named)

    monkeypatch.setattr(network, "forward", seen)
    manifest = str(write_manifest(line("a", "red", "s0.png")))
    model = str(checkpoint("qwen-image-edit-plus"))
    run_cli("generate", manifest, "--model", model, "-o", str(tmp_path / "out"))
    assert masks
    assert set(masks) == {None}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["qwen-image-edit", "kontext", "longcat-edit", "klein"])
def test_an_edit_without_a_size_has_the_librarys_own(
    run_cli: Any, write_manifest: Any, tmp_path: Path, checkpoint: Checkpoint, sources: list[str],
    kind: str,
) -> None:  # fmt: skip
    """A million pixels, whatever the checkpoint's card says of practice."""
    folder = tmp_path / kind
    shutil.copytree(checkpoint(kind), folder)
    (folder / "card.json").unlink()
    one = line("a", "red", "s1.png")
    del one["size"]
    manifest = str(write_manifest(one))
    run_cli("generate", manifest, "--model", str(folder), "-o", str(tmp_path / "out"))
    expected = drawn_by_library(folder, one, tmp_path)
    assert np.array_equal(pixels_of(tmp_path / "out")["a"], expected)


@pytest.mark.parametrize(
    ("kind", "stop"),
    [
        pytest.param("qwen-image-edit", 1, marks=pytest.mark.thorough),
        *(("qwen-image-edit", STEPS), ("kontext", 2), ("longcat-edit", 1)),
        *(("qwen-image-2.1", 1), ("klein-kv", 2)),
        *(pytest.param(kind, 2, marks=pytest.mark.thorough) for kind in NEW),
    ],
)
def test_a_run_that_ends_behind_any_step_goes_on_there(
    run_cli: Any, write_manifest: Any, tmp_path: Path, checkpoint: Checkpoint, sources: list[str],
    monkeypatch: pytest.MonkeyPatch, kind: str, stop: int,
) -> None:  # fmt: skip
    images = sources[: KINDS[tiny_editors.PIPELINES[kind]].most][:1]
    manifest = str(write_manifest(line("a", "red", *images, size="auto")))
    model, whole = str(checkpoint(kind)), tmp_path / "whole"
    often = ("--checkpoint-every", "1", "--cache-dir", str(tmp_path / "cache"))
    run_cli("generate", manifest, "--model", model, "-o", str(whole), *often)
    out, keep = tmp_path / "out", LatentsCheckpoint.keep

    def keep_and_end(self: LatentsCheckpoint, kept: Any) -> None:
        keep(self, kept)
        if kept.step == stop:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LatentsCheckpoint, "keep", keep_and_end)
        run_cli("generate", manifest, "--model", model, "-o", str(out), *often)
    assert not list(out.glob("outputs/*.png"))
    run_cli("generate", manifest, "--model", model, "-o", str(out), *often)
    assert np.array_equal(pixels_of(out)["a"], pixels_of(whole)["a"])
    done = results(out)["a"]
    assert done["denoise_steps"] == STEPS - stop
    assert not list(out.glob("latents/*"))


@pytest.mark.parametrize(
    "kind",
    thorough_but(
        ["qwen-image-edit-plus", "klein", "kontext", "longcat-edit"],
        ["qwen-image-edit-plus", "klein", "flux2-dev", "flux3", "kontext", "longcat-edit"],
    ),
)
def test_an_edit_keeps_its_source_outside_and_is_replayed(
    run_cli: Any, write_manifest: Any, tmp_path: Path, checkpoint: Checkpoint, sources: list[str],
    kind: str,
) -> None:  # fmt: skip
    box = {"keep_outside": True, "region": "10,10,40,40", "region_mode": "instead"}
    kept = line("kept", "red", "s1.png") | box
    del kept["size"]
    manifest, model = str(write_manifest(kept)), str(checkpoint(kind))
    out = tmp_path / "out"
    run_cli("generate", manifest, "--model", model, "-o", str(out))
    made, source = pixels_of(out)["kept"], np.asarray(Image.open(tmp_path / "s1.png"))
    assert made.shape == source.shape
    outside = np.ones(source.shape[:2], bool)
    outside[10:40, 10:40] = False
    assert np.array_equal(made[outside], source[outside])
    assert not np.array_equal(made, source)
    shown = np.asarray(Image.open(out / "outputs" / "kept.reference.png"))
    given = np.asarray(Image.fromarray(source).resize(shown.shape[1::-1], Image.Resampling.LANCZOS))
    parts = json.loads(parts_index(checkpoint(kind)).read_text())
    vae = getattr(diffusers, parts["vae"][1]).from_pretrained(f"{model}/vae")
    to_pixels = diffusers.image_processor.VaeImageProcessor()
    frames = (None,) if "Qwen" in parts["vae"][1] else ()
    pixels = to_pixels.preprocess(given / 255.0).float()
    with torch.no_grad():
        latents = vae.encode(pixels[(slice(None), slice(None), *frames)]).latent_dist
        back = vae.decode(latents.mode()).sample
    trip = to_pixels.postprocess(back[:, :, 0] if frames else back, output_type="np")[0] * 255
    assert np.abs(trip - shown).max() <= 1, "what the VAE loses is no edit"
    picture = str(out / "outputs" / "kept.png")
    again = run_cli(
        "replay", picture, "--model", model, "--expect-equal", "--images-from", str(tmp_path)
    )
    assert again.code == 0, again.err


def test_an_edit_of_the_whole_that_fails_is_finished_from_its_redraw(
    run_cli: Any, write_manifest: Any, tmp_path: Path, checkpoint: Checkpoint, sources: list[str]
) -> None:
    """Another finishing draws nothing anew, and its line says nothing of the attempt before."""
    kept = line("kept", "red", "s1.png", keep_outside=True, on_global="fail")
    del kept["size"]
    model, out = str(checkpoint("klein")), tmp_path / "out"
    failed = run_cli("generate", str(write_manifest(kept)), "--model", model, "-o", str(out))
    assert "outside.global" in failed.err
    assert "its denoised latents are saved" in failed.err
    other = str(write_manifest(kept | {"on_global": "keep"}))
    again = run_cli("generate", other, "--model", model, "-o", str(out))
    assert "1 edit finished again from the saved redraws" in again.err
    done = results(out)["kept"]
    assert done["status"] == "done"
    said = [*done["warnings"], *done["notes"]]
    assert [text for text in said if "latents" in text] == []
    assert not (out / "latents").exists()


@pytest.mark.parametrize(
    ("kind", "more", "code"),
    [
        ("qwen-image", {"images": ["s0.png"], "task": "it2i"}, "too-many-images"),
        ("qwen-image-edit", {}, "task"),
        ("qwen-image-edit", {"images": ["s0.png", "s1.png"], "task": "it2i"}, "too-many-images"),
        ("qwen-image-edit-plus", {"images": ["s0.png"] * 6, "task": "it2i"}, "too-many-images"),
        ("klein", {"guidance_scale": 3.0}, "not-followed"),
        ("klein", {"negative_prompt": "green"}, "not-followed"),
        ("klein", {"flow_shift": 2.0}, "not-followed"),
        ("qwen-image", {"bot_task": "think"}, "not-followed"),
        ("qwen-image", {"prompt": "a <|image_pad|>"}, "control-token"),
    ],
)
def test_what_a_model_does_not_take_is_refused_by_name(
    run_cli: Any, write_manifest: Any, tmp_path: Path, checkpoint: Checkpoint, sources: list[str],
    kind: str, more: Line, code: str,
) -> None:  # fmt: skip
    manifest = str(write_manifest(line("a", "red") | more))
    found = run_cli("check", manifest, "--model", str(checkpoint(kind)), "--json")
    assert found.json_lines[0]["fault"]["code"] == f"manifest.{code}"


def test_a_picture_of_one_colour_is_no_picture() -> None:
    with pytest.raises(OutputError, match="the same"):
        confirm_visible(np.zeros((4, 4, 3), np.uint8))


@pytest.mark.parametrize(
    ("change", "code", "hint"),
    [
        ({"_class_name": "FluxFillPipeline"}, "checkpoint.family", "supported are QwenImage"),
        ({"_class_name": "StableDiffusionXLPipeline"}, "checkpoint.family", "ComfyUI or dgenerate"),
        ({"_class_name": "StableDiffusionPipeline"}, "checkpoint.family", "ComfyUI or dgenerate"),
        ({"vae": ["my_code", "Vae"]}, "checkpoint.component", "never executed"),
        ({"transformer": ["diffusers", "FluxTransformer2DModel"]}, "checkpoint.component", "use"),
    ],
)
def test_another_pipeline_and_foreign_code_are_refused(
    tmp_path: Path, checkpoint: Checkpoint, change: Line, code: str, hint: str
) -> None:
    index = json.loads((checkpoint("qwen-image") / "model_index.json").read_text())
    folder = tmp_path / "changed"
    shutil.copytree(checkpoint("qwen-image"), folder)
    (folder / "model_index.json").write_text(json.dumps(index | change))
    with pytest.raises(CheckpointError) as caught:
        EditorFolder(folder, "x")
    assert caught.value.code == code
    assert hint in str(caught.value.hint)


def test_the_library_has_every_pipeline_of_the_table() -> None:
    for name in KINDS:
        assert hasattr(diffusers, name)
        assert hasattr(diffusers, KINDS[name].blocks) or hasattr(longcat, KINDS[name].blocks)


@pytest.mark.parametrize(
    ("kind", "scheduler", "sampling"),
    [
        ("z-image", {"shift": 6.0}, (50, 5.0)),
        ("z-image", {"shift": 3.0}, (8, 0.0)),
        ("longcat-edit", {"base_shift": 0.5, "max_shift": 1.15}, (50, 4.5)),
        ("longcat-edit", {"base_shift": 1.15, "max_shift": 1.15}, (8, 1.0)),
    ],
)
def test_a_distilled_release_is_known_by_its_scheduler(
    tmp_path: Path, checkpoint: Checkpoint, kind: str, scheduler: Line, sampling: tuple[int, float]
) -> None:
    folder = tmp_path / "released"
    shutil.copytree(checkpoint(kind), folder)
    file = folder / "scheduler" / "scheduler_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | scheduler))
    own = EditorFolder(folder, "x").card.defaults
    assert (own.num_inference_steps, own.guidance_scale) == sampling
