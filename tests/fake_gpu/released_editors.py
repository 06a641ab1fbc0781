"""Released editors of diffusers by their public configurations: networks without numbers."""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import tiny_editors
import torch
import transformers

from hyimg_cli.loading.checkpoint import parts_index

_FILE = Path(__file__).parents[1] / "models" / "diffusers_image" / "released.json"
FACTS = json.loads(_FILE.read_text())
CHECKPOINTS: dict[str, list[str]] = FACTS["checkpoints"]
# Tiny checkpoints of the same pipelines: tokenizers, processors, schedulers and indices.
TINY = {
    "QwenImagePipeline": "qwen-image",
    "QwenImageEditPipeline": "qwen-image-edit",
    "QwenImageEditPlusPipeline": "qwen-image-edit-plus",
    "QwenImageLayeredPipeline": "qwen-image-layered",
    "QwenImage21Pipeline": "qwen-image-2.1",
    "Flux2KleinPipeline": "klein",
    "Flux2KleinKVPipeline": "klein-kv",
    "Flux2Pipeline": "flux2-dev",
    "Flux3DistilledModularPipeline": "flux3",
    "Flux3ModularPipeline": "flux3-base",
    "FluxKontextPipeline": "kontext",
    "FluxPipeline": "flux-dev",
    "Krea2Pipeline": "krea2-turbo",
    "LongCatImagePipeline": "longcat",
    "LongCatImageEditPipeline": "longcat-edit",
    "ZImagePipeline": "z-image",
}


@cache
def built(name: str) -> Any:
    """A released network without numbers."""
    class_name, values = FACTS["parts"][name]
    with torch.device("meta"):
        if hasattr(diffusers, class_name):
            return getattr(diffusers, class_name)(**values)
        cls: Any = getattr(transformers, class_name)
        return cls(cls.config_class(**values))


@cache
def shapes(name: str) -> dict[str, tuple[int, ...]]:
    """Every stored tensor of a released network."""
    module = built(name)
    found = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    for copy in getattr(module, "_tied_weights_keys", None) or ():
        if getattr(module.config, "tie_word_embeddings", False):
            found.pop(copy, None)
    return found


def numbers(name: str) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes(name).values())


def write_network(folder: Path, name: str) -> list[str]:
    """Configuration and header of a network, its weights a hole in the file."""
    class_name, values = FACTS["parts"][name]
    folder.mkdir()
    is_of_diffusers = hasattr(diffusers, class_name)
    if is_of_diffusers:
        (folder / "config.json").write_text(built(name).to_json_string())
    else:
        getattr(transformers, class_name).config_class(**values).save_pretrained(folder)
    header, end = dict[str, Any](), 0
    for key, shape in shapes(name).items():
        begin, end = end, end + 2 * torch.Size(shape).numel()
        header[key] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    stem = "diffusion_pytorch_model" if is_of_diffusers else "model"
    with (folder / f"{stem}.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return ["diffusers" if is_of_diffusers else "transformers", class_name]


def write_released(folder: Path, model: str) -> Path:
    """A released editor's checkpoint with the tokenizers of a tiny one of its pipeline."""
    pipeline, transformer, vae, *encoders = CHECKPOINTS[model]
    tiny_editors.write(folder, TINY[pipeline])
    (folder / "card.json").unlink()
    names = {"transformer": transformer, "vae": vae}
    names |= dict(zip(("text_encoder", "text_encoder_2"), encoders, strict=False))
    path = parts_index(folder)
    index = json.loads(path.read_text())
    for part, name in names.items():
        own = json.loads((folder / part / "config.json").read_text())
        shutil.rmtree(folder / part)
        index[part] = write_network(folder / part, name)
        file = folder / part / "config.json"
        config = json.loads(file.read_text())
        # Pictures are at the tokens of that tokenizer.
        config |= {key: own[key] for key in own if key.endswith("_token_id") and key in config}
        file.write_text(json.dumps(config))
    path.write_text(json.dumps(index))
    return folder
