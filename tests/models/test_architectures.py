"""What a single file is, from its header: our networks in every spelling, and other people's."""

from pathlib import Path

import model_files
import pytest
from model_files import Named, key

from hyimg_cli.errors import CheckpointError
from hyimg_cli.loading.single_file import read_single_file
from hyimg_cli.models.architectures import PREFIXES, architecture_of

QWEN = [
    "transformer_blocks.0.img_mod.1.weight",
    "transformer_blocks.0.txt_mlp.net.2.weight",
    "img_in.weight",
]
FLUX = ["double_blocks.0.img_attn.qkv.weight", "vector_in.in_layer.weight", "img_in.weight"]
OF_US: dict[str, tuple[str, list[str]]] = {
    "flux2": ("Flux2Transformer2DModel", ["double_stream_modulation_img.linear.weight"]),
    "flux2-authors": ("Flux2Transformer2DModel", ["double_stream_modulation_img.lin.weight"]),
    "flux3": ("Flux3Transformer2DModel", ["early_stream_modulations.image.lin.weight"]),
    "qwen": ("QwenImageTransformer2DModel", QWEN),
    "layered": (
        "QwenImageTransformer2DModel",
        [*QWEN, "time_text_embed.addition_t_embedding.weight"],
    ),
    "qwen-2.1": ("QwenImage21Transformer2DModel", ["txt_in.text_norm.weight"]),
    "flux1": (
        "FluxTransformer2DModel",
        [
            "single_transformer_blocks.0.proj_mlp.weight",
            "time_text_embed.text_embedder.linear_1.weight",
            "x_embedder.weight",
        ],
    ),
    "flux1-authors": ("FluxTransformer2DModel", FLUX),
    "longcat": (
        "LongCatImageTransformer2DModel",
        [
            "single_transformer_blocks.0.proj_mlp.weight",
            "time_embed.timestep_embedder.linear_1.weight",
            "x_embedder.weight",
        ],
    ),
    "z-image": (
        "ZImageTransformer2DModel",
        [
            "layers.0.adaLN_modulation.0.weight",
            "cap_embedder.1.weight",
            "noise_refiner.0.attention.qkv.weight",
        ],
    ),
    "krea2": ("Krea2Transformer2DModel", ["text_fusion.projector.weight"]),
    "krea2-authors": ("Krea2Transformer2DModel", ["txtfusion.projector.weight"]),
}


@pytest.mark.parametrize("prefix", ["", *PREFIXES])
@pytest.mark.parametrize("case", OF_US)
def test_our_networks_are_recognized(tmp_path: Path, case: str, prefix: str) -> None:
    class_name, names = OF_US[case]
    named = [prefix + name for name in names]
    for path in (
        model_files.safetensors(tmp_path / "a.safetensors", named),
        model_files.gguf(tmp_path / "a.gguf", named),
    ):
        found = architecture_of(read_single_file(path))
        assert (found.class_name, found.prefix) == (class_name, prefix)
        assert ("Layered" in found.name) == (case == "layered")


