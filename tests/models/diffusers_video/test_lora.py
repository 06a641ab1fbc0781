"""LoRA files: three spellings of the same matrices, held against W + B A merged by hand; what does
not fit is an error; a job without one is as if there had been none. And the schedules of distilled
models.
"""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanPipeline
from safetensors.torch import save_file
from torch import Tensor

from hyimg_cli.errors import CheckpointError, JobError
from hyimg_cli.models import lora_files, registry
from hyimg_cli.models.diffusers_video.layout import read_layout
from hyimg_cli.models.diffusers_video.lora import Adapters, check_loras
from hyimg_cli.models.diffusers_video.model import DiffusersVideo
from hyimg_cli.settings.run import ModelChoice
from hyimg_cli.spec.job import Size, VideoJob
from hyimg_cli.spec.options import Lora

Draw = Callable[[DiffusersVideo, VideoJob], Tensor]
RANK, ALPHA = 2, 3.0
# Of a Wan block: the library's name, its authors', musubi's.
WAN = {
    "attn1.to_q": "self_attn.q", "attn1.to_k": "self_attn.k", "attn1.to_v": "self_attn.v",
    "attn1.to_out.0": "self_attn.o", "attn2.to_q": "cross_attn.q", "attn2.to_k": "cross_attn.k",
    "attn2.to_v": "cross_attn.v", "attn2.to_out.0": "cross_attn.o", "ffn.net.0.proj": "ffn.0",
    "ffn.net.2": "ffn.2",
}  # fmt: skip
HUNYUAN = {
    "attn.to_q": "img_attn_q", "attn.to_out.0": "img_attn_proj", "attn.add_k_proj": "txt_attn_k",
    "attn.to_add_out": "txt_attn_proj", "ff.net.0.proj": "img_mlp.fc1",
    "ff_context.net.2": "txt_mlp.fc2", "norm1.linear": "img_mod.linear",
}  # fmt: skip


@pytest.fixture
def job(job: VideoJob) -> VideoJob:
    return replace(job, num_inference_steps=2, size=Size(32, 48), num_frames=5)


@pytest.fixture
def fresh(folders: dict[str, Path]) -> Callable[[str], DiffusersVideo]:
    """A model of a test's own: its layers are changed."""

    def load(name: str) -> DiffusersVideo:
        choice = ModelChoice(str(folders[name]), dtype="float32", device="cpu")
        return registry.load_video(choice)

    return load


def matrices(network: Any, layers: list[str], seed: int = 1) -> dict[str, tuple[Tensor, Tensor]]:
    """By layer: down [R, I] and up [O, R]."""
    generator = torch.Generator().manual_seed(seed)
    modules, made = dict(network.named_modules()), {}
    for layer in layers:
        base = modules[layer]
        shapes = (RANK, base.in_features), (base.out_features, RANK)
        made[layer] = tuple(torch.randn(shape, generator=generator) / 4 for shape in shapes)
    return made


def write(file: Path, tensors: dict[str, Tensor], **header: str) -> Path:
    save_file({name: value.contiguous() for name, value in tensors.items()}, file, header or None)
    return file


def in_librarys_names(
    pairs: dict[str, tuple[Tensor, Tensor]], scale: float = 1
) -> dict[str, Tensor]:
    made = {}
    for layer, (down, up) in pairs.items():
        made[f"transformer.{layer}.lora_A.weight"] = down
        made[f"transformer.{layer}.lora_B.weight"] = up * scale
    return made


def wan_layers(network: Any) -> dict[str, str]:
    """Every block's layers, by the authors' names."""
    return {
        f"blocks.{number}.{own}": f"blocks.{number}.{theirs}"
        for number in range(len(network.blocks))
        for own, theirs in WAN.items()
    }


def spelled(form: str, pairs: dict[str, tuple[Tensor, Tensor]], names: dict[str, str]) -> Any:
    if form == "library":
        return in_librarys_names(pairs, ALPHA / RANK)
    made = {}
    for layer, (down, up) in pairs.items():
        name = names[layer]
        if form == "musubi":
            prefix = f"lora_unet_{name.replace('.', '_')}"
        else:
            prefix = f"diffusion_model.{name}"
        made[f"{prefix}.lora_down.weight"], made[f"{prefix}.lora_up.weight"] = down, up
        made[f"{prefix}.alpha"] = torch.tensor(ALPHA)
    return made


