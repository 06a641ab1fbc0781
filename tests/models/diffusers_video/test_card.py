"""A video checkpoint's facts come from its JSON files and headers, without torch."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tiny_video import TINY_VIDEO, write_wan

from hyimg_cli.errors import CheckpointError
from hyimg_cli.models import registry
from hyimg_cli.models.diffusers_video.layout import read_layout
from hyimg_cli.models.diffusers_video.record import FAMILY, DiffusersFolder, start_rule
from hyimg_cli.spec.card import TileRule, VideoCard
from hyimg_cli.spec.job import Size


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY_VIDEO, tmp_path / "copied"))


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def video_card(folder: Path, model: str) -> VideoCard:
    return DiffusersFolder(folder, model).card


def fault_of(call: Callable[[], object]) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        call()
    return caught.value


def test_the_embedded_card() -> None:
    card = registry.video_card(registry.EMBEDDED_VIDEO)
    assert (card.family, card.name, card.is_trained) == ("hunyuan_video15", "tiny-video", True)
    assert card.tiles == TileRule(tile=16, stride=12, pixels=16)
    assert card.latent_grid(Size(480, 848), 121) == (31, 30, 53)
    assert card.defaults.guidance_scale == 2.0
    assert card.defaults.flow_shift == 3.0
    assert [name for name, _ in card.component_bytes] == [
        "transformer", "vae", "text_encoder", "text_encoder_2",
    ]  # fmt: skip
    on_disk = sum(file.stat().st_size for file in TINY_VIDEO.rglob("*.safetensors"))
    headers = on_disk - sum(count for _, count in card.component_bytes)
    assert 0 < headers < 60_000


def test_it_is_small_enough_to_ship() -> None:
    files = [file for file in TINY_VIDEO.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 8_000_000


def test_a_card_needs_no_torch() -> None:
    code = (
        "import sys; from hyimg_cli.models import registry\n"
        "registry.video_card('tiny-video'); registry.fingerprint('tiny-video')\n"
        "sys.exit(', '.join({'torch', 'diffusers', 'transformers'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("target", "size"), [(640, Size(480, 848)), (960, Size(720, 1280)), (480, Size(352, 624))]
)
def test_default_sizes_of_the_release(target: int, size: Size) -> None:
    assert start_rule(target, 16).size_for(Size(9, 16)) == size


@pytest.mark.parametrize("target", [64, 96, 160, 256, 384, 512, 720, 1024])
def test_default_sizes_against_the_library(target: int) -> None:
    from diffusers.pipelines.hunyuan_video1_5.image_processor import HunyuanVideo15ImageProcessor

    processor = HunyuanVideo15ImageProcessor(vae_scale_factor=16)
    size = start_rule(target, 16).size_for(Size(9, 16))
    assert (size.height, size.width) == processor.calculate_default_height_width(9, 16, target)


def test_a_720p_checkpoint(copied: Path) -> None:
    change(copied / "transformer" / "config.json", target_size=960)
    (copied / "scheduler" / "scheduler_config.json").write_text("{}")
    (copied / "card.json").unlink()
    defaults = video_card(copied, "x").defaults
    assert (defaults.size, defaults.flow_shift) == (Size(720, 1280), 9.0)
    assert (defaults.num_frames, defaults.fps, defaults.num_inference_steps) == (121, 24, 50)


def test_a_distilled_checkpoint_has_no_guidance(copied: Path) -> None:
    change(copied / "guider" / "guider_config.json", enabled=False)
    assert video_card(copied, "x").defaults.guidance_scale == 1.0


def test_wan_cards(tmp_path: Path) -> None:
    card = video_card(write_wan(tmp_path / "one"), "x")
    assert card.tiles == TileRule(tile=32, stride=24, pixels=8)
    assert (card.size_multiple, card.pixels_per_cell, card.max_prompt_tokens) == (16, 8, 512)
    assert card.defaults.guidance_scale_2 is None
    assert not card.guides_below_one
    two = video_card(write_wan(tmp_path / "two", boundary_ratio=0.875), "x")
    assert (two.defaults.guidance_scale, two.defaults.guidance_scale_2) == (4.0, 3.0)
    assert "transformer_2" in dict(two.component_bytes)


def test_the_released_wan_defaults(tmp_path: Path) -> None:
    folder = write_wan(tmp_path / "one")
    (folder / "card.json").unlink()
    defaults = video_card(folder, "x").defaults
    assert (defaults.size, defaults.num_frames, defaults.fps) == (Size(480, 832), 81, 16)
    assert (defaults.guidance_scale, defaults.flow_shift) == (5.0, 3.0)


def test_unknown_defaults_are_named(copied: Path) -> None:
    change(copied / "card.json", defaults={"frames": 9})
    assert "frames" in fault_of(lambda: video_card(copied, "x")).what


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("transformer", ["pipeline", "HunyuanVideo15Transformer3DModel"]),
        ("transformer", ["diffusers", "FluxTransformer2DModel"]),
        ("text_encoder", ["modeling_own", "Qwen2_5_VLTextModel"]),
        ("scheduler", ["diffusers", "DDIMScheduler"]),
        ("vae", None),
    ],
)
def test_foreign_components_are_refused(copied: Path, name: str, entry: Any) -> None:
    change(copied / "model_index.json", **{name: entry})
    error = fault_of(lambda: read_layout(copied))
    assert error.code == "checkpoint.component"
    assert name in error.what


def test_other_pipelines_are_refused(copied: Path) -> None:
    change(copied / "model_index.json", _class_name="FluxPipeline")
    assert fault_of(lambda: video_card(copied, "x")).code == "checkpoint.family"


def test_an_image_to_video_transformer_in_the_other_pipeline_is_refused(copied: Path) -> None:
    """The library would run it, and not look at the picture."""
    change(copied / "transformer" / "config.json", task_type="i2v")
    assert fault_of(lambda: video_card(copied, "x")).code == "checkpoint.family"


def test_a_step_distilled_transformer_is_refused(copied: Path) -> None:
    """The library's text-to-video pipeline would run it without its second timestep."""
    change(copied / "transformer" / "config.json", use_meanflow=True)
    error = fault_of(lambda: video_card(copied, "x"))
    assert (error.code, "use_meanflow" in error.what) == ("checkpoint.family", True)


