"""What a file of weights is when it is not a picture model that hyimg runs; no torch."""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from hyimg_cli.loading.checkpoint import FLOATS, TensorInfo, fault
from hyimg_cli.loading.single_file import SingleFile
from hyimg_cli.spec.units import names_text


class Foreign(NamedTuple):
    """What a file is, and what to do with it."""

    what: str
    hint: str


class Row(NamedTuple):
    """A kind of file, and patterns with which names in it begin: a file has names of each."""

    what: str
    hint: str
    patterns: tuple[str, ...]


_AS_LORA = "give it with --lora FILE, and its base model with --model"
_AS_PART = (
    "--model takes the transformer; --components takes a folder in diffusers' layout with this part"
)
OTHER_TOOLS = "use a model that docs/editors.md names, or run this one with ComfyUI or dgenerate"
_EDITORS = "use a model that docs/editors.md names"
_NO_ADAPTERS = "hyimg has no such networks: give a picture model with --model"
_VIDEO = "give the checkpoint's folder in diffusers' layout with --video-model"
_LANGUAGE = "a text encoder or a language model"
# Before the names of a network in ComfyUI's files.
_IN = r"(model\.diffusion_model\.|diffusion_model\.)?"
_VAE = r"(first_stage_model\.|vae\.)?"
# What is added to a network. Some have names of it, so they come before networks.
ADAPTERS = (
    # Names by PEFT and kohya, LyCORIS, and older diffusers.
    Row("a LoRA", _AS_LORA, (r".*\.lora_(A|B|down|up|mid)\b",)),
    Row("a LoRA", _AS_LORA, (r"lora_(unet|te\d?|transformer|prior)_",)),
    Row("a LoRA", _AS_LORA, (r".*[._]lora\.(down|up)\.",)),
    Row("a LoRA (LyCORIS)", _AS_LORA, (r".*\.(hada_w|lokr_w|oft_blocks|oft_diag|dora_scale)",)),
    Row("an IP-Adapter", _NO_ADAPTERS, (r"(ip_adapter|ip_adapter_\w+_blocks|image_proj)\.",)),
    Row("an adapter of FLUX.1 (Redux)", _NO_ADAPTERS, (r"redux_(up|down)\.",)),
    Row("a ControlNet", _NO_ADAPTERS, (r"(.*\.)?(control_model|controlnet_|control_\w+)\w*\.",)),
    Row("a T2I-Adapter", _NO_ADAPTERS, (r"adapter\.(body|conv_in)\.",)),
    Row("a motion module of AnimateDiff", _NO_ADAPTERS, (r"(.*\.)?motion_modules\.",)),
)
OTHERS = (
    Row("an SDXL checkpoint", OTHER_TOOLS, (r"conditioner\.embedders\.",)),
    Row("an SDXL UNet", OTHER_TOOLS, (_IN + r"input_blocks\.", _IN + r"label_emb\.")),
    Row("an SDXL UNet", OTHER_TOOLS, (r"down_blocks\.", r"add_embedding\.")),
    Row("a Stable Diffusion 2 checkpoint", OTHER_TOOLS, (r"cond_stage_model\.model\.",)),
    Row("a Stable Diffusion 1.5 checkpoint", OTHER_TOOLS, (r"cond_stage_model\.",)),
    Row("a Stable Diffusion UNet", OTHER_TOOLS, (_IN + r"input_blocks\.",)),
    Row("a Stable Diffusion UNet", OTHER_TOOLS, (r"down_blocks\.", r"time_embedding\.")),
    Row("Stable Diffusion 3", OTHER_TOOLS, (_IN + r"joint_blocks\.",)),
    Row("Stable Diffusion 3", OTHER_TOOLS, (r"pos_embed\.pos_embed", r"context_embedder\.")),
    Row("Chroma", _EDITORS, (_IN + r"distilled_guidance_layer\.",)),
    Row("AuraFlow", _EDITORS, (_IN + r"(double_layers|joint_transformer_blocks)\.",)),
    Row("HiDream", _EDITORS, (_IN + r"double_stream_blocks\.",)),
    Row("Lumina 2", _EDITORS, (_IN + r"cap_embedder\.", _IN + r"layers\.\d+\.adaLN_modulation\.")),
    Row(
        "a HunyuanVideo model",
        _VIDEO,
        (_IN + r"(txt_in\.individual_token_refiner|context_embedder\.token_refiner)\.",),
    ),
    Row("a Wan video model", _VIDEO, (_IN + r"head\.modulation",)),
    Row("a Wan video model", _VIDEO, (r"condition_embedder\.time_proj\.", r"patch_embedding\.")),
    Row("an LTX video model", _EDITORS, (_IN + r"(patchify_proj|av_ca_a2v_gate_adaln_single)\.",)),
    Row("a Mochi video model", _EDITORS, (_IN + r"blocks\.\d+\.attn\.qkv_x\.",)),
    Row("a CogVideoX video model", _EDITORS, (r"patch_embed\.text_proj\.",)),
    Row(
        "Cosmos or Anima",
        _EDITORS,
        (_IN + r"(net\.)?blocks\.\d+\.adaln_modulation_self_attn\.",),
    ),
    Row("Sana or PixArt", _EDITORS, (_IN + r"(adaln_single|caption_projection|y_embedder)\.",)),
    Row("OmniGen", _EDITORS, (r"llm\.layers\.", r"(x_embedder|final_layer)\.")),
    Row(
        "BAGEL in one file",
        "give the folder that has it with llm_config.json",
        (r"language_model\.", r"vit_model\."),
    ),
    Row(
        "an upscaler",
        "hyimg draws at the size that you ask for: give a picture model with --model",
        (r"(model\.0\.weight|model\.1\.sub\.|RRDB_trunk\.|conv_first\.|block_1\.c1_r|params)",),
    ),
    Row("the picture part of a language model (mmproj)", _AS_PART, (r"(v\.blk|mm)\.\d",)),
    Row(_LANGUAGE, _AS_PART, (r"(token_embd|(enc\.)?blk\.\d+)\.",)),
    Row("a text encoder (T5)", _AS_PART, (r"(.*\.)?encoder\.block\.\d+\.layer\.",)),
    # Of Wan's authors.
    Row("a text encoder (UMT5)", _AS_PART, (r"token_embedding\.", r"blocks\.\d+\.attn\.q\.")),
    Row("a picture encoder (CLIP)", _AS_PART, (r"cls_embedding", r"transformer\.\d+\.attn\.")),
    Row("a text encoder (CLIP)", _AS_PART, (r"(.*\.)?text_model\.(encoder|embeddings)\.",)),
    Row("a text encoder (CLIP)", _AS_PART, (r"(.*\.)?transformer\.resblocks\.",)),
    Row("a picture encoder (CLIP or SigLIP)", _AS_PART, (r"(.*\.)?vision_model\.",)),
    Row(_LANGUAGE, _AS_PART, (r"(.*\.)?(layers\.\d+\.self_attn\.q_proj|embed_tokens)\.",)),
    Row(
        "a VAE",
        _AS_PART,
        (
            _VAE + r"(de|en)coder\.(conv_in|conv1|mid|middle|mid_block|up|up_blocks|upsamples|"
            r"down|down_blocks|downsamples|conv_out|head)\b",
        ),
    ),
    Row(
        "a small VAE for previews (TAESD)",
        _AS_PART,
        (r"((taesd_)?(de|en)coder\.)(layers\.)?\d+\.(conv\.\d+\.)?(weight|bias)",),
    ),
)
# A file of few tensors, all with such names.
_OF_TEXTUAL_INVERSION = re.compile(r"(emb_params|clip_[lg]|t5xxl|string_to_param|<.*>)")
_A_FEW = 4
# Sides of a convolution's weights over frames.
_SIDES_OF_VIDEOS = 5
_AT_LOAD = "--quantization nf4 or fp8 packs the original checkpoint as it loads"
# Ways of packing that are not read: their names, what reads them, and ends of tensors' names.
_PACKINGS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("SVDQuant", "Nunchaku reads it", (r"\.qweight", r"\.(wscales|smooth_factor|proj_down)")),
    ("GPTQ or AWQ", _AT_LOAD, (r"\.qweight", r"\.qzeros")),
    ("bitsandbytes, 4 bits", _AT_LOAD, (r"\.(quant_state\.bitsandbytes__\w+|absmax)",)),
    ("bitsandbytes, 8 bits", _AT_LOAD, (r"\.SCB",)),
    ("NVFP4", "ComfyUI reads it", (r"\.(weight_scale_2|weight_global_scale)",)),
    ("Quanto", _AT_LOAD, (r"\.weight\._(data|scale|packed)",)),
    ("TorchAO", _AT_LOAD, (r"\.weight[:_](qdata|_data)",)),
    ("SDNQ", "SD.Next reads it", (r"\.(svd_up|zero_point)",)),
)
_READABLE = "download the BF16 file, an fp8 file with scales, or a GGUF such as Q4_K_M or Q8_0"
_OTHER_GGUF = "download another GGUF of the model, such as Q4_K_M or Q8_0"
_FP8 = frozenset({"F8_E4M3", "F8_E5M2"})
_SCALE = re.compile(r"(.*\.)?(scale_weight|weight_scale)$")
# Beside weights: markers, tables of positions, and scales of what goes in.
_BESIDE = re.compile(r"(.*\.)?(scaled_fp8|comfy_quant|position_ids|input_scale|scale_input)$")
# GGUF's types that diffusers reads.
READ_TYPES = frozenset(
    {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "IQ4_XS"}
    | {f"Q{bits}_K" for bits in (2, 3, 4, 5, 6)}
)


