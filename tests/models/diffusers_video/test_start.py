"""Image-to-video equals diffusers' own pipelines, latents and pixels, for every family.

diffusers gets the picture and a fresh pipeline from the same folder; both sides start from disk,
with random weights, so any slip (order of channels, mask, fit, tokens) moves every value.
"""

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from library_weights import copy_weights
from models.diffusers_video.stock import take_stock_forward
from PIL import Image
from processors import is_same
from tiny_video import START_KINDS, write_start
from torch import Tensor

from hyimg_cli.journal.keys import source_digest
from hyimg_cli.media.images import read_image
from hyimg_cli.models import registry
from hyimg_cli.models.diffusers_video.model import DiffusersVideo
from hyimg_cli.models.diffusers_video.start import crop_to
from hyimg_cli.models.latent import PromptEmbedding
from hyimg_cli.models.latent_video import LATENTS, TOKENS
from hyimg_cli.settings.run import ModelChoice
from hyimg_cli.spec.job import Size, VideoJob
from hyimg_cli.spec.options import Lora

FOLDERS = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> FOLDERS:
    """The checkpoint of a kind, written at its first use."""
    top = tmp_path_factory.mktemp("start")
    return cache(lambda kind: write_start(top / kind, kind))


@pytest.fixture(scope="module")
def model_of(folder_of: FOLDERS) -> Callable[[str], DiffusersVideo]:
    """Whole decodes and encodes, and the library's own forward: to the bit."""

    def loaded(kind: str) -> DiffusersVideo:
        choice = ModelChoice(
            str(folder_of(kind)), dtype="float32", device="cpu", vae_use_tiling=False
        )
        return take_stock_forward(registry.load_video(choice))

    return cache(loaded)


@pytest.fixture(scope="module")
def pipeline_of(folder_of: FOLDERS) -> Callable[[str], Any]:
    """The library's, from the same folder."""

    def loaded(kind: str) -> Any:
        is_hunyuan = kind in ("hunyuan", "distilled")
        name = "HunyuanVideo15" if is_hunyuan else "Wan"
        cls = getattr(diffusers, f"{name}ImageToVideoPipeline")
        pipeline = cls.from_pretrained(folder_of(kind), dtype=torch.float32, local_files_only=True)
        copy_weights(pipeline).set_progress_bar_config(disable=True)
        return pipeline

    return cache(loaded)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A first and a last frame, of another shape than any video."""
    folder, dice = tmp_path_factory.mktemp("pictures"), np.random.default_rng(3)
    paths = []
    for name in ("first", "last"):
        coarse = Image.fromarray(dice.integers(0, 256, (6, 9, 3), dtype=np.uint8))
        coarse.resize((90, 70)).save(folder / f"{name}.png")
        paths.append(str(folder / f"{name}.png"))
    return paths[0], paths[1]


def start_job(kind: str, folder: Path, pictures: tuple[str, str], **changes: Any) -> VideoJob:
    card = registry.video_card(str(folder))
    assert card.start is not None
    facts: dict[str, Any] = {
        "size": card.start.size_for(Size(70, 90)) if card.start.sizes else Size(32, 64),
        "guidance_scale": 1.0 if kind == "distilled" else 4.0,
        "guidance_scale_2": 3.0 if kind == "a14b" else None,
        "images": pictures if kind == "flf" else pictures[:1],
        "fit": card.start.fit,
        "num_frames": 9,
        "num_inference_steps": 3,
        "flow_shift": 5.0,
    }
    return VideoJob(
        custom_id="job", task="i2v", prompt="the ball rolls", negative_prompt="blurry",
        model=str(folder), seed=3, fps=8, **(facts | changes),
    )  # fmt: skip


def encoded(model: DiffusersVideo, job: VideoJob) -> dict[str, PromptEmbedding]:
    digests = [source_digest(path) for path in job.images]
    views = model.pictures.views(job, digests)
    return {view.kind: model.pictures.encode(view) for view in views}


def latents_of(model: DiffusersVideo, job: VideoJob) -> Tensor:
    found = model.conditions(job, [source_digest(path) for path in job.images])
    denoiser = model.denoiser(
        job, {one: model.encoders[kind].encode(one) for one, kind in found.items()}
    )
    latents = denoiser.latents
    for index in range(denoiser.steps):
        latents = denoiser.step(index, latents)
    return latents


def embeddings_of(model: DiffusersVideo, job: VideoJob) -> dict[str, Any]:
    """The prompts as Wan's pipeline takes them; its own cleaning needs ftfy."""
    made: dict[str, Any] = {}
    for name, text in zip(
        ("prompt_embeds", "negative_prompt_embeds"), model.texts(job), strict=False
    ):
        valid = model.prompts.encode(text).tensors["text"]
        padded = valid.new_zeros(1, 512, valid.shape[1])
        padded[0, : len(valid)] = valid
        made[name] = padded
    return made