@pytest.mark.parametrize(
    ("config", "values", "word"),
    [
        (
            "transformer/config.json",
            {"in_channels": 36},
            "in_channels is 36; expected 16 by the other values of config.json",
        ),
        ("transformer/config.json", {"image_dim": 1280}, "image encoder"),
        (
            "model_index.json",
            {"_class_name": "WanImageToVideoPipeline"},
            "in_channels is 16; expected 36 by the other values of config.json",
        ),
        ("model_index.json", {"boundary_ratio": 0.9}, "not transformer_2"),
    ],
)
def test_wan_checkpoints_of_another_kind_are_refused(
    tmp_path: Path, config: str, values: dict[str, Any], word: str
) -> None:
    folder = write_wan(tmp_path / "wan")
    change(folder / config, **values)
    error = fault_of(lambda: video_card(folder, "x"))
    assert (error.code, word in error.what) == ("checkpoint.family", True)


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"scale_factor_spatial": 12}, "12 pixels do not fit"),
        ({"scale_factor_spatial": 16}, "scale_factor_spatial is 16; * 8"),
        ({"scale_factor_temporal": 8}, "scale_factor_temporal is 8; * 4"),
        ({"dim_mult": [1, 1, 1]}, "scale_factor_spatial is 8; * 4"),
        ({"temperal_downsample": [True, True]}, "length of temperal_downsample is 2; * 3"),
        ({"patch_size": 2}, "scale_factor_spatial is 8; * 16"),
        ({"out_channels": 12}, "out_channels is 12; * 3"),
        ({"latents_std": [1.0] * 15}, "length of latents_std is 15; * 16"),
    ],
)
def test_a_wan_vae_that_cannot_be_is_refused(
    wan_folder: Path, tmp_path: Path, values: dict[str, Any], word: str
) -> None:
    """By its configuration alone: its films would be of another size, after hours."""
    small = shutil.ignore_patterns("*.safetensors")
    folder = Path(shutil.copytree(wan_folder, tmp_path / "wan", ignore=small))
    change(folder / "vae" / "config.json", **values)
    error = fault_of(lambda: video_card(folder, "x"))
    word = word.replace("*", "expected")
    assert (error.code, word in error.what) == ("checkpoint.family", True), error.what


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"spatial_compression_ratio": 24}, "24 pixels do not fit"),
        ({"spatial_compression_ratio": 64}, "64 pixels do not fit"),
        ({"spatial_compression_ratio": 32}, "5 levels cannot shrink 32 pixels and 4 frames"),
        ({"temporal_compression_ratio": 3}, "cannot shrink 16 pixels and 3 frames"),
        ({"out_channels": 4}, "decodes 4 channels"),
    ],
)
def test_a_hunyuan_vae_that_cannot_be_is_refused(
    copied: Path, values: dict[str, Any], word: str
) -> None:
    change(copied / "vae" / "config.json", **values)
    assert word in fault_of(lambda: video_card(copied, "x")).what


