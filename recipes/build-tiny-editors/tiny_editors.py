"""Write tiny picture editors with random weights, in diffusers' layout, to a folder.

    python recipes/build-tiny-editors/tiny_editors.py OUT      OUT/qwen-image, OUT/klein, ..
    python recipes/build-tiny-editors/tiny_editors.py OUT --wide both

Their pictures are noise; they have the released editors' parts, names and files. OUT must not
exist. `--wide` writes the kinds of WIDE alone, with transformers wide enough to take most of a
job's time (`transformer`), and with text encoders in proportion to them, too (`both`).
"""

import argparse
import json
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLQwenImage,
    AutoencoderKLQwenImage21,
    FlowMatchEulerDiscreteScheduler,
    Flux2Transformer2DModel,
    Flux3Transformer2DModel,
    FluxTransformer2DModel,
    Krea2Transformer2DModel,
    LongCatImageTransformer2DModel,
    QwenImage21Transformer2DModel,
    QwenImageTransformer2DModel,
    ZImageTransformer2DModel,
)
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    PixtralImageProcessor,
    PixtralProcessor,
    PixtralVisionConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLModel,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.qwen2 import Qwen2Tokenizer

SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
PIPELINES = {
    "qwen-image": "QwenImagePipeline",
    "qwen-image-edit": "QwenImageEditPipeline",
    "qwen-image-edit-plus": "QwenImageEditPlusPipeline",
    "qwen-image-edit-2511": "QwenImageEditPlusPipeline",
    "qwen-image-layered": "QwenImageLayeredPipeline",
    "klein": "Flux2KleinPipeline",
    "klein-base": "Flux2KleinPipeline",
    "klein-kv": "Flux2KleinKVPipeline",
    "flux2-dev": "Flux2Pipeline",
    "flux3": "Flux3DistilledModularPipeline",
    "flux3-base": "Flux3ModularPipeline",
    "qwen-image-2.1": "QwenImage21Pipeline",
    "qwen-image-2.1-turbo": "QwenImage21Pipeline",
    "z-image": "ZImagePipeline",
    "kontext": "FluxKontextPipeline",
    "flux-dev": "FluxPipeline",
    "flux-schnell": "FluxPipeline",
    "krea2": "Krea2Pipeline",
    "krea2-turbo": "Krea2Pipeline",
    "longcat": "LongCatImagePipeline",
    "longcat-edit": "LongCatImageEditPipeline",
}
MISTRAL_SPECIAL = (
    "<unk>", "<s>", "</s>", "<pad>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
    "[IMG]", "[IMG_BREAK]", "[IMG_END]",
)  # fmt: skip
MISTRAL_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% set mark = 'SYSTEM_PROMPT' if message['role'] == 'system' else 'INST' %}"
    "[{{ mark }}]{{ message['content'][0]['text'] }}[/{{ mark }}]{% endfor %}"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The content of a message is a list of texts and pictures.
PARTS_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WIDE = ("klein", "klein-base", "qwen-image-edit-plus")
WIDTH = 16


def write(folder: Path, kind: str, **others: Any) -> Path:
    """Write one checkpoint of a kind in PIPELINES; `others` replace its own parts."""
    torch.manual_seed(0)
    makers = {"qwen": _qwen, "klein": _klein, "z": _z_image, "kontext": _flux, "flux": _flux}
    makers |= {"longcat": _longcat, "flux2": _flux2, "flux3": _flux3, "krea2": _krea2}
    make = makers[kind.split("-")[0]]
    make = _qwen21 if "2.1" in kind else make
    pipeline, parts = getattr(diffusers, PIPELINES[kind]), make(kind) | others
    if issubclass(pipeline, diffusers.ModularPipeline):
        _save_modular(pipeline(), parts, folder)
    else:
        pipeline(**parts).save_pretrained(folder)
    card: dict[str, Any] = {"name": f"tiny-{kind}", "trained": False}
    if kind != "qwen-image-layered":  # the library draws layers in two areas only
        card["base_size"] = 96
    (folder / "card.json").write_text(json.dumps(card) + "\n")
    return folder


def _save_modular(pipeline: Any, parts: dict[str, Any], folder: Path) -> None:
    pipeline.update_components(**parts)
    pipeline.save_pretrained(str(folder), overwrite_modular_index=True)
    # Its parts are in this folder, wherever that is.
    path = folder / "modular_model_index.json"
    index = json.loads(path.read_text())
    for name in parts:
        index[name][2]["pretrained_model_name_or_path"] = None
    path.write_text(json.dumps(index, indent=2) + "\n")


