"""Which network a single file holds, by the names of its tensors; no torch.

A header names the architecture, not the kind: Qwen-Image and its editors store the same tensors.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from hyimg_cli.loading.checkpoint import fault
from hyimg_cli.loading.single_file import SingleFile
from hyimg_cli.models.foreign_files import (
    ADAPTERS,
    OTHERS,
    known_as,
    refuse_packing,
    refuse_types,
)
from hyimg_cli.spec.units import names_text


@dataclass(frozen=True)
class Architecture:
    """A network: its name, diffusers' class for it, and what comes before names in the file."""

    name: str
    class_name: str
    prefix: str = ""


# Before all names of a network: ComfyUI's, PEFT's, and a training script's.
PREFIXES = ("model.diffusion_model.", "diffusion_model.", "transformer.", "net.", "model.")
# Of each architecture, patterns of names; a file has them all. The first one that fits counts.
# Names are the library's or the authors'.
_TABLE: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("FLUX.2", "Flux2Transformer2DModel", (r"double_stream_modulation_img\.",)),
    ("FLUX.3", "Flux3Transformer2DModel", (r"early_stream_modulations\.",)),
    ("Qwen-Image-2.1", "QwenImage21Transformer2DModel", (r"txt_in\.text_norm\.",)),
    (
        "Qwen-Image-Layered",
        "QwenImageTransformer2DModel",
        (r"transformer_blocks\.\d+\.img_mod\.", r"time_text_embed\.addition_t_embedding\."),
    ),
    (
        "Qwen-Image",
        "QwenImageTransformer2DModel",
        (r"transformer_blocks\.\d+\.img_mod\.", r"transformer_blocks\.\d+\.txt_mlp\."),
    ),
    (
        "LongCat-Image",
        "LongCatImageTransformer2DModel",
        (r"single_transformer_blocks\.", r"time_embed\.timestep_embedder\.", r"x_embedder\.weight"),
    ),
    (
        "FLUX.1",
        "FluxTransformer2DModel",
        (
            r"single_transformer_blocks\.",
            r"time_text_embed\.text_embedder\.",
            r"x_embedder\.weight",
        ),
    ),
    ("FLUX.1", "FluxTransformer2DModel", (r"double_blocks\.\d+\.img_attn\.", r"vector_in\.")),
    (
        "Z-Image",
        "ZImageTransformer2DModel",
        (r"layers\.\d+\.adaLN_modulation\.0\.", r"cap_embedder\.", r"noise_refiner\."),
    ),
    ("Krea2", "Krea2Transformer2DModel", (r"(txtfusion|text_fusion)\.",)),
)
# Editions of FLUX.1 with more channels than its latents have: extra pictures.
_CHANNELS_OF_FLUX1 = {384: "FLUX.1 Fill", 128: "FLUX.1 Depth or Canny"}
_FIRST_OF_FLUX1 = ("x_embedder.weight", "img_in.weight")
# Other parts in a file that holds everything.
_OTHER_PARTS = re.compile(
    r"(vae|first_stage_model|text_encoders?|text_encoder_2|cond_stage_model|conditioner)\."
)


def architecture_of(file: SingleFile) -> Architecture:
    """Return the network that a file holds.

    Raises CheckpointError, with what it is, for a file that is no model of ours or is packed in a
    way that is not read.
    """
    refuse_packing(file)
    other = known_as(file.tensors, ADAPTERS)
    found = None if other else _found_in(file.tensors)
    if found is None:
        other = other or known_as(file.tensors, OTHERS)
        if other is None:
            what = f"of an unknown kind; among its tensors are {names_text([*file.tensors], 3)}"
            hint = "give the transformer of a picture model that docs/editors.md names"
        else:
            what, hint = other
        raise fault("not-a-model", f"{file.path.name} is {what}", file.path, hint)
    refuse_types(file)
    _refuse_edition(file, found)
    return found


def _found_in(names: Iterable[str]) -> Architecture | None:
    """Return the network that has these names, with or without a prefix."""
    for prefix in ("", *PREFIXES):
        own = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        for title, class_name, patterns in _TABLE:
            if all(any(re.match(pattern, name) for name in own) for pattern in patterns):
                return Architecture(title, class_name, prefix)
    return None


def _refuse_edition(file: SingleFile, found: Architecture) -> None:
    """Raise CheckpointError for a file with more than the network, or an edition not supported."""
    if others := [name for name in file.tensors if _OTHER_PARTS.match(name)]:
        what = f"{file.path.name} holds {found.name} with other parts of it: {names_text(others)}"
        hint = "give a file of the transformer alone, and the other parts with --components"
        raise fault("not-a-model", what, file.path, hint)
    first = [file.tensors.get(found.prefix + name) for name in _FIRST_OF_FLUX1]
    for one in filter(None, first):
        if found.name == "FLUX.1" and one.shape[-1] in _CHANNELS_OF_FLUX1:
            edition = _CHANNELS_OF_FLUX1[one.shape[-1]]
            what = f"{file.path.name} is {edition}, which hyimg does not run"
            hint = "use FLUX.1 Kontext, which edits by a text, or an edit with a mask"
            raise fault("not-a-model", what, file.path, hint)
