"""Which folders are LingBot-World fast, and where its parts are; no torch.

    published            lingbot_world_fast/ (safetensors), models_t5_umt5-xxl-enc-bf16.pth,
                         Wan2.1_VAE.pth; perhaps also the two experts of the base model
    diffusers-converted  model_index.json, transformer/ vae/ text_encoder/ tokenizer/

Pickles are never read: only the transformer of the published layout is used. Text encoder and VAE,
which are those of every Wan 2.1, come from another folder in diffusers' layout.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hyimg_cli.errors import CheckpointError
from hyimg_cli.loading import checkpoint
from hyimg_cli.models.common.config import Config
from hyimg_cli.models.diffusers_video.layout import CheckpointLayout, Component, component_of
from hyimg_cli.models.diffusers_video.record import wan_patch

FAMILY = "lingbot_world"
TRANSFORMER = "transformer"
_INDEX = checkpoint.PARTS_INDEXES[0]
_PUBLISHED = "lingbot_world_fast"
_EXPERTS = ("high_noise_model", "low_noise_model")
_PIPELINE = "LingBotWorldCausalDMDPipeline"
_CLASSES = frozenset({"CausalLingBotWorldTransformer3DModel", "WanModelFast"})
_OTHERS = {
    "vae": frozenset({"AutoencoderKLWan"}),
    "text_encoder": frozenset({"UMT5EncoderModel"}),
    "tokenizer": frozenset({"T5Tokenizer", "T5TokenizerFast"}),
}
# Other names of the same number in the original configuration.
_ORIGINAL = {"num_attention_heads": "num_heads", "in_channels": "in_dim", "out_channels": "out_dim"}


@dataclass(frozen=True)
class NetworkShape:
    """Numbers of the transformer, by configuration key.

    `num_frames_per_block`: frames of a chunk.
    """

    num_attention_heads: int = 40
    attention_head_dim: int = 128
    num_layers: int = 40
    ffn_dim: int = 13824
    text_dim: int = 4096
    text_len: int = 512
    freq_dim: int = 256
    in_channels: int = 36
    out_channels: int = 16
    eps: float = 1e-6
    patch_size: tuple[int, int, int] = (1, 2, 2)
    num_frames_per_block: int = 3
    rope_max_seq_len: int = 1024

    @property
    def width(self) -> int:
        return self.num_attention_heads * self.attention_head_dim


def is_lingbot_world(folder: Path) -> bool:
    """Return True for any checkpoint of LingBot-World, including refused ones."""
    if (folder / _PUBLISHED).is_dir():
        return True
    index = _json(folder / _INDEX)
    if index:
        return str(index.get("_class_name")).startswith("LingBotWorld")
    own = str(_json(folder / "config.json").get("_class_name")) in _CLASSES
    return own or "control_type" in _json(folder / _EXPERTS[0] / "config.json")


def read_layout(folder: Path, components: Path | None = None) -> CheckpointLayout:
    """Return the checkpoint's parts; all but the transformer come from `components`, if given.

    Raises CheckpointError with the reason for a checkpoint that is not supported.
    """
    index = _json(folder / _INDEX)
    if (folder / _PUBLISHED).is_dir():
        transformer = folder / _PUBLISHED
    elif index:
        if index.get("_class_name") != _PIPELINE:
            raise _refused(folder, f"pipeline {index.get('_class_name')!r} is not supported")
        transformer = component_of(folder, TRANSFORMER, index.get(TRANSFORMER), _CLASSES).folder
    elif (folder / _EXPERTS[0]).is_dir():
        raise _refused(folder, "the folder has the two experts of the base model")
    else:
        transformer = folder
    network = Component(transformer, "diffusers", "WanModelFast")
    for what in _unsupported(network.config()):
        raise _refused(network.folder, what)
    found = {TRANSFORMER: network}
    source = components or (folder if index else None)
    if source is not None:
        # VAE, text encoder and tokenizer of a Wan checkpoint in diffusers' layout.
        named = checkpoint.read_json(source / _INDEX)
        for name, classes in _OTHERS.items():
            found[name] = component_of(source, name, named.get(name), classes)
    return CheckpointLayout(folder, FAMILY, found, Config(index, folder / _INDEX))


def network_shape(layout: CheckpointLayout) -> NetworkShape:
    """Return the transformer's numbers, with the defaults of its class for missing ones."""
    own = layout.components[TRANSFORMER].config()
    original = {name: own.values[old] for name, old in _ORIGINAL.items() if own.has(old)}
    own, plain = replace(own, values={**own.values, **original}), NetworkShape()
    heads = own.count("num_attention_heads", plain.num_attention_heads)
    head_dim = own.count("attention_head_dim", plain.attention_head_dim)
    return own.facts(
        NetworkShape,
        attention_head_dim=own.count("dim", heads * head_dim, least=heads) // heads,
        num_layers=own.count("num_layers", plain.num_layers),
    )


def _unsupported(config: Config) -> Iterator[str]:
    size = config.count("local_attn_size", -1, least=-1)
    if size != -1:
        yield f"the model is v2: its attention has a window of {size} latent frames"
    if (control := config.text("control_type", "cam")) != "cam":
        yield f"the model is controlled with {control!r}, not only a camera"
    if (kind := config.text("model_type", "i2v")) != "i2v":
        yield f"model_type is {kind!r}; expected 'i2v'"
    if (patch := wan_patch(config)) != (1, 2, 2):
        yield f"the patches are {patch}; expected (1, 2, 2)"
    if not config.values.get("cross_attn_norm", True) or not config.values.get("qk_norm", True):
        yield "the attention has no norms"
    if config.has("image_dim") or config.has("added_kv_proj_dim"):
        yield "the model reads image tokens"
    if config.has("quantization_config"):
        yield "the weights are quantized"


def _refused(folder: Path, what: str) -> CheckpointError:
    return CheckpointError(
        what,
        where=folder,
        hint="use the first fast model with camera control; the base models (two experts, 70 "
        "steps) and v2 (a window, licence CC BY-NC-SA 4.0) are not supported",
        code="checkpoint.family",
    )


def _json(path: Path) -> dict[str, Any]:
    """Return a configuration; empty if it is missing or unreadable."""
    try:
        return checkpoint.read_json(path)
    except CheckpointError:
        return {}