def wide_parts(kind: str, *, with_encoder: bool) -> dict[str, Any]:
    """Return a transformer that takes most of a job's time, and optionally a text encoder.

    With `with_encoder`, the ratio of the encoder's work for a token to the transformer's work for a
    row is the released one:

        klein                   released   5 + 20 blocks of 3,072, 36 layers of 2,560
                                here       1 + 4 blocks of 256, 36 layers of 96
        qwen-image-edit-plus    released   60 blocks of 3,072, 28 + 32 layers of 3,584 and 1,280
                                here       4 blocks of 192, 2 + 2 layers of 224 and 80
    """
    tokenizer, parts = _tokenizer(), dict[str, Any]()
    if kind.startswith("klein"):
        if with_encoder:
            config = _qwen3(tokenizer, layers=36, width=96)
            config.update({"intermediate_size": 368, "num_attention_heads": 10, "head_dim": 16})
            config.update({"vocab_size": 5696})
            parts["text_encoder"] = Qwen3ForCausalLM(config)
        parts["transformer"] = Flux2Transformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=4,
            attention_head_dim=32,
            num_attention_heads=8,
            joint_attention_dim=3 * (96 if with_encoder else 8),
            axes_dims_rope=(8, 8, 8, 8),
            guidance_embeds=False,
            timestep_guidance_channels=16,
        )
        return parts
    if with_encoder:
        of_texts = {"hidden_size": 224, "intermediate_size": 1184, "num_attention_heads": 7}
        of_texts |= {"num_key_value_heads": 1, "vocab_size": 680}
        of_pictures = {"hidden_size": 80, "intermediate_size": 216, "num_heads": 5}
        parts["text_encoder"] = _qwen25_vl(tokenizer, of_texts, of_pictures, sections=[4, 6, 6])
    parts["transformer"] = QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=4,
        attention_head_dim=32,
        num_attention_heads=6,
        joint_attention_dim=224 if with_encoder else WIDTH,
        axes_dims_rope=(8, 12, 12),
    )
    return parts


def _qwen(kind: str) -> dict[str, Any]:
    tokenizer, draws_layers = _tokenizer(), kind.endswith("layered")
    # The library takes a picture of as many channels as latents have for latents.
    channels = 8 if draws_layers else 4
    parts: dict[str, Any] = {
        "tokenizer": tokenizer,
        "text_encoder": _qwen25_vl(tokenizer),
        "vae": AutoencoderKLQwenImage(
            base_dim=4,
            z_dim=channels,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
            latents_mean=[0.0] * channels,
            latents_std=[1.0] * channels,
            input_channels=4 if draws_layers else 3,
        ),
        "transformer": QwenImageTransformer2DModel(
            in_channels=4 * channels,
            out_channels=channels,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=3,
            joint_attention_dim=WIDTH,
            axes_dims_rope=(8, 4, 4),
            # Source pictures are modulated at time 0.
            zero_cond_t=kind.endswith("2511"),
            use_additional_t_cond=draws_layers,
            use_layer3d_rope=draws_layers,
        ),
        # As released.
        "scheduler": FlowMatchEulerDiscreteScheduler(
            base_image_seq_len=256,
            max_image_seq_len=8192,
            max_shift=0.9,
            shift_terminal=0.02,
            use_dynamic_shifting=True,
        ),
    }
    if kind != "qwen-image":
        parts["processor"] = _processor(tokenizer)
    return parts


def _qwen21(kind: str) -> dict[str, Any]:
    tokenizer = _tokenizer()
    image_processor = Qwen2VLImageProcessor(
        patch_size=16, merge_size=2, min_pixels=32 * 32, max_pixels=4096 * 4096
    )
    return {
        "processor": Qwen3VLProcessor(
            image_processor=image_processor,
            video_processor=Qwen3VLVideoProcessor(),
            tokenizer=tokenizer,
            # The content of a message is a list of texts.
            chat_template=CHAT_TEMPLATE.replace("['content']", "['content'][0]['text']"),
        ),
        "text_encoder": _qwen3_vl(tokenizer),
        "vae": AutoencoderKLQwenImage21(
            base_dim=4,
            decoder_base_dim=4,
            z_dim=4,
            dim_mult=[1, 1, 1, 1, 1],
            num_res_blocks=1,
            latents_mean=[0.0] * 4,
            latents_std=[1.0] * 4,
        ),
        "transformer": QwenImage21Transformer2DModel(
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=3,
            context_in_dim=WIDTH,
            axes_dims_rope=(8, 4, 4),
        ),
        "scheduler": FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        "sample_sigmas": [1.0, 0.75, 0.5, 0.25] if kind.endswith("turbo") else None,
    }


