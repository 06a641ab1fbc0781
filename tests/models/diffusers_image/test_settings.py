"""Settings of memory, of the transformer and of the schedule, on editors: diffusers' bits if
they promise them.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import thorough_but
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImageTransformer2DModel
from models.diffusers_image.classic import (
    Checkpoint,
    drawn_by_library,
    line,
    pixels_of,
    results,
)
from models.diffusers_video.test_lora import in_librarys_names, matrices, write
from torch import Tensor, nn

from hyimg_cli.journal.keys import source_digest
from hyimg_cli.kernels.offload import Offload
from hyimg_cli.models import registry
from hyimg_cli.models.diffusers_image import model as editors
from hyimg_cli.models.diffusers_image.model import BlockDenoiser, LatentImageModel
from hyimg_cli.models.latent import PromptEmbedding
from hyimg_cli.pipelines.latents_checkpoint import LatentsCheckpoint
from hyimg_cli.settings.run import ModelChoice
from hyimg_cli.spec.job import ImageJob
from hyimg_cli.spec.step_cache import StepCache

# What the authors of Qwen-Image's Lightning set: a shift of 3 at every size.
LIGHTNING = {
    "base_shift": math.log(3),
    "max_shift": math.log(3),
    "shift": 1.0,
    "shift_terminal": None,
    "use_dynamic_shifting": True,
    "time_shift_type": "exponential",
}
# Z-Image's two branches are one batch in the library's pipeline, which rounds differently.
UNGUIDED = {
    "qwen-image": 1,
    "qwen-image-edit-plus": 1,
    "klein": 1,
    "z-image": 0,
    "longcat": 1,
    "kontext": 1,
    "flux-dev": 1,
    "flux3-base": 1,
    "krea2": 0,
    "qwen-image-2.1": 1,
}
Draw = Callable[[LatentImageModel, ImageJob], Tensor]


def editor(folder: Path, **how: Any) -> LatentImageModel:
    return registry.load_editor(ModelChoice(str(folder), dtype="float32", device="cpu", **how))


def begun(model: LatentImageModel, job: ImageJob) -> BlockDenoiser:
    known: dict[Any, PromptEmbedding] = model.__dict__.setdefault("known", {})
    conditions = model.conditions(job, [source_digest(path) for path in job.images])
    for one in conditions:
        if one not in known:
            known[one] = model.encoder.encode(one)
    return model.denoiser(job, {one: known[one] for one in conditions})


def draw(model: LatentImageModel, job: ImageJob) -> Tensor:
    denoiser = begun(model, job)
    latents = denoiser.latents
    for index in range(denoiser.steps):
        latents = denoiser.step(index, latents)
    return latents


def fitting(job: ImageJob, kind: str) -> ImageJob:
    return job if "klein" in kind else replace(job, task="t2i", images=())


DRAWERS = [
    "qwen-image",
    "klein-base",
    "z-image",
    "kontext",
    "longcat",
    "qwen-image-2.1",
    "klein-kv",
    "flux2-dev",
    "flux3",
    "flux-schnell",
    "krea2",
]


@pytest.mark.parametrize("kind", thorough_but(["qwen-image", "klein-base", "longcat"], DRAWERS))
def test_the_same_bits_with_one_network_on_the_device_at_a_time(
    checkpoint: Checkpoint, job: ImageJob, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Never two of them there: each is seen at work away from home, the others at home."""
    job = fitting(job, kind)
    origins = {name: getattr(editors, name) for name in ("load_weights", "load_network")}

    def copied(part: Any, *given: Any, load: Any, **named: Any) -> Any:
        """Weights are moved to copies: on some processors sums depend on how addresses are aligned,
        and those that a file is mapped to are not.
        """
        module = load(part, *given, **named)
        for one in module.parameters():
            one.data = one.data.clone()
        return module

    for name, load in origins.items():
        monkeypatch.setattr(editors, name, partial(copied, load=load))
    expected = draw(plain := editor(checkpoint(kind)), job)
    expected_pixels = plain.decode_latents(job, expected)
    homes: dict[str, list[tuple[Tensor, int]]] = {}
    seen: list[str] = []

    def away(name: str) -> bool:
        return any(one.data_ptr() != home for one, home in homes[name])

    def at_work(name: str) -> None:
        seen.append(name)
        # Kontext's texts are encoded by two networks at once.
        stage = name.removesuffix("_2")
        assert [one for one in homes if away(one)] == [
            one for one in homes if one.startswith(stage)
        ]

    for name, load in origins.items():

        def watched(part: Any, *given: Any, load: Any = load, **named: Any) -> Any:
            module = load(part, *given, **named)
            homes[part.name] = [(one, one.data_ptr()) for one in module.parameters() if one.numel()]
            for inner in module.modules():
                inner.register_forward_pre_hook(lambda *_: at_work(part.name))
            return module

        monkeypatch.setattr(editors, name, watched)
    for how in ("model", "group"):
        homes.clear()
        seen.clear()
        model = editor(checkpoint(kind), cpu_offload=how)
        model.load_weights()
        assert not any(map(away, homes)), "nothing is brought before its work"
        found = draw(model, job)
        assert torch.equal(found, expected)
        assert np.array_equal(model.decode_latents(job, found), expected_pixels)
        turns = [name for name, _ in groupby(seen)]
        encoders = ["text_encoder"] + ["text_encoder_2"] * (kind in ("kontext", "flux-schnell"))
        encoders += ["vae"] * len(job.images)
        assert turns == [*encoders, "transformer", "vae"]