def plain(pipeline: Any, model: DiffusersVideo, job: VideoJob, output: str = "latent") -> Any:
    """What the library makes of a job."""
    first, *last = [Image.fromarray(read_image(Path(path)).pixels) for path in job.images]
    options: dict[str, Any] = {}
    if "Hunyuan" in type(pipeline).__name__:
        pipeline.guider = pipeline.guider.new(guidance_scale=job.guidance_scale)
        shift = {"shift": job.flow_shift}
        options = {"prompt": job.prompt, "negative_prompt": job.negative_prompt}
    else:
        shift = {"flow_shift": job.flow_shift}
        options = embeddings_of(model, job) | {
            "height": job.size.height,
            "width": job.size.width,
            "guidance_scale": job.guidance_scale,
            "guidance_scale_2": job.guidance_scale_2,
            "last_image": last[0] if last else None,
        }
    pipeline.scheduler = pipeline.scheduler.from_config(pipeline.scheduler.config, **shift)
    return pipeline(
        image=first,
        num_frames=job.num_frames,
        num_inference_steps=job.num_inference_steps,
        generator=torch.Generator().manual_seed(job.seed),
        output_type=output,
        **options,
    ).frames


@pytest.mark.parametrize("kind", START_KINDS)
def test_latents_are_the_pipelines(
    kind: str,
    folder_of: FOLDERS,
    model_of: Any,
    pipeline_of: Any,
    pictures: tuple[str, str],
    tmp_path: Path,
) -> None:
    """Two sizes and two lengths each; pixels, too, whole."""
    model, pipeline = model_of(kind), pipeline_of(kind)
    steps = 2 if kind == "hunyuan" else 3
    job = start_job(kind, folder_of(kind), pictures, num_inference_steps=steps)
    assert is_same(latents_of(model, job), plain(pipeline, model, job))
    other = replace(job, num_frames=5, num_inference_steps=1, seed=8)
    if model.card.start.sizes:
        # HunyuanVideo's pipeline takes the picture's own size alone.
        tall = tmp_path / "tall.png"
        Image.open(pictures[0]).resize((50, 90)).save(tall)
        other = replace(other, images=(str(tall),), size=model.card.start.size_for(Size(90, 50)))
    else:
        other = replace(other, size=Size(64, 32))
    assert other.size != job.size
    found = latents_of(model, other)
    assert is_same(found, plain(pipeline, model, other))
    frames = np.concatenate(list(model.decode_latents(found)))
    video = plain(pipeline, model, other, "np")[0]
    assert is_same(frames, (video * 255).round().astype(np.uint8))


@pytest.mark.parametrize("kind", ["wan21", "5b", "hunyuan"])
def test_pixels_are_the_pipelines_in_tiles_too(
    kind: str, folder_of: FOLDERS, pipeline_of: Any, model_of: Any, pictures: tuple[str, str]
) -> None:
    """Larger than a tile, so that the picture's encode is cut as the decode is."""
    choice = ModelChoice(str(folder_of(kind)), dtype="float32", device="cpu")
    model = take_stock_forward(registry.load_video(choice))
    size = (
        Size(32, 272 if kind == "wan21" else 288)
        if kind != "hunyuan"
        else model.card.start.size_for(Size(70, 90))
    )
    job = start_job(kind, folder_of(kind), pictures, size=size, num_frames=5)
    job = replace(job, num_inference_steps=1, guidance_scale=1.0, guidance_scale_2=None)
    pipeline = pipeline_of(kind)
    pipeline.vae.enable_tiling()
    video = plain(pipeline, model, job, "np")[0]
    pipeline.vae.disable_tiling()
    own = np.concatenate(list(model.decode_latents(latents_of(model, job))))
    assert own.std() > 10
    assert np.array_equal(own, (video * 255).round().astype(np.uint8))
    if kind == "wan21":
        # The two tilings of the encode do differ.
        whole = encoded(model_of(kind), job)[LATENTS].tensors[LATENTS]
        assert not torch.equal(whole, encoded(model, job)[LATENTS].tensors[LATENTS])