def merge(network: Any, pairs: dict[str, tuple[Tensor, Tensor]], scale: float) -> None:
    modules = dict(network.named_modules())
    for layer, (down, up) in pairs.items():
        modules[layer].weight += scale * (up @ down)


@pytest.mark.parametrize("form", ["library", "authors", "musubi"])
def test_a_wan_file_is_its_merge_in_any_spelling(
    fresh: Callable[[str], DiffusersVideo], draw: Draw, job: VideoJob, tmp_path: Path, form: str
) -> None:
    model, merged = fresh("wan"), fresh("wan")
    names = wan_layers(model.networks[0])
    pairs = matrices(model.networks[0], list(names))
    file = write(tmp_path / "style.safetensors", spelled(form, pairs, names))
    plain = draw(model, job)
    found = draw(model, replace(job, lora=(Lora(str(file), 0.5),)))
    merge(merged.networks[0], pairs, 0.5 * ALPHA / RANK)
    expected = draw(merged, job)
    assert (plain - expected).abs().max() > 1e-2
    assert (found - expected).abs().max() < 1e-4
    # A weight below 0 takes away what one above it adds.
    against = draw(model, replace(job, lora=(Lora(str(file), -0.5),)))
    merge(merged.networks[0], pairs, -ALPHA / RANK)
    assert (against - draw(merged, job)).abs().max() < 1e-4
    assert (against - expected).abs().max() > 1e-2
    # What comes behind it never saw it.
    assert torch.equal(draw(model, job), plain)
    assert torch.equal(draw(model, replace(job, lora=(Lora(str(file), 0.5),))), found)


def test_a_pair_goes_to_both_networks(
    fresh: Callable[[str], DiffusersVideo], draw: Draw, job: VideoJob, tmp_path: Path
) -> None:
    job = replace(job, num_inference_steps=3, flow_shift=2.0, guidance_scale_2=3.0)
    model, merged = fresh("wan22"), fresh("wan22")
    names, files = wan_layers(model.networks[0]), []
    for number, on in enumerate(("high", "low")):
        pairs = matrices(model.networks[number], list(names), seed=number)
        file = write(tmp_path / f"{on}.safetensors", in_librarys_names(pairs))
        files.append(Lora(str(file), 1.0, on))
        merge(merged.networks[number], pairs, 1.0)
    found = draw(model, replace(job, lora=tuple(files)))
    assert (found - draw(merged, job)).abs().max() < 1e-4
    # Without the low one the second network is the loaded one again.
    half = draw(model, replace(job, lora=(files[0], Lora("", 0.0, "low"))))
    assert (half - found).abs().max() > 1e-3


def test_a_hunyuan_file_in_its_authors_names_is_its_merge(
    fresh: Callable[[str], DiffusersVideo], draw: Draw, job: VideoJob, tmp_path: Path
) -> None:
    model, merged = fresh("hunyuan"), fresh("hunyuan")
    names = {
        f"transformer_blocks.1.{own}": f"double_blocks.1.{its}" for own, its in HUNYUAN.items()
    }
    refiner = "context_embedder.token_refiner.refiner_blocks.0.attn"
    of_three = matrices(model.networks[0], [f"{refiner}.to_{one}" for one in "qkv"], seed=2)
    down = of_three[f"{refiner}.to_q"][0]
    of_three = {layer: (down, up) for layer, (_, up) in of_three.items()}
    pairs = matrices(model.networks[0], list(names))
    tensors = spelled("authors", pairs, names)
    fused = "diffusion_model.txt_in.individual_token_refiner.blocks.0.self_attn_qkv"
    tensors[f"{fused}.lora_A.weight"] = down
    tensors[f"{fused}.lora_B.weight"] = torch.cat([up for _, up in of_three.values()])
    tensors[f"{fused}.alpha"] = torch.tensor(ALPHA)
    file = write(tmp_path / "style.safetensors", tensors)
    merge(merged.networks[0], pairs | of_three, ALPHA / RANK)
    found = draw(model, replace(job, lora=(Lora(str(file)),)))
    expected = draw(merged, job)
    assert (draw(model, job) - expected).abs().max() > 1e-2
    assert (found - expected).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["wan", "hunyuan"])