def _klein(kind: str) -> dict[str, Any]:
    tokenizer, width = _tokenizer(), 8
    return {
        "tokenizer": tokenizer,
        # Layers 9, 18 and 27 are read.
        "text_encoder": Qwen3ForCausalLM(_qwen3(tokenizer, layers=28, width=width)),
        "vae": AutoencoderKLFlux2(
            block_out_channels=(8, 8, 8, 8),
            layers_per_block=1,
            latent_channels=4,
            norm_num_groups=4,
        ),
        "transformer": _flux2_transformer(width, has_guidance=False),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        "is_distilled": kind != "klein-base",
    }


def _flux2(kind: str) -> dict[str, Any]:
    """FLUX.2-dev has klein's parts, but for its text encoder and the input for guidance."""
    tokenizer, width = _mistral_tokenizer(), 16
    of_texts = MistralConfig(
        hidden_size=width,
        intermediate_size=32,
        # Layers 10, 20 and 30 are read.
        num_hidden_layers=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=len(tokenizer),
        bos_token_id=1,
        eos_token_id=2,
    )
    of_pictures = PixtralVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=56,
        patch_size=14,
    )
    image_token = tokenizer.convert_tokens_to_ids("[IMG]")
    parts = _klein("klein")
    del parts["is_distilled"]
    return parts | {
        "tokenizer": PixtralProcessor(
            image_processor=PixtralImageProcessor(patch_size=14),
            tokenizer=tokenizer,
            patch_size=14,
            chat_template=MISTRAL_TEMPLATE,
        ),
        "text_encoder": Mistral3ForConditionalGeneration(
            Mistral3Config(
                text_config=of_texts,
                vision_config=of_pictures,
                image_token_index=image_token,
                tie_word_embeddings=False,
            )
        ),
        "transformer": _flux2_transformer(width, has_guidance=True),
    }


def _flux3(kind: str) -> dict[str, Any]:
    """FLUX.3 has klein's VAE; its blocks make the scheduler."""
    qwen, tokenizer = _qwen21("qwen-image-2.1"), _tokenizer()
    processor = qwen["processor"]
    processor.chat_template = CHAT_TEMPLATE  # the content of a message is a text
    config = _qwen3_vl_config(tokenizer, layers=33)  # every fourth layer is read
    return {
        "tokenizer": processor,
        "text_encoder": Qwen3VLForConditionalGeneration(config),
        "vae": _klein("klein")["vae"],
        "transformer": Flux3Transformer2DModel(
            in_channels=16,
            cond_in_channels=16,
            num_layers=1,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=8 * WIDTH,
            timestep_channels=16,
            axes_dims_rope=(4, 4, 4, 4),
            flow_map=kind == "flux3",
        ),
    }


def write_rewriter(folder: Path) -> Path:
    """Write a tiny prompt rewriter of FLUX.3; its texts are noise, and end after some words."""
    torch.manual_seed(0)
    processor = _qwen21("qwen-image-2.1")["processor"]
    processor.chat_template = PARTS_TEMPLATE
    tokenizer = processor.tokenizer
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL}
    rope = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 1.0}
    rope |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    of_texts = {
        "hidden_size": WIDTH,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": len(tokenizer),
        "rope_parameters": rope,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "layer_types": ["linear_attention", "full_attention"],
        # A network whose layers add little repeats itself.
        "initializer_range": 0.5,
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
    }
    of_pictures = {
        "depth": 2,
        "hidden_size": WIDTH,
        "intermediate_size": WIDTH,
        "num_heads": 2,
        "out_hidden_size": WIDTH,
        "num_position_embeddings": 64,
    }
    config = Qwen3_5Config(
        text_config=of_texts,
        vision_config=of_pictures,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    network = Qwen3_5ForConditionalGeneration(config)
    letters = tokenizer.convert_tokens_to_ids(list(string.ascii_lowercase + "\u0120"))
    with torch.no_grad():
        own = network.lm_head.weight[letters].clone()
        network.lm_head.weight.zero_()
        network.lm_head.weight[letters] = own
        # The request counts, far from the end as it is.
        mixer = network.model.language_model.layers[0].linear_attn
        mixer.A_log.fill_(-5.0)
        mixer.out_proj.weight *= 20
    # A text ends at the first one of every third letter.
    network.generation_config.eos_token_id = letters[::3]
    network.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def _flux2_transformer(width: int, *, has_guidance: bool) -> Flux2Transformer2DModel:
    return Flux2Transformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=3 * width,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=has_guidance,
        timestep_guidance_channels=16,
    )