def test_what_the_network_is_given(
    folder_of: FOLDERS, model_of: Any, pictures: tuple[str, str]
) -> None:
    """Noise, mask, picture; of a last frame the mask has its last sub-frame alone; the 5B model has
    nothing to denoise in the first latent frame.
    """
    seen: dict[str, dict[str, Any]] = {}
    for kind in ("wan21", "flf", "5b", "distilled"):
        model = model_of(kind)
        job = start_job(kind, folder_of(kind), pictures, num_inference_steps=4, flow_shift=7.0)
        calls: list[dict[str, Any]] = []
        handle = model.networks[0].register_forward_pre_hook(
            lambda _module, _args, given, calls=calls: calls.append(given), with_kwargs=True
        )
        latents_of(model, job)
        handle.remove()
        seen[kind] = {"calls": calls, "views": encoded(model, job)}
    given = seen["wan21"]["calls"][0]["hidden_states"]
    assert given.shape[1] == 36
    assert torch.equal(given[0, 16:20, :, 0, 0], torch.tensor([[1.0, 0, 0]] * 4))
    assert torch.equal(given[0, 20:], seen["wan21"]["views"][LATENTS].tensors[LATENTS])
    of_two = seen["flf"]["calls"][0]["hidden_states"][0, 16:20, :, 0, 0]
    assert of_two.tolist() == [[1, 0, 0]] * 3 + [[1, 0, 1]]
    call = seen["5b"]["calls"][0]
    rows = call["timestep"][0].view(call["hidden_states"].shape[2], -1)
    assert bool((rows[0] == 0).all())
    assert bool((rows[1:] == rows[1, 0]).all())
    assert float(rows[1, 0]) > 900
    picture = seen["5b"]["views"][LATENTS].tensors[LATENTS]
    assert torch.equal(call["hidden_states"][0, :, :1], picture)
    pairs = [
        (round(c["timestep"].item(), 1), round(c["timestep_r"].item(), 1))
        for c in seen["distilled"]["calls"]
    ]
    assert pairs == [(1000, 954.5), (954.5, 875), (875, 700), (700, 0)]


def test_a_picture_that_is_fitted_otherwise_is_encoded_again(
    folder_of: FOLDERS, model_of: Any, pictures: tuple[str, str]
) -> None:
    """Of one picture, size and length: stretched and cut are two pictures to the VAE."""
    model = registry.load_video(ModelChoice(str(folder_of("a14b")), dtype="float32", device="cpu"))
    job = start_job("a14b", folder_of("a14b"), pictures)
    for runs, fit in enumerate(("stretch", "crop", "stretch"), 1):
        found = encoded(model, replace(job, fit=fit))[LATENTS].tensors[LATENTS]
        assert model.pictures.encoder_runs["vae"] == runs
        other = replace(job, fit=fit, num_frames=13)  # nothing there to take it from
        own = encoded(model_of("a14b"), other)[LATENTS].tensors[LATENTS][:, : found.shape[1]]
        assert torch.equal(found, own)


def test_the_key_of_a_view_is_of_what_decides_it(
    folder_of: FOLDERS, model_of: Any, pictures: tuple[str, str]
) -> None:
    model, job = model_of("wan21"), start_job("wan21", folder_of("wan21"), pictures)

    def keys(job: VideoJob, digests: list[str] | None = None) -> dict[str, str]:
        found = model.pictures.views(job, digests or ["a" * 64] * len(job.images))
        return {view.kind: model.pictures.key(view) for view in found}

    own = keys(job)
    lora = (Lora("style.safetensors"),)
    for same in ({"seed": 9}, {"num_inference_steps": 1}, {"images": ("b",)}, {"lora": lora}):
        assert keys(replace(job, prompt="x", **same)) == own
    for change in ({"size": Size(64, 64)}, {"num_frames": 13}, {"fit": "crop"}):
        other = keys(replace(job, **change))
        # The image encoder sees the picture as it is.
        assert (other[TOKENS], other[LATENTS] == own[LATENTS]) == (own[TOKENS], False)
    assert not set(keys(job, ["b" * 64]).values()) & set(own.values())
    # A last picture is a part of both.
    last = keys(replace(job, images=pictures), ["a" * 64, "b" * 64])
    assert not set(last.values()) & set(own.values())
    model.pictures.is_tiled = True
    assert keys(job)[LATENTS] != own[LATENTS]
    model.pictures.is_tiled = False