@pytest.mark.parametrize("rename", ["", "transformer.elsewhere.", "diffusion_model.blocks.0.x."])
def test_what_fits_no_layer_is_an_error(
    models: dict[str, DiffusersVideo],
    draw: Draw,
    job: VideoJob,
    tmp_path: Path,
    name: str,
    rename: str,
) -> None:
    model = models[name]
    layer = next(
        n for n, m in model.networks[0].named_modules() if n.endswith(("attn.to_q", "attn1.to_q"))
    )
    pairs = in_librarys_names(matrices(model.networks[0], [layer]))
    tensors = {rename + key.removeprefix("transformer."): value for key, value in pairs.items()}
    file = write(tmp_path / "other.safetensors", tensors)
    with pytest.raises(CheckpointError) as caught:
        draw(model, replace(job, lora=(Lora(str(file)),)))
    assert (caught.value.code, layer.split(".")[-1] in caught.value.what) == ("lora.no-match", True)


@pytest.mark.parametrize("name", ["wan", "wan22", "hunyuan"])
def test_what_fits_no_layer_is_told_by_headers_alone(
    models: dict[str, DiffusersVideo], folders: dict[str, Path], job: VideoJob, tmp_path: Path,
    name: str,
) -> None:  # fmt: skip
    """In every spelling; nothing of files that are not here, or of a checkpoint without weights."""
    folder, network, place = (
        folders[name],
        models[name].networks[-1],
        "low" if name == "wan22" else "",
    )
    if name == "hunyuan":
        names = {"transformer_blocks.0.attn.to_q": "double_blocks.0.img_attn_q"}
    else:
        # The library converts a file of musubi's only where its blocks are whole.
        every = wan_layers(network).items()
        names = {own: its for own, its in every if own.startswith("blocks.0.")}
    pairs = matrices(network, list(names))
    elsewhere = {key.replace(".0.", ".77."): value for key, value in pairs.items()}
    of_elsewhere = {k.replace(".0.", ".77."): v.replace(".0.", ".77.") for k, v in names.items()}
    wide = {key: (torch.cat([down, down], 1), up) for key, (down, up) in pairs.items()}
    forms = ["library", "authors"] + ["musubi"] * (name != "hunyuan")
    for number, form in enumerate(forms):
        good = write(tmp_path / f"{number}.safetensors", spelled(form, pairs, names))
        check_loras(replace(job, lora=(Lora(str(good), 1.0, place),)), read_layout(folder))
        bad = write(tmp_path / f"b{number}.safetensors", spelled(form, elsewhere, of_elsewhere))
        with pytest.raises(JobError, match=r"does not fit.*77") as caught:
            check_loras(replace(job, lora=(Lora(str(bad), 1.0, place),)), read_layout(folder))
        assert (caught.value.code, caught.value.where) == ("job.lora-no-match", "lora")
    other = write(tmp_path / "wide.safetensors", spelled("library", wide, names))
    with pytest.raises(JobError, match="does not fit"):
        check_loras(replace(job, lora=(Lora(str(other), 1.0, place),)), read_layout(folder))
    bare = shutil.copytree(
        folder, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors")
    )
    for lora, where in (
        (Lora(str(tmp_path / "none.safetensors")), folder),
        (Lora(str(other)), bare),
    ):
        check_loras(replace(job, lora=(lora,)), read_layout(Path(where)))
    other.write_bytes(other.read_bytes()[:40])
    with pytest.raises(JobError, match="does not fit"):
        check_loras(replace(job, lora=(Lora(str(other), 1.0, place),)), read_layout(folder))


def test_metadata_that_is_no_json_is_told_as_such(
    models: dict[str, DiffusersVideo], tmp_path: Path
) -> None:
    network = models["wan"].networks[0]
    tensors = in_librarys_names(matrices(network, ["blocks.0.attn1.to_q"]))
    file = write(tmp_path / "a.safetensors", tensors, lora_adapter_metadata="{not json")
    with pytest.raises(CheckpointError, match="metadata is not JSON") as caught:
        Adapters([network], models["wan"].layout).use((Lora(str(file)),))
    assert caught.value.code == "lora.no-match"
    assert not getattr(network, "peft_config", None)