PLAIN = dict.fromkeys(FLUX, ("BF16", (2, 2)))
COMFY = "model.diffusion_model."
FOREIGN: dict[str, tuple[Named, str]] = {
    "sdxl": (
        [COMFY + "input_blocks.0.0.weight", "conditioner.embedders.1.model.ln_final.weight"],
        "an SDXL checkpoint",
    ),
    "sdxl unet": (["input_blocks.0.0.weight", "label_emb.0.0.weight"], "an SDXL UNet"),
    "sdxl unet, diffusers": (
        ["down_blocks.0.resnets.0.conv1.weight", "add_embedding.linear_1.weight"],
        "an SDXL UNet",
    ),
    "sd15": (
        [COMFY + "input_blocks.0.0.weight", "cond_stage_model.transformer.text_model.x"],
        "a Stable Diffusion 1.5 checkpoint",
    ),
    "sd2": (["cond_stage_model.model.ln_final.weight"], "a Stable Diffusion 2 checkpoint"),
    "sd unet": (
        ["conv_in.weight", "down_blocks.0.x", "time_embedding.linear_1.weight"],
        "a Stable Diffusion UNet",
    ),
    "sd3": (
        [COMFY + "joint_blocks.0.x_block.attn.qkv.weight", "text_encoders.clip_l.x"],
        "Stable Diffusion 3",
    ),
    "sd3, diffusers": (
        ["pos_embed.pos_embed", "context_embedder.weight", "transformer_blocks.0.attn.to_q.weight"],
        "Stable Diffusion 3",
    ),
    "lora, peft": (["transformer.transformer_blocks.0.attn.to_q.lora_A.weight"], "a LoRA"),
    "lora, kohya": (["lora_unet_double_blocks_0_img_attn_qkv.alpha"], "a LoRA"),
    "lora, comfy": (["diffusion_model.double_blocks.0.img_attn.qkv.lora_down.weight"], "a LoRA"),
    "lora, old": (["unet.down_blocks.0.attn.processor.to_q_lora.down.weight"], "a LoRA"),
    "lora, plain": (["transformer_blocks.0.img_mod.1.lora_B.default.weight", *QWEN], "a LoRA"),
    "lycoris": (["lycoris_blocks.0.attn.lokr_w1"], "LyCORIS"),
    "controlnet": (["control_model.input_blocks.0.0.weight"], "a ControlNet"),
    "controlnet, qwen": (["controlnet_blocks.0.weight", *QWEN], "a ControlNet"),
    "controlnet, z-image": (["control_layers.0.adaLN_modulation.0.weight"], "a ControlNet"),
    "ip-adapter": (["ip_adapter.1.to_k_ip.weight", "image_proj.proj.weight"], "an IP-Adapter"),
    "redux": (["redux_up.weight", "redux_down.weight"], "Redux"),
    "motion": (["down_blocks.0.motion_modules.0.temporal_transformer.norm.weight"], "AnimateDiff"),
    "vae": (["decoder.conv_in.weight", "encoder.down_blocks.0.x"], "a VAE"),
    "vae, authors": (["decoder.mid.block_1.conv1.weight", "quant_conv.weight"], "a VAE"),
    "vae, sd": (["first_stage_model.decoder.up.0.block.0.conv1.weight"], "a VAE"),
    "vae, videos": (
        {"decoder.middle.0.residual.2.weight": ("BF16", (2, 2, 1, 1, 1))},
        "a VAE of Qwen-Image or of a video model",
    ),
    "taesd": (["decoder.layers.1.weight", "encoder.layers.0.weight"], "TAESD"),
    "qwen2.5-vl": (["model.layers.0.self_attn.q_proj.weight", "visual.x"], "a text encoder or"),
    "qwen3-vl": (["model.language_model.layers.0.self_attn.q_proj.weight"], "a text encoder or"),
    "t5": (["encoder.block.0.layer.0.SelfAttention.k.weight", "shared.weight"], "(T5)"),
    "umt5, wan": (["token_embedding.weight", "blocks.0.attn.q.weight", "norm.weight"], "(UMT5)"),
    "clip, wan": (["cls_embedding", "transformer.0.attn.to_qkv.weight"], "a picture encoder"),
    "clip": (["text_model.encoder.layers.0.self_attn.q_proj.weight"], "(CLIP)"),
    "siglip": (["vision_model.encoder.layers.0.self_attn.q_proj.weight"], "(CLIP or SigLIP)"),
    "wan": ([COMFY + "head.modulation", COMFY + "blocks.0.self_attn.q.weight"], "a Wan video"),
    "wan, diffusers": (
        ["condition_embedder.time_proj.weight", "patch_embedding.weight"],
        "a Wan video",
    ),
    "hunyuan video": (
        ["double_blocks.0.img_attn_qkv.weight", "txt_in.individual_token_refiner.blocks.0.x"],
        "HunyuanVideo",
    ),
    "hunyuan video, diffusers": (
        ["context_embedder.token_refiner.x", *OF_US["flux1"][1][:2], "x_embedder.proj.weight"],
        "HunyuanVideo",
    ),
    "ltx": ([COMFY + "patchify_proj.weight"], "an LTX video model"),
    "chroma": ([*FLUX[:1], "distilled_guidance_layer.in_proj.weight"], "Chroma"),
    "hidream": (["double_stream_blocks.0.block.x"], "HiDream"),
    "lumina": (["cap_embedder.0.weight", "layers.0.adaLN_modulation.1.weight"], "Lumina 2"),
    "esrgan": (["model.0.weight", "model.1.sub.0.RDB1.conv1.0.weight"], "an upscaler"),
    "esrgan, new": (["conv_first.weight", "body.0.rdb1.conv1.weight"], "an upscaler"),
    "embedding": (["emb_params"], "a textual inversion"),
    "embedding, sdxl": (["clip_g", "clip_l"], "a textual inversion"),
    "bagel": (["language_model.model.embed_tokens.weight", "vit_model.x"], "BAGEL"),
    "fill": ({**PLAIN, "img_in.weight": ("BF16", (8, 384))}, "Fill"),
    "depth": (
        {**PLAIN, "img_in.weight": ("BF16", (8, 128))},
        "Depth or Canny",
    ),
    "all in one": (
        [*(COMFY + one for one in FLUX), "vae.decoder.conv_in.weight", "text_encoders.t5xxl.x"],
        "FLUX.1 with other parts of it",
    ),
    "something": (["a.b", "c.d", "e.f", "g.h"], "a.b, c.d, e.f and 1 more"),
}  # fmt: skip
PACKED: dict[str, tuple[Named, str]] = {
    "svdquant": ([*QWEN, "a.qweight", "a.wscales", "a.lora_down"], "SVDQuant"),
    "svdquant, new": ([*QWEN, "a.qweight", "a.proj_down", "a.smooth_factor"], "SVDQuant"),
    "gptq": ([*QWEN, "a.qweight", "a.qzeros"], "GPTQ"),
    "nvfp4": ([*QWEN, "img_in.weight_scale_2", "img_in.input_scale"], "NVFP4"),
    "nf4": ([*QWEN, "img_in.weight.quant_state.bitsandbytes__nf4"], "bitsandbytes, 4 bits"),
    "int8": ([*QWEN, "img_in.SCB"], "bitsandbytes, 8 bits"),
    "quanto": ([*QWEN, "img_in.weight._data", "img_in.weight._scale"], "Quanto"),
    "fp8 alone": (dict.fromkeys(QWEN, ("F8_E4M3", (2, 2))), "without scales"),
    "fp8 with a marker": (
        {**dict.fromkeys(QWEN, ("F8_E4M3", (2, 2))), "scaled_fp8": ("F8_E4M3", (2,))},
        "without scales",
    ),
    "mxfp8": (
        {**dict.fromkeys(QWEN, ("F8_E4M3", (2, 2))), "img_in.weight_scale": ("U8", (2,))},
        "tensors of U8",
    ),
    "int8, comfy": (
        {**dict.fromkeys(QWEN, ("I8", (2, 2))), "img_in.weight_scale": ("F32", ())},
        "3 tensors of I8",
    ),
}
UNREAD = ["Q8_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ3_S", "TQ1_0", "MXFP4", "NVFP4", "Q1_0", "I32"]