def test_the_key_of_a_view_is_of_the_vaes_file_and_of_the_dtype(
    folder_of: FOLDERS, pictures: tuple[str, str], tmp_path: Path
) -> None:
    """HunyuanVideo's VAE works in the model's dtype; Wan's is in float32 whatever that is."""

    def keys(kind: str, folder: Path, dtype: Any) -> set[str]:
        model = registry.load_video(ModelChoice(str(folder), dtype=dtype, device="cpu"))
        views = model.pictures.views(start_job(kind, folder, pictures), ["a" * 64])
        return {model.pictures.key(view) for view in views}

    for kind, is_other in (("hunyuan", True), ("a14b", False)):
        wide, narrow = (keys(kind, folder_of(kind), dtype) for dtype in ("float32", "bfloat16"))
        assert (not wide & narrow) == is_other
    shutil.copytree(folder_of("a14b"), tmp_path / "other")
    file = next((tmp_path / "other/vae").glob("*.safetensors"))
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert not keys("a14b", tmp_path / "other", "float32") & keys(
        "a14b", folder_of("a14b"), "float32"
    )


def test_pictures_of_any_kind_are_seen_as_what_they_show(
    folder_of: FOLDERS, model_of: Any, pictures: tuple[str, str], tmp_path: Path
) -> None:
    """Turned by EXIF, with an alpha channel, grey, with a palette: as the RGB picture of it."""
    model, shown = model_of("wan21"), Image.open(pictures[0]).convert("RGB")
    job = start_job("wan21", folder_of("wan21"), pictures)
    turned, exif = shown.transpose(Image.Transpose.ROTATE_90), Image.Exif()
    exif[274] = 6  # to be shown turned by 90 degrees, clockwise
    turned.save(tmp_path / "turned.png", exif=exif)
    shown.convert("RGBA").save(tmp_path / "alpha.png")
    grey, palette = shown.convert("L"), shown.quantize(16)
    for name, one in (("grey", grey), ("palette", palette)):
        one.save(tmp_path / f"{name}.png")
        one.convert("RGB").save(tmp_path / f"{name}-rgb.png")

    def views(path: str | Path) -> dict[str, Tensor]:
        found = encoded(model, replace(job, images=(str(path),)))
        return {kind: view.tensors[kind] for kind, view in found.items()}

    plain_views = views(pictures[0])
    expected = {"turned": plain_views, "alpha": plain_views}
    expected |= {name: views(tmp_path / f"{name}-rgb.png") for name in ("grey", "palette")}
    for name, of_rgb in expected.items():
        own = views(tmp_path / f"{name}.png")
        assert own.keys() == of_rgb.keys() == {TOKENS, LATENTS}
        assert all(torch.equal(own[kind], of_rgb[kind]) for kind in own), name
    assert not torch.equal(expected["grey"][TOKENS], plain_views[TOKENS])


@pytest.mark.parametrize(
    ("ratio", "shift", "first"), [(0.9, 5, 15), (0.9, 3, 11), (0.875, 12, 26), (0.875, 3, 13)]
)
def test_the_pair_switches_at_the_boundary(
    folder_of: FOLDERS,
    model_of: Any,
    pictures: tuple[str, str],
    ratio: float,
    shift: int,
    first: int,
) -> None:
    """Of 40 steps; counted of the library's loop."""
    model = model_of("a14b")
    job = start_job("a14b", folder_of("a14b"), pictures, num_inference_steps=40, flow_shift=shift)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(model.layout.index.values, "boundary_ratio", ratio)
        assert model.network_of(model.schedule(job)) == [0] * first + [1] * (40 - first)


@pytest.mark.parametrize("target", [(640, Size(480, 816)), (960, Size(736, 1248))])
def test_hunyuans_sizes_are_the_librarys(target: tuple[int, Size]) -> None:
    from diffusers.pipelines.hunyuan_video1_5.image_processor import HunyuanVideo15ImageProcessor

    from hyimg_cli.models.diffusers_video.record import start_rule

    side, of_wide = target
    rule, library = start_rule(side, 16), HunyuanVideo15ImageProcessor(vae_scale_factor=16)
    for height, width in ((9, 16), (16, 9), (1, 1), (3, 4), (2, 3), (9, 21), (480, 832), (1, 10)):
        expected = library.calculate_default_height_width(height, width, side)
        assert rule.size_for(Size(height, width)) == Size(*expected)
    assert rule.size_for(Size(480, 832)) == of_wide
    if side == 960:
        assert rule.size_for(Size(16, 9)) == Size(1264, 720)


def test_a_cropped_picture_is_the_librarys(pictures: tuple[str, str]) -> None:
    from diffusers.image_processor import VaeImageProcessor

    pixels = read_image(Path(pictures[0])).pixels
    for size in (Size(32, 64), Size(48, 16), Size(99, 97)):
        expected = VaeImageProcessor(vae_scale_factor=8).resize(
            Image.fromarray(pixels), size.height, size.width, resize_mode="crop"
        )
        assert np.array_equal(crop_to(pixels, size), np.array(expected))
