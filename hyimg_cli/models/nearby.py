"""Paths near a checkpoint: say what they are, or where the checkpoint is."""

from pathlib import Path
from typing import NoReturn

from hyimg_cli.errors import CheckpointError
from hyimg_cli.loading.checkpoint import fault, read_json, refuse_dead_link
from hyimg_cli.spec.units import names_text

_INDEX = "model_index.json"
# Files that mark a checkpoint's own folder.
_MARKS = (_INDEX, "config.json", "llm_config.json")
_ONE_FILE = "use the checkpoint's folder in diffusers' layout; --quantization makes it smaller"


def refuse_file(path: Path) -> NoReturn:
    """Raise CheckpointError for a file in a checkpoint's place."""
    if path.suffix.lower() == ".gguf":
        what = f"{path.name} is a GGUF file, and GGUF checkpoints are not read"
        raise fault("quantized", what, path, _ONE_FILE)
    if path.suffix.lower() == ".safetensors":
        what = f"{path.name} is a single file, and checkpoints of one file are not read"
        raise fault("missing", what, path, _ONE_FILE)
    what, hint = f"{path.name} is a file; a checkpoint is a folder", f"give {path.parent}"
    raise fault("missing", what, path, hint if path.name in _MARKS else _ONE_FILE)


def refuse_nearby(folder: Path) -> None:
    """Raise CheckpointError for a folder that is not a checkpoint, but has or belongs to one."""
    parent = folder.absolute().parent
    if not (folder / _INDEX).is_file() and folder.absolute().name in _parts_of(parent):
        name = folder.absolute().name
        what = f"this is the part {name} of the checkpoint in {parent}"
        raise fault("missing", what, folder, f"give {parent}")
    if any((folder / name).exists() for name in _MARKS):
        return
    inside = sorted(one for one in folder.glob("snapshots/*") if one.is_dir())
    own = sorted(one for one in folder.iterdir() if one.is_dir())
    # A published LingBot-World has its transformer next to such a folder.
    inside += own if all((one / _INDEX).is_file() for one in own) else []
    if folder.absolute().name == "snapshots":
        inside = inside or sorted(one for one in folder.iterdir() if one.is_dir())
    if inside:
        shown = names_text([str(one.relative_to(folder)) for one in inside])
        what = f"this folder is not a checkpoint itself; the checkpoint is in {shown}"
        raise fault("missing", what, folder, f"give {inside[-1]}")
    if {"transformer", "vae"} <= {one.name for one in own}:
        refuse_dead_link(folder / _INDEX)
        what = f"{folder.absolute().name}/{_INDEX} is missing"
        raise fault("missing", what, folder, "download it into the folder")
    names = sorted(one.name for one in folder.iterdir() if one.suffix in (".gguf", ".safetensors"))
    if names and not any((folder / one).is_dir() for one in ("transformer", "vae")):
        if any(name == "model.safetensors" or name.startswith("ema.") for name in names):
            return
        is_gguf = any(name.endswith(".gguf") for name in names)
        kind = "GGUF checkpoints" if is_gguf else "checkpoints of one file"
        what = f"the folder has no config.json, and {kind} are not read: {names_text(names)}"
        raise fault("quantized" if is_gguf else "missing", what, folder, _ONE_FILE)


def _parts_of(folder: Path) -> set[str]:
    """Return the parts in the index of a checkpoint; empty for other folders, and for LingBot's.

    Its transformer is a checkpoint by itself.
    """
    try:
        index = read_json(folder / _INDEX)
    except CheckpointError:
        return set()
    if str(index.get("_class_name")).startswith("LingBot"):
        return set()
    return {name for name, one in index.items() if isinstance(one, list)}