def refusal(path: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as raised:
        architecture_of(read_single_file(path))
    assert raised.value.hint
    return raised.value


@pytest.mark.parametrize("case", FOREIGN)
def test_other_files_are_named(tmp_path: Path, case: str) -> None:
    names, said = FOREIGN[case]
    error = refusal(model_files.safetensors(tmp_path / "a.safetensors", names))
    assert error.code == "checkpoint.not-a-model"
    assert said in error.what


@pytest.mark.parametrize("case", PACKED)
def test_packed_files_are_named(tmp_path: Path, case: str) -> None:
    names, said = PACKED[case]
    error = refusal(model_files.safetensors(tmp_path / "a.safetensors", names))
    assert (error.code, said in error.what) == ("checkpoint.quantized", True)


@pytest.mark.parametrize("dtype", UNREAD)
def test_types_of_gguf_that_are_not_read_are_named(tmp_path: Path, dtype: str) -> None:
    named = {**dict.fromkeys(QWEN, ("Q8_0", (1, 256))), "proj_out.weight": (dtype, (1, 256))}
    error = refusal(model_files.gguf(tmp_path / "a.gguf", named))
    assert f"1 tensors of {dtype}" in error.what


@pytest.mark.parametrize("name", ["blk.0.attn_q.weight", "token_embd.weight", "enc.blk.0.x"])
def test_language_models_in_gguf_are_named(tmp_path: Path, name: str) -> None:
    path = model_files.gguf(
        tmp_path / "a.gguf", {name: ("MXFP4", (1, 32))}, [key("general.architecture", "qwen3")]
    )
    assert "a text encoder or a language model" in refusal(path).what


def test_scaled_8_bits_are_taken(tmp_path: Path) -> None:
    for scale in ("scale_weight", "weight_scale"):
        stored = {
            **dict.fromkeys(QWEN, ("F8_E4M3", (2, 2))),
            **{one.replace("weight", scale): ("F32", ()) for one in QWEN},
            "scaled_fp8": ("F8_E4M3", (0,)),
            "img_in.comfy_quant": ("U8", (16,)),
        }
        path = model_files.safetensors(tmp_path / f"{scale}.safetensors", stored)
        assert architecture_of(read_single_file(path)).name == "Qwen-Image"