def known_as(tensors: Mapping[str, TensorInfo], rows: Iterable[Row]) -> Foreign | None:
    """Return the first of `rows` that a file with these tensors is; None for none of them."""
    text = "\n".join(tensors)
    for row in rows:
        if all(re.search(f"^(?:{one})", text, re.MULTILINE) for one in row.patterns):
            sides = max((len(one.shape) for one in tensors.values()), default=0)
            is_of_videos = row.what == "a VAE" and sides == _SIDES_OF_VIDEOS
            what = "a VAE of Qwen-Image or of a video model" if is_of_videos else row.what
            return Foreign(what, row.hint)
    if len(tensors) <= _A_FEW and all(map(_OF_TEXTUAL_INVERSION.match, tensors)):
        return Foreign("a textual inversion (an embedding of words)", _NO_ADAPTERS)
    return None


def refuse_packing(file: SingleFile) -> None:
    """Raise CheckpointError for weights that a library packed in a way that is not read."""
    text = "\n".join(file.tensors)
    for how, reader, ends in _PACKINGS:
        if all(re.search(f"(?:{one})$", text, re.MULTILINE) for one in ends):
            what = f"{file.path.name} is packed by {how}, which is not read"
            raise fault("quantized", what, file.path, f"{reader}; or {_READABLE}")


def refuse_types(file: SingleFile) -> None:
    """Raise CheckpointError for tensors of types that are not read, or 8 bits without scales."""
    is_gguf, tensors = file.format == "gguf", file.tensors
    scales = [name for name in tensors if not is_gguf and _SCALE.match(name)]
    weights = {name for name in tensors if is_gguf or not _BESIDE.match(name)}
    read = READ_TYPES if is_gguf else {*FLOATS, *_FP8}
    if others := [
        name
        for name in tensors
        if name in weights and tensors[name].dtype not in (FLOATS if name in scales else read)
    ]:
        kinds = ", ".join(sorted({tensors[name].dtype for name in others}))
        what = f"{file.path.name} has {len(others)} tensors of {kinds}, which is not read"
        hint = _OTHER_GGUF if is_gguf else _READABLE
        raise fault("quantized", f"{what}: {names_text(others)}", file.path, hint)
    if not scales and any(tensors[name].dtype in _FP8 for name in weights):
        what = f"{file.path.name} has weights of 8 bits without scales, so their size is unknown"
        raise fault("quantized", what, file.path, _READABLE)