def test_two_networks_without_a_boundary_are_refused(wan22_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(wan22_folder, tmp_path / "two"))
    change(folder / "model_index.json", boundary_ratio=None)
    assert "not boundary_ratio" in fault_of(lambda: video_card(folder, "x")).what


@pytest.mark.parametrize("name", ["transformer", "text_encoder"])
def test_a_quantized_component_is_refused(copied: Path, name: str) -> None:
    change(copied / name / "config.json", quantization_config={"quant_method": "bitsandbytes"})
    error = fault_of(lambda: video_card(copied, "x"))
    assert (error.code, "bitsandbytes" in error.what) == ("checkpoint.quantized", True)
    assert name in error.what


def test_a_release_in_its_own_layout_is_told_from_a_broken_one(tmp_path: Path) -> None:
    (tmp_path / "transformer" / "480p_t2v").mkdir(parents=True)
    error = fault_of(lambda: video_card(tmp_path, "x"))
    assert (error.code, "-Diffusers" in error.hint) == ("checkpoint.missing", True)


@pytest.mark.parametrize("name", ["text_encoder", "tokenizer_2"])
def test_a_missing_folder_is_named(copied: Path, name: str) -> None:
    shutil.rmtree(copied / name)
    assert f"{name}/" in fault_of(lambda: video_card(copied, "x")).what


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_a_broken_index_is_a_fault(copied: Path, text: str) -> None:
    (copied / "model_index.json").write_text(text)
    assert fault_of(lambda: video_card(copied, "x")).code == "checkpoint.json"


def test_weights_that_are_not_there_yet_are_left_out(copied: Path) -> None:
    (copied / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    assert "vae" not in dict(video_card(copied, "x").component_bytes)


def test_weights_count_as_they_are_loaded_not_as_they_are_stored(
    copied: Path, wan_folder: Path
) -> None:
    """Released transformers are stored in float32, and loaded in bfloat16 on a GPU."""
    file = copied / "transformer" / "diffusion_pytorch_model.safetensors"
    save_file({name: tensor.float() for name, tensor in load_file(file).items()}, file)
    card = video_card(copied, "x")
    stored, loaded = dict(card.component_bytes), card.loaded_bytes("bfloat16")
    assert loaded["transformer"] * 2 == stored["transformer"]
    assert card.loaded_bytes("float32")["transformer"] == stored["transformer"]
    assert loaded["text_encoder"] == stored["text_encoder"]
    wan = video_card(wan_folder, "x")
    assert wan.loaded_bytes("bfloat16")["vae"] == wan.loaded_bytes("float32")["vae"]


def test_weights_that_are_not_there_to_count_are_given_as_stored(copied: Path) -> None:
    folder = copied / "transformer"
    (folder / "diffusion_pytorch_model.safetensors").unlink()
    index = {"metadata": {"total_size": 1000}, "weight_map": {"a": "b.safetensors"}}
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    assert video_card(copied, "x").loaded_bytes("bfloat16")["transformer"] == 1000


@pytest.mark.parametrize(
    "name",
    [
        "model_index.json",
        "vae/config.json",
        "tokenizer/chat_template.jinja",
        "scheduler/scheduler_config.json",
        "text_encoder/model.safetensors",
    ],
)
def test_the_fingerprint_follows_every_part(copied: Path, name: str) -> None:
    before = FAMILY.fingerprint(copied)
    data = (copied / name).read_bytes()
    # A byte of the last weight, or a space behind JSON and Jinja text.
    is_weights = name.endswith("safetensors")
    (copied / name).write_bytes(data[:-1] + b"\x11" if is_weights else data + b" ")
    assert FAMILY.fingerprint(copied) != before
