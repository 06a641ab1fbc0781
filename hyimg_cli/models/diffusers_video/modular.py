"""Entries of a modular pipeline's index, read as a classic one's; no torch.

    classic   "vae": ["diffusers", "AutoencoderKLFlux2"]
    modular   "vae": [null, null, {"type_hint": ["diffusers", "AutoencoderKLFlux2"], ..}]

A modular entry has its library and class twice if a pipeline with the part has been saved. Its
place (`pretrained_model_name_or_path`, `subfolder`) is not followed: parts are in the checkpoint's
own folder.
"""

from pathlib import Path
from typing import Any

from hyimg_cli.models.common.config import Config

# Classes that read another class's name in a part's files.
_AUTO = frozenset({"AutoProcessor", "AutoTokenizer"})
_NAMES = {
    "processor_config.json": "processor_class",
    "tokenizer_config.json": "processor_class",
}


def plain_entry(part: Path, entry: Any) -> Any:
    """Return an index's entry for a part as library and class; others are returned as they are."""
    match entry:
        case [library, class_name, {"type_hint": [hinted_library, hinted_class]}]:
            library, class_name = library or hinted_library, class_name or hinted_class
            if class_name in _AUTO:
                class_name = _class_in(part) or class_name
            return [library, class_name]
    return entry


def place_of(entry: Any) -> str:
    """Return the hub id or path at which a modular index has a part; empty if it says none."""
    match entry:
        case [_, _, {"pretrained_model_name_or_path": str(place)}]:
            return place
    return ""


def _class_in(part: Path) -> str:
    """Return the class that a processor's own files name, or an empty string."""
    for file, key in _NAMES.items():
        own = Config.read(part / file, is_optional=True)
        if own.has(key):
            return own.text(key)
    return ""