def test_a_pair_of_another_shape_or_without_its_half_is_an_error(
    models: dict[str, DiffusersVideo], draw: Draw, job: VideoJob, tmp_path: Path
) -> None:
    layer = "blocks.0.attn1.to_q"
    tensors = in_librarys_names(matrices(models["wan"].networks[0], [layer]))
    up = f"transformer.{layer}.lora_B.weight"
    for wrong in (tensors | {up: tensors[up][:-1]}, {k: v for k, v in tensors.items() if k != up}):
        file = write(tmp_path / "other.safetensors", wrong)
        with pytest.raises(CheckpointError, match="does not fit"):
            draw(models["wan"], replace(job, lora=(Lora(str(file)),)))


def test_what_the_library_leaves_out_is_told(
    models: dict[str, DiffusersVideo], job: VideoJob, tmp_path: Path
) -> None:
    """Held against the library: what its conversion has no place for, but zeros."""
    network = models["wan"].networks[0]
    names = wan_layers(network) | {"proj_out": "head.head", "patch_embedding": "patch_embedding"}
    pairs = matrices(network, [layer for layer in names if layer.startswith("blocks")])
    tensors = spelled("authors", pairs, names)
    block, shape = "diffusion_model.blocks.0", (network.proj_out.out_features, 24)
    tensors |= {
        f"{block}.self_attn.q.diff_b": torch.ones(24),
        "diffusion_model.head.head.diff": torch.ones(shape),
        "diffusion_model.head.head.diff_b": torch.ones(shape[0]),
        f"{block}.norm3.diff": torch.zeros(24),
    }
    lost = {
        f"{block}.self_attn.norm_q.diff": torch.full((24,), 2.0),
        "diffusion_model.patch_embedding.diff": torch.full((24, 16, 1, 2, 2), 3.0),
        "diffusion_model.time_projection.1.diff_b": torch.full((144,), 4.0),
    }

    def said(name: str, held: dict[str, Tensor]) -> tuple[str, ...]:
        file = write(tmp_path / f"{name}.safetensors", held)
        return models["wan"].notes(replace(job, lora=(Lora(str(file)),)))

    assert said("whole", tensors) == ()
    (note,) = said("more", tensors | lost)
    assert "more.safetensors was applied without 3 of its tensors" in note
    assert f"such as {block}.self_attn.norm_q.diff" in note
    kept = WanPipeline.lora_state_dict(dict(tensors | lost)).values()
    values = {float(one.flatten()[0]) for one in lost.values()}
    assert not values & {float(one.flatten()[0]) for one in kept}
    assert (
        WanPipeline.lora_state_dict(dict(tensors)).keys()
        == WanPipeline.lora_state_dict(dict(tensors | lost)).keys()
    )


def test_its_key_is_of_its_bytes_and_header(tmp_path: Path) -> None:
    tensors = {"transformer.x.lora_A.weight": torch.ones(2, 2)}
    first = write(tmp_path / "a.safetensors", tensors, lora_alpha="1")
    same = write(tmp_path / "b.safetensors", tensors, lora_alpha="1")
    other = write(tmp_path / "c.safetensors", tensors, lora_alpha="2")
    keys = [lora_files.in_key((Lora(str(file)),)) for file in (first, same, other)]
    assert keys[0] == keys[1] != keys[2]
    weights = {lora_files.in_key((Lora(str(first), weight),)) for weight in (1.0, 0.5, -0.5, -1.0)}
    assert len(weights) == 4
    assert lora_files.in_key((Lora(str(first), 1.0, "high"),)) != keys[0]


def test_eulers_steps_are_those_that_models_are_distilled_to(
    models: dict[str, DiffusersVideo], draw: Draw, job: VideoJob
) -> None:
    """Four at shift 5, without guidance: one pass a step, and no negative prompt."""
    model = models["wan"]
    job = replace(job, scheduler="euler", num_inference_steps=4, flow_shift=5.0, guidance_scale=1.0)
    schedule = model.schedule(job)
    assert schedule.sigmas == pytest.approx([1.0, 0.9375, 5 / 6, 0.625, 0.0])
    assert schedule.levels == pytest.approx([1000, 937.5, 2500 / 3, 625])
    passes = []
    handle = model.networks[0].register_forward_hook(lambda *_: passes.append(1))
    draw(model, job)
    handle.remove()
    assert (len(passes), model.texts(job)) == (4, (job.prompt,))
    assert (model.schedule(replace(job, scheduler=None)).levels[1]) != 937.5