def _krea2(kind: str) -> dict[str, Any]:
    qwen, tokenizer = _qwen("qwen-image"), _tokenizer()
    return {
        "tokenizer": tokenizer,
        # Every third layer of 36 is read, from the second on.
        "text_encoder": Qwen3VLModel(_qwen3_vl_config(tokenizer, layers=36)),
        "vae": qwen["vae"],
        "transformer": Krea2Transformer2DModel(
            in_channels=16,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=32,
            timestep_embed_dim=16,
            text_hidden_dim=WIDTH,
            num_text_layers=12,
            text_num_attention_heads=2,
            text_num_key_value_heads=2,
            text_intermediate_size=32,
            num_layerwise_text_blocks=1,
            num_refiner_text_blocks=1,
            axes_dims_rope=(4, 6, 6),
        ),
        "scheduler": FlowMatchEulerDiscreteScheduler(
            base_image_seq_len=256, max_image_seq_len=6400, use_dynamic_shifting=True
        ),
        "is_distilled": kind.endswith("turbo"),
    }


def _flux(kind: str) -> dict[str, Any]:
    is_schnell = kind == "flux-schnell"
    bytes_, letters = bytes_to_unicode().values(), map(chr, range(33, 127))
    ends = ("<|startoftext|>", "<|endoftext|>")
    clip = {one: at for at, one in enumerate([*bytes_, *(f"{b}</w>" for b in bytes_), *ends])}
    sentence = [(one, 0.0) for one in ("<pad>", "</s>", "<unk>")] + [("▁", -2.0)]
    sentence += [(one, -3.0) for one in letters]
    sentence += [(f"<extra_id_{number}>", 0.0) for number in reversed(range(100))]
    return {
        "tokenizer": CLIPTokenizer(vocab=clip, merges=[], model_max_length=77),
        "text_encoder": CLIPTextModel(
            CLIPTextConfig(
                vocab_size=len(clip),
                hidden_size=WIDTH,
                intermediate_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                bos_token_id=clip[ends[0]],
                eos_token_id=clip[ends[1]],
            )
        ),
        "tokenizer_2": T5Tokenizer(vocab=sentence, model_max_length=512),
        "text_encoder_2": T5EncoderModel(
            T5Config(
                vocab_size=len(sentence), d_model=WIDTH, d_kv=8, d_ff=32, num_layers=2, num_heads=2
            )
        ),
        "vae": _flux_vae(4),
        "transformer": FluxTransformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=WIDTH,
            pooled_projection_dim=WIDTH,
            axes_dims_rope=(4, 6, 6),
            guidance_embeds=not is_schnell,
        ),
        # Schnell has one shift for all sizes.
        "scheduler": FlowMatchEulerDiscreteScheduler(
            shift=1.0 if is_schnell else 3.0, use_dynamic_shifting=not is_schnell
        ),
    }


def _longcat(kind: str) -> dict[str, Any]:
    tokenizer = _tokenizer()
    return {
        "tokenizer": tokenizer,
        "text_encoder": _qwen25_vl(tokenizer),
        "text_processor": _processor(tokenizer),
        # As many channels as its pipelines expect.
        "vae": _flux_vae(16),
        "transformer": LongCatImageTransformer2DModel(
            in_channels=64,
            num_layers=1,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=WIDTH,
            pooled_projection_dim=WIDTH,
            axes_dims_rope=[4, 6, 6],
        ),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
    }


def _z_image(kind: str) -> dict[str, Any]:
    tokenizer = _tokenizer()
    return {
        "tokenizer": tokenizer,
        "text_encoder": Qwen3Model(_qwen3(tokenizer, layers=3, width=WIDTH)),
        "vae": _flux_vae(4),
        "transformer": ZImageTransformer2DModel(
            in_channels=4,
            dim=32,
            n_layers=2,
            n_refiner_layers=1,
            n_heads=2,
            n_kv_heads=2,
            cap_feat_dim=WIDTH,
            axes_dims=[8, 4, 4],
            axes_lens=[1024, 128, 128],
        ),
        # The turbo version has 3.
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=6.0),
    }


