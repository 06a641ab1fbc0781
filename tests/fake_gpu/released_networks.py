"""Networks at released sizes as files without numbers: configuration, header, and a hole."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

# Name and shape of each tensor of a file.
Shapes = Mapping[str, tuple[int, ...]]


def write_hole(path: Path, shapes: Shapes, *, dtype: str = "BF16", width: int = 2) -> None:
    """Write a safetensors file that takes no space: its header, and zeros that are not stored."""
    header, end = dict[str, Any](), 0
    for name, shape in shapes.items():
        begin, end = end, end + width * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def write_network(folder: Path, class_name: str, values: Mapping[str, Any]) -> None:
    """Write a network of a library in place of a smaller one, whose other files stay."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.safetensors*"):
        old.unlink()
    cls, is_of_diffusers = library_class(class_name)
    with torch.device("meta"):
        if is_of_diffusers:
            module = cls(**values)
            (folder / "config.json").write_text(module.to_json_string())
        else:
            config = cls.config_class(**values)
            module = cls(config)
            config.save_pretrained(folder)
    tied: Iterable[str] = getattr(module, "_tied_weights_keys", None) or ()
    shapes = {n: tuple(t.shape) for n, t in module.state_dict().items() if n not in tied}
    stem = "diffusion_pytorch_model" if is_of_diffusers else "model"
    write_hole(folder / f"{stem}.safetensors", shapes)


def library_class(name: str) -> tuple[Any, bool]:
    """Return a class, and whether it is diffusers'."""
    if hasattr(diffusers, name):
        return getattr(diffusers, name), True
    return getattr(transformers, name), False