def test_where_work_is_done_is_never_where_networks_wait(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library would ask the first of its networks."""
    model = editor(checkpoint("qwen-image"), cpu_offload="model")
    model.load_weights()
    place = replace(model.place, offload=Offload(torch.device("meta")))
    monkeypatch.setattr(model, "place", place)
    assert model.pipe._execution_device == torch.device("meta")


@pytest.mark.parametrize("kind", ["qwen-image", "klein", "z-image"])
def test_fp8_holds_the_blocks_in_8_bits(checkpoint: Checkpoint, job: ImageJob, kind: str) -> None:
    job = fitting(job, kind)
    exact, model = draw(editor(checkpoint(kind)), job), editor(checkpoint(kind), quantization="fp8")
    found = draw(model, job)
    held = {one.dtype for one in model.pipe.transformer.parameters()}
    assert torch.float8_e4m3fn in held
    assert not torch.equal(found, exact)
    assert (found - exact).abs().mean() < 0.2 * exact.abs().mean()


def test_blocks_are_compiled_and_kernels_chosen_where_that_is_asked_for(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    cls = QwenImageTransformer2DModel
    monkeypatch.setattr(cls, "compile_repeated_blocks", lambda self: told.append("compiled"))
    monkeypatch.setattr(cls, "set_attention_backend", lambda self, name: told.append(name))
    how = {"compile_blocks": True, "attention_backend": "_native_math"}
    model = editor(checkpoint("qwen-image"), **how)
    assert not told
    model.load_weights()
    assert told == ["_native_math", "compiled"]


@pytest.mark.parametrize("kind", ["qwen-image", "klein", "z-image"])
def test_tiles_are_the_librarys(
    run_cli: Any, write_manifest: Any, tmp_path: Path, checkpoint: Checkpoint, sources: list[str],
    monkeypatch: pytest.MonkeyPatch, kind: str,
) -> None:  # fmt: skip
    """Of sources, too: what was encoded whole is not taken for it."""
    from diffusers.models import autoencoders

    for name in ("AutoencoderKLQwenImage", "AutoencoderKLFlux2", "AutoencoderKL"):
        # Tiles smaller than the picture.
        cls, sizes = (
            getattr(autoencoders, name),
            {"tile_sample_min_size": 32, "tile_latent_min_size": 4},
        )
        if "Qwen" in name:
            sizes = {
                f"tile_sample_{what}_{side}": n
                for what, n in (("min", 32), ("stride", 24))
                for side in ("height", "width")
            }
        enable = cls.enable_tiling

        def small(self: Any, *given: Any, enable: Any = enable, sizes: Any = sizes) -> None:
            enable(self, *given)
            for one, value in sizes.items():
                assert hasattr(self, one)
                setattr(self, one, value)

        monkeypatch.setattr(cls, "enable_tiling", small)
    folder, images = checkpoint(kind), ["s0.png"] if kind == "klein" else []
    one = line("a", "red", *images, guidance_scale=UNGUIDED[kind])
    manifest, cache = str(write_manifest(one)), ("--cache-dir", str(tmp_path / "cache"))
    run_cli("generate", manifest, "--model", str(folder), "-o", str(tmp_path / "whole"), *cache)
    out = tmp_path / "out"
    run_cli(
        "generate", manifest, "--model", str(folder), "-o", str(out), *cache, "--vae-use-tiling"
    )
    expected = drawn_by_library(folder, one, tmp_path, lambda pipe: pipe.vae.enable_tiling())
    assert np.array_equal(pixels_of(out)["a"], expected)
    assert not np.array_equal(pixels_of(tmp_path / "whole")["a"], expected)


@pytest.mark.parametrize(
    ("kind", "shift", "steps"),
    [
        *(("qwen-image", 3, 4), ("qwen-image-edit-plus", 3, 8), ("z-image", 5, 3)),
        *(("kontext", 5, 3), ("longcat", 5, 3), ("qwen-image-2.1", 5, 3)),
        *(pytest.param(kind, 5, 3, marks=pytest.mark.thorough) for kind in ("flux-dev", "krea2")),
    ],
)
def test_a_flow_shift_is_the_schedule_of_few_step_models(
    run_cli: Any, write_manifest: Any, tmp_path: Path, checkpoint: Checkpoint, sources: list[str],
    kind: str, shift: float, steps: int,
) -> None:  # fmt: skip
    how = {"guidance_scale": UNGUIDED[kind], "num_inference_steps": steps, "flow_shift": shift}
    one = line("a", "red", *(["s0.png"] if "edit" in kind else []), **how)
    out, folder = tmp_path / "out", checkpoint(kind)
    run_cli("generate", str(write_manifest(one)), "--model", str(folder), "-o", str(out))

    def as_published(pipe: Any) -> None:
        own = {"base_shift": math.log(shift), "max_shift": math.log(shift)}
        change = {"shift": shift} if kind == "z-image" else LIGHTNING | own
        pipe.scheduler = FlowMatchEulerDiscreteScheduler.from_config(
            pipe.scheduler.config, **change
        )

    expected = drawn_by_library(folder, one, tmp_path, as_published)
    assert np.array_equal(pixels_of(out)["a"], expected)
    assert not np.array_equal(expected, drawn_by_library(folder, one, tmp_path))
    assert results(out)["a"]["status"] == "done"


CACHED = StepCache(interval=2, first=2)


@pytest.mark.parametrize("kind", thorough_but(["z-image", "longcat", "klein-kv"], DRAWERS))
def test_a_step_that_is_left_out_asks_no_transformer(
    checkpoint: Checkpoint, job: ImageJob, kind: str
) -> None:
    """A cache that leaves out none changes none; a job goes on anywhere as it was."""
    model, job = editor(checkpoint(kind)), replace(fitting(job, kind), num_inference_steps=8)
    plain, every = draw(model, job), replace(job, step_cache=StepCache(first=8))
    assert torch.equal(draw(model, every), plain)
    cached, runs = replace(job, step_cache=CACHED), list[int]()
    model.pipe.transformer.register_forward_pre_hook(lambda *_: runs.append(at))
    denoiser, kept = begun(model, cached), list[tuple[Tensor, dict[str, Tensor]]]()
    latents = denoiser.latents
    for at in range(8):
        kept.append((latents, dict(denoiser.state())))
        latents = denoiser.step(at, latents)
    assert sorted(set(runs)) == [0, 1, 3, 5, 7]
    report = denoiser.velocities.report()
    assert report is not None
    assert (report.full, report.estimated) == (5, 3)
    assert not torch.equal(latents, plain)
    assert (latents - plain).abs().mean() < 0.2 * plain.abs().mean()
    for first in (1, 3, 4, 7):
        again, (found, state) = begun(model, cached), kept[first]
        again.restore(first, found, state)
        for at in range(first, 8):
            found = again.step(at, found)
        assert torch.equal(found, latents), first
        assert again.velocities.report() == report


def test_a_step_cache_is_told_in_the_line_and_kept_with_the_latents(
    run_cli: Any, write_manifest: Any, tmp_path: Path, checkpoint: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    one = line("a", "red", num_inference_steps=12, step_cache=str(CACHED))
    manifest, model = str(write_manifest(one)), str(checkpoint("qwen-image"))
    how = ("--checkpoint-every", "1", "--no-disk-cache")
    run_cli("generate", manifest, "--model", model, "-o", str(tmp_path / "whole"), *how)
    told, keep = results(tmp_path / "whole")["a"]["step_cache"], LatentsCheckpoint.keep
    assert (told["full"], told["estimated"]) == (7, 5)

    def keep_and_end(self: LatentsCheckpoint, kept: Any) -> None:
        keep(self, kept)
        if kept.step == 5:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LatentsCheckpoint, "keep", keep_and_end)
        run_cli("generate", manifest, "--model", model, "-o", str(tmp_path / "out"), *how)
    run_cli("generate", manifest, "--model", model, "-o", str(tmp_path / "out"), *how)
    found, expected = pixels_of(tmp_path / "out")["a"], pixels_of(tmp_path / "whole")["a"]
    assert np.array_equal(found, expected)
    assert results(tmp_path / "out")["a"]["step_cache"] == told


LAYERS = {
    "qwen-image": ["transformer_blocks.0.attn.to_q", "transformer_blocks.1.img_mlp.net.2"],
    "klein-base": ["transformer_blocks.0.attn.to_q", "single_transformer_blocks.1.attn.to_out"],
    "qwen-image-2.1": ["transformer_blocks.0.attn.to_q", "transformer_blocks.1.attn.to_out.0"],
    "kontext": ["transformer_blocks.0.attn.to_q", "single_transformer_blocks.0.attn.to_v"],
    "flux2-dev": ["transformer_blocks.0.attn.to_q", "single_transformer_blocks.1.attn.to_out"],
    "flux3-base": ["mode_blocks.image.0.attn.to_q", "single_transformer_blocks.1.ff.linear_in"],
    "flux-dev": ["transformer_blocks.0.attn.to_q", "single_transformer_blocks.0.attn.to_v"],
    "krea2": ["transformer_blocks.0.attn.to_q", "transformer_blocks.1.ff.down"],
    "z-image": ["layers.0.attention.to_q", "layers.1.feed_forward.w2"],
}


def lora(file: Path, network: nn.Module, layers: list[str], *, published: bool, seed: int) -> str:
    """A file by the library's own names, or by those of Lightning's authors, with alpha."""
    tensors = {}
    for layer, (down, up) in matrices(network, layers, seed).items():
        names = (f"transformer.{layer}.lora_A", f"transformer.{layer}.lora_B")
        if published:
            names = (f"{layer}.lora_down", f"{layer}.lora_up")
            tensors[f"{layer}.alpha"] = torch.tensor(3.0)
        elif layers in (LAYERS["kontext"], LAYERS["flux-dev"]):  # whose loader reads these apart
            tensors[f"transformer.{layer}.alpha"] = torch.tensor(3.0)
        tensors |= {f"{name}.weight": one for name, one in zip(names, (down, up), strict=True)}
    return write(file, tensors).name


@pytest.mark.parametrize("kind", thorough_but(["qwen-image", "klein-base"], LAYERS))
def test_loras_are_the_librarys_and_leave_no_trace(
    run_cli: Any, write_manifest: Any, tmp_path: Path, checkpoint: Checkpoint, kind: str
) -> None:
    """Two in one line, by weights, in a run with others and between jobs that have none."""
    folder, files = checkpoint(kind), list[str]()
    network = editor(folder).have("transformer")
    for number, published in enumerate((False, kind == "qwen-image")):
        file = tmp_path / f"{number}.safetensors"
        files.append(lora(file, network, LAYERS[kind], published=published, seed=number))
    how = {"guidance_scale": 0 if kind == "z-image" else 1}
    lines = [
        line("before", "red", **how),
        line("both", "red", lora=f"{files[0]}@0.5;{files[1]}", **how),
        line("one", "red", lora=files[1], **how),
        line("behind", "blue", **how),
    ]
    out = tmp_path / "out"
    own = ("--model", folder, "-o", out, "--no-kv-reuse")
    run_cli("generate", write_manifest(*lines), *own)
    found = pixels_of(out)

    def styled(names: str) -> Callable[[Any], None]:
        def load(pipe: Any) -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # there is an adapter already
                for name in names:
                    file = tmp_path / f"{name}.safetensors"
                    pipe.load_lora_weights(file, adapter_name=f"of{name}")
            weights = {"0": 0.5, "1": 1.0}
            if names:
                pipe.set_adapters([f"of{name}" for name in names], [weights[n] for n in names])

        return load

    for one, names in zip(lines, ("", "01", "1", ""), strict=True):
        expected = drawn_by_library(folder, one, tmp_path, styled(names))
        assert np.array_equal(found[one["custom_id"]], expected), one["custom_id"]
    assert not np.array_equal(found["one"], found["before"])
    again = run_cli("generate", write_manifest(*lines), *own)
    assert "4 skipped" in again.err
    picture = out / "outputs" / "both.png"
    same = ("--expect-equal", "--images-from", tmp_path)
    assert run_cli("replay", picture, "--model", folder, *same).code == 0


def test_a_lora_of_which_the_library_makes_nothing_is_refused(
    run_cli: Any, write_manifest: Any, tmp_path: Path, checkpoint: Checkpoint
) -> None:
    stem = "diffusion_model.double_blocks.0.img_attn.qkv"
    write(tmp_path / "a.safetensors", {f"{stem}.lora_down.weight": torch.ones(2, 2)})
    manifest = write_manifest(line("a", "red", lora="a.safetensors"))
    refused = run_cli("check", manifest, "--model", checkpoint("klein"), "--json")
    fault = refused.json_lines[0]["fault"]
    assert fault["code"] == "manifest.lora-no-match"
    assert "does not fit: none of its names belongs to a layer, such as" in fault["message"]


@pytest.mark.parametrize("wrong", ["elsewhere", "wide", "alone", "dora", "absent"])
def test_a_lora_of_another_model_is_refused_before_the_run(
    run_cli: Any, write_manifest: Any, tmp_path: Path, checkpoint: Checkpoint, wrong: str
) -> None:
    folder = checkpoint("qwen-image")
    pairs = in_librarys_names(matrices(editor(folder).have("transformer"), LAYERS["qwen-image"]))
    first = next(iter(pairs))
    match wrong:
        case "elsewhere":
            pairs = {name.replace(".0.", ".77."): one for name, one in pairs.items()}
        case "wide":
            pairs[first] = torch.cat([pairs[first], pairs[first]], 1)
        case "alone":
            del pairs[first]
        case "dora":
            pairs[first.replace("lora_A.weight", "dora_scale")] = torch.ones(1)
    if wrong != "absent":
        write(tmp_path / "a.safetensors", pairs)
    manifest = write_manifest(line("a", "red", lora="a.safetensors"))
    refused = run_cli("check", manifest, "--model", folder, "--json")
    fault = refused.json_lines[0]["fault"]
    assert fault["code"] == f"manifest.lora{'' if wrong == 'absent' else '-no-match'}"
    assert fault["where"].endswith("jobs.jsonl:1: lora")


def test_a_model_without_a_loader_reads_no_lora(run_cli: Any, write_manifest: Any) -> None:
    """One that writes text; a setting may be meant for others, and is told."""
    named = run_cli("check", write_manifest({"prompt": "x", "lora": "a.safetensors"}), "--json")
    assert named.json_lines[0]["fault"]["code"] == "manifest.not-followed"
    told = run_cli("check", write_manifest({"prompt": "x"}), "--lora", "o/r/a.safetensors")
    assert told.code == 0
    assert (
        "--lora applies to videos and diffusers image models only; this manifest has none"
        in told.err
    )