def _qwen3(tokenizer: Qwen2Tokenizer, *, layers: int, width: int) -> Qwen3Config:
    return Qwen3Config(
        hidden_size=width,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=len(tokenizer),
        bos_token_id=0,
        eos_token_id=0,
    )


def _flux_vae(channels: int) -> AutoencoderKL:
    blocks = 4
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * blocks,
        up_block_types=("UpDecoderBlock2D",) * blocks,
        block_out_channels=(8,) * blocks,
        latent_channels=channels,
        norm_num_groups=4,
        scaling_factor=0.3611,
        shift_factor=0.1159,
    )


def _processor(tokenizer: Qwen2Tokenizer) -> Qwen2VLProcessor:
    return Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(min_pixels=28 * 28, max_pixels=512 * 512),
        video_processor=Qwen2VLVideoProcessor(),
        tokenizer=tokenizer,
        chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}",
    )


def _tokenizer() -> Qwen2Tokenizer:
    """Return a tokenizer with one token a byte, then the special tokens."""
    characters = [SPECIAL[0], *bytes_to_unicode().values()]
    vocabulary = {character: index for index, character in enumerate(characters)}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[])
    tokenizer.add_tokens([AddedToken(token, special=True) for token in SPECIAL[1:]])
    tokenizer.pad_token, tokenizer.chat_template = SPECIAL[0], CHAT_TEMPLATE
    return tokenizer


def _mistral_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token a byte after Mistral's special tokens."""
    characters = [*MISTRAL_SPECIAL, *bytes_to_unicode().values()]
    plain = Tokenizer(models.BPE({one: at for at, one in enumerate(characters)}, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    plain.add_special_tokens([AddedToken(one, special=True) for one in MISTRAL_SPECIAL])
    named = dict(
        zip(("unk_token", "bos_token", "eos_token", "pad_token"), MISTRAL_SPECIAL, strict=False)
    )
    return PreTrainedTokenizerFast(tokenizer_object=plain, padding_side="left", **named)


def _qwen25_vl(
    tokenizer: Qwen2Tokenizer,
    of_texts: dict[str, int] | None = None,
    of_pictures: dict[str, int] | None = None,
    *,
    sections: Sequence[int] = (1, 1, 2),
) -> Qwen2_5_VLForConditionalGeneration:
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL}
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": list(sections)}
    of_texts = of_texts or {}
    config = Qwen2_5_VLConfig(
        text_config={
            "hidden_size": WIDTH,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "vocab_size": len(tokenizer),
            "max_position_embeddings": 4096,
            "rope_parameters": rope,
            "bos_token_id": 0,
            "eos_token_id": 0,
        }
        | of_texts,
        vision_config={
            "depth": 2,
            "hidden_size": WIDTH,
            "intermediate_size": WIDTH,
            "num_heads": 2,
            "out_hidden_size": of_texts.get("hidden_size", WIDTH),
            "fullatt_block_indexes": [1],
        }
        | (of_pictures or {}),
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def _qwen3_vl(tokenizer: Qwen2Tokenizer) -> Qwen3VLForConditionalGeneration:
    return Qwen3VLForConditionalGeneration(_qwen3_vl_config(tokenizer, layers=2))


def _qwen3_vl_config(tokenizer: Qwen2Tokenizer, *, layers: int) -> Qwen3VLConfig:
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL}
    sections = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]}
    return Qwen3VLConfig(
        text_config={
            "hidden_size": WIDTH,
            "intermediate_size": 32,
            "num_hidden_layers": layers,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "vocab_size": len(tokenizer),
            "max_position_embeddings": 65536,
            "rope_parameters": sections | {"mrope_interleaved": True},
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
        vision_config={
            "depth": 2,
            "hidden_size": WIDTH,
            "intermediate_size": WIDTH,
            "num_heads": 2,
            "out_hidden_size": WIDTH,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [1],
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--wide", choices=("transformer", "both"))
    arguments = parser.parse_args()
    if arguments.out.exists():
        parser.error(f"{arguments.out} exists")
    for kind in WIDE if arguments.wide else PIPELINES:
        parts = wide_parts(kind, with_encoder=arguments.wide == "both") if arguments.wide else {}
        print(write(arguments.out / kind, kind, **parts))


if __name__ == "__main__":
    main()
