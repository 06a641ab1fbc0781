"""Golden cases 1 to 6: text, rotation, experts, patching, VAE, ViT."""

from typing import Any

import numpy as np
import pytest
import torch
from kv_rows import read

from hyimg_cli.models.common.spans import Grid
from hyimg_cli.models.hunyuan_image3.rope import positions, rope
from hyimg_cli.models.hunyuan_image3.sequence import ImageBlock, Layout, LayoutBuilder, Section
from hyimg_cli.models.hunyuan_image3.vision import (
    VisionInputs,
    vision_features,
    vision_inputs,
)
from hyimg_cli.models.protocols import Prefill

pytestmark = pytest.mark.parity


def _text(ids: list[int], vocabulary: Any) -> Layout:
    draft = LayoutBuilder(vocabulary, has_joint_source_span=False)
    draft.section(Section(tuple(ids)))
    return draft.layout()


def test_01_text_causal(open_case: Any, network: Any, vocabulary: Any) -> None:
    case = open_case("01_text_causal")
    ids = case["input_ids"][0].tolist()
    layout = _text(ids, vocabulary)
    if "logits" in case:
        # The last row's logits for every prefix length: one prefill each, as the engine does it.
        rows = [_last_logits(network, layout, stop) for stop in range(1, len(ids) + 1)]
        case.close("logits", torch.stack(rows)[None])
    buffer = network.new_buffer()
    hidden = network.prefill([Prefill(layout, layout.ids, [], buffer, len(ids))])[0]
    if "greedy_tokens" in case:
        written, logits = [], []
        for _ in case["greedy_tokens"]:
            written.append(int(network.text_logits(hidden[None]).argmax()))
            hidden = network.feed([(written[-1:], buffer)])[0]
            logits.append(network.text_logits(hidden[None])[0])
        case.equal("greedy_tokens", written)
        case.close("decode_logits", torch.stack(logits)[None])
        keys, values = read(buffer, 0, buffer.length)
        case.close("layer0_keys", keys[None])
        case.close("layer0_values", values[None])
    if "ratio_input_ids" in case:
        ratio_layout = _text(case["ratio_input_ids"][0].tolist(), vocabulary)
        logits = _last_logits(network, ratio_layout, len(ratio_layout.ids))
        case.close("ratio_logits_last", logits[None])
        case.equal("ratio_token_ids", list(vocabulary.ratios))
        case.equal("ratio_argmax_index", int(logits[list(vocabulary.ratios)].argmax()))


def _last_logits(network: Any, layout: Layout, stop: int) -> torch.Tensor:
    hidden = network.prefill([Prefill(layout, layout.ids, [], network.new_buffer(), stop)])[0]
    return network.text_logits(hidden[None])[0]


def test_02_rope_2d(open_case: Any, arch: Any) -> None:
    case = open_case("02_rope_2d")
    for prefix in ("", "t2i_"):
        if f"{prefix}rope_image_info" not in case:
            continue
        blocks = [
            ImageBlock(start, stop, Grid(rows, columns))
            for start, stop, rows, columns in case[f"{prefix}rope_image_info"].tolist()
        ]
        stored = next(n for n in (f"{prefix}pos_yx", f"{prefix}cos") if n in case)
        yx = positions(case[stored].shape[0], blocks)
        cos_TD, sin_TD = rope(yx, head_dim=arch.head_dim, theta=arch.rope_theta)
        case.equal(f"{prefix}pos_yx", yx)
        case.close(f"{prefix}cos", cos_TD)
        case.close(f"{prefix}sin", sin_TD)


def test_03_moe(open_case: Any, network: Any) -> None:
    case = open_case("03_moe")
    moe = network.model.layers[int(case["layer"])].mlp
    flat = case["input"].flatten(0, -2)
    logits, weights, index = moe.gate(flat)
    case.close("router_logits", logits)
    case.close("topk_weights", weights)
    case.equal("topk_index", index)
    if moe.shared_mlp is not None:
        case.close("shared_output", moe.shared_mlp(case["input"]))
    case.close("output", moe(flat).view_as(case["input"]))


def test_04_patch_final(open_case: Any, network: Any) -> None:
    case = open_case("04_patch_final")
    timesteps = case["timesteps"]
    case.close("timestep_emb", network.timestep_emb(timesteps))
    case.close("time_embed", network.time_embed(timesteps))
    case.close("time_embed_2", network.time_embed_2(timesteps))
    embedded = network.patch_embed(case["latents"], network.time_embed(timesteps))
    case.close("patch_embed_out", embedded)
    rows = case["latents"].shape[2]
    final = network.final_layer(case["final_in"], network.time_embed_2(timesteps), rows)
    case.close("final_out", final)


def test_05_vae(open_case: Any, network: Any, arch: Any) -> None:
    case = open_case("05_vae")
    vae = network.vae
    if "image" in case:
        mean, logvar = vae.encode_moments(case["image"])
        case.close("mean", mean[:, :, None])
        case.close("logvar_clamped", logvar[:, :, None])
    if "cond_pixels" in case:
        mean, logvar = vae.encode_moments(case["cond_pixels"])
        mode = vae.posterior_sample(mean, logvar, torch.zeros_like(mean))
        case.close("cond_latents_mode_scaled", mode)
    for pixels, moments in (("image", "moments"), ("cond_pixels", "cond_moments")):
        if pixels in case:
            frames = case[pixels][:, :, None].repeat(1, 1, arch.vae.ffactor_temporal, 1, 1)
            case.close(moments, vae.encoder(frames))
    if "decode_input" in case:
        # The stored input is unscaled; `decode` takes the backbone's scaled latents.
        shift = arch.vae.shift_factor or 0.0
        scaled = (case["decode_input"][:, :, 0] - shift) * arch.vae.scaling_factor
        case.close("decoded", vae.decode(scaled)[:, :, None])


def test_06_vit_aligner(open_case: Any, network: Any, arch: Any) -> None:
    case = open_case("06_vit_aligner")
    if "rgb_uint8" in case:
        inputs = vision_inputs(np.ascontiguousarray(case["rgb_uint8"].numpy()), arch.vision)
        case.close("pixel_values", inputs.patches_1SP)
        case.equal("pixel_attention_mask", inputs.is_real_1S)
        case.equal("spatial_shapes", inputs.shapes_12)
    else:
        inputs = VisionInputs(
            case["pixel_values"], case["pixel_attention_mask"], case["spatial_shapes"]
        )
    features = vision_features(network.vision_model, inputs)
    case.close("last_hidden_state", features)
    case.close("aligned", network.vision_aligner(features))
