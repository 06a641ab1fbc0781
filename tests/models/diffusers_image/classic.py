"""Manifest lines, drawn by hyimg and by diffusers' classic pipelines, or whole modular ones."""

import importlib
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from library_weights import copy_weights
from PIL import Image

from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.loading.checkpoint import parts_index

STEPS = 3
GUIDANCE = {
    "klein": 1.0, "klein-base": 4.0, "z-image": 5.0, "kontext": 2.5, "longcat": 4.0,
    "longcat-edit": 4.5, "flux2-dev": 4.0, "flux-dev": 3.5, "flux-schnell": 0.0, "krea2": 3.5,
    "krea2-turbo": 0.0, "flux3-base": 4.0,
}  # fmt: skip
Line = dict[str, Any]
Checkpoint = Callable[[str], Path]


def line(custom_id: str, prompt: str, *images: str, **more: Any) -> Line:
    task = "it2i" if images else "t2i"
    size = {"size": "96x64"}
    own = {"custom_id": custom_id, "task": task, "prompt": prompt, "num_inference_steps": STEPS}
    return {"seed": 7} | own | size | ({"images": list(images)} if images else {}) | more


def load_classic(folder: Path) -> Any:
    index = json.loads(parts_index(folder).read_text())
    cls = getattr(diffusers, index["_class_name"])
    is_modular = issubclass(cls, diffusers.ModularPipeline)
    pipeline = _load_modular(cls, folder, index) if is_modular else cls.from_pretrained(folder)
    copy_weights(pipeline)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _load_modular(cls: Any, folder: Path, index: dict[str, Any]) -> Any:
    """A modular pipeline without its prompt upsampler, which reads prompts as they are given."""
    blocks = cls().blocks
    blocks.sub_blocks.pop("prompt_upsampler")
    pipeline = cls(blocks=blocks)
    for name in ("text_encoder", "tokenizer", "vae", "transformer"):
        library, class_name, _ = index[name]
        part = getattr(importlib.import_module(library), class_name)
        pipeline.update_components(**{name: part.from_pretrained(folder / name)})
    return pipeline


loaded_once = cache(load_classic)


def drawn_by_library(
    folder: Path, one: Line, root: Path, prepare: Callable[[Any], object] | None = None
) -> np.ndarray:
    """The classic pipeline's picture of a line; `prepare` changes one of its own before."""
    pipeline = load_classic(folder) if prepare else loaded_once(folder)
    if prepare:
        prepare(pipeline)
    pictures = [Image.open(root / path).convert("RGB") for path in one.get("images", ())]
    given: dict[str, Any] = {}
    if pictures:
        given["image"] = pictures if len(pictures) > 1 else pictures[0]
    if folder.name == "flux3-base":
        scale = one.get("guidance_scale", GUIDANCE[folder.name])
        guider = diffusers.ClassifierFreeGuidance(guidance_scale=scale, enabled=scale > 1)
        pipeline.update_components(guider=guider)
        if "negative_prompt" in one:
            given["negative_prompt"] = one["negative_prompt"]
    elif folder.name == "flux3":
        pass
    elif "qwen" in folder.name:
        scale = one.get("guidance_scale", 4.0)
        given["true_cfg_scale"] = scale
        given["negative_prompt"] = one.get("negative_prompt", " ") if scale > 1 else None
    else:
        given["guidance_scale"] = one.get("guidance_scale", GUIDANCE[folder.name])
        if "negative_prompt" in one:
            given["negative_prompt"] = one["negative_prompt"]
    if "size" in one:
        given |= zip(("width", "height"), map(int, one["size"].split("x")), strict=True)
    if folder.name == "kontext" and "size" in one:
        area = given["width"] // 16 * (given["height"] // 16) * 16**2
        given |= {"max_area": area, "_auto_resize": False}
    if folder.name == "flux-schnell":
        given["max_sequence_length"] = 256
    if folder.name == "longcat":
        given["enable_prompt_rewrite"] = False
    made = pipeline(
        prompt=one["prompt"],
        num_inference_steps=one["num_inference_steps"],
        generator=torch.Generator().manual_seed(one["seed"]),
        **given,
    )
    pictures = made.get("images") if "flux3" in folder.name else made.images
    return np.asarray(pictures[0])


def pixels_of(folder: Path) -> dict[str, np.ndarray]:
    return {file.stem: np.asarray(Image.open(file)) for file in folder.glob("outputs/*.png")}


def results(folder: Path) -> dict[str, Line]:
    return {one["custom_id"]: one for one in RunFolder(folder).results().values()}
