"""Paths near a checkpoint: say what they are, or where the checkpoint is."""

import re
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from hyimg_cli.errors import CheckpointError
from hyimg_cli.files import text_of
from hyimg_cli.loading.checkpoint import (
    PARTS_INDEXES,
    fault,
    parts_index,
    read_json,
    refuse_dead_link,
)
from hyimg_cli.loading.single_file import SUFFIXES, read_single_file
from hyimg_cli.manifest.resolved import public_model
from hyimg_cli.models.architectures import architecture_of
from hyimg_cli.spec.units import names_text

_INDEX = PARTS_INDEXES[0]
# Files that mark a checkpoint's own folder.
_MARKS = (*PARTS_INDEXES, "config.json", "llm_config.json")
# Folders in which other programs keep single files.
_OF_FILES = frozenset(
    {"diffusion_models", "unet", "checkpoints", "loras", "vae", "text_encoders", "clip"}
)
# Files that are looked into.
_MOST_FILES = 12
_WITH_PARTS = "and its other parts with --components FOLDER_OR_ID"
# Classes of diffusers that are one part of a checkpoint.
_PART = re.compile(r"Autoencoder|.*(Transformer2DModel|UNet2DConditionModel)$")


def refuse_file(path: Path) -> NoReturn:
    """Raise CheckpointError for a file in a checkpoint's place."""
    if path.name in _MARKS:
        what = f"{path.name} is a file; a checkpoint is a folder"
        raise fault("missing", what, path, f"give {path.parent}")
    found = architecture_of(read_single_file(path))
    what, hint = f"{path.name} is a transformer of {found.name}", "give it with --model"
    if path.suffix.lower() not in SUFFIXES:
        hint = f"rename it so that its name ends with {' or '.join(SUFFIXES)}, and {hint}"
    raise fault("not-a-model", what, path, f"{hint}, {_WITH_PARTS}")


def snapshot_of(folder: Path) -> Path | None:
    """Return the snapshot in a repository's folder of the hub's cache; None for other folders.

    It is the one that `refs/main` names, or the only one.
    """
    home = folder.absolute()
    home = home.parent if home.name == "snapshots" else home
    if not home.name.startswith("models--"):
        return None
    with suppress(OSError, ValueError):
        found = home / "snapshots" / text_of(home / "refs" / "main", 1000).strip()
        if found.is_dir() and found.parent.name == "snapshots":
            return found
    only = [one for one in home.glob("snapshots/*") if one.is_dir()]
    return only[0] if len(only) == 1 else None


def refuse_nearby(folder: Path) -> None:
    """Raise CheckpointError for a folder that is not a checkpoint, but has or belongs to one."""
    parent = folder.absolute().parent
    if not parts_index(folder).is_file() and folder.absolute().name in _parts_of(parent):
        name = folder.absolute().name
        what = f"this is the part {name} of the checkpoint in {parent}"
        raise fault("missing", what, folder, f"give {parent}")
    if any((folder / name).exists() for name in _MARKS):
        _refuse_part(folder)
        return
    inside = sorted(one for one in folder.glob("snapshots/*") if one.is_dir())
    own = sorted(one for one in folder.iterdir() if one.is_dir())
    # A published LingBot-World has its transformer next to such a folder.
    inside += own if all(parts_index(one).is_file() for one in own) else []
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
    _refuse_folder_of_files(folder)


def _refuse_part(folder: Path) -> None:
    """Raise CheckpointError for one part of a checkpoint, without the others."""
    if parts_index(folder).exists() or not (folder / "config.json").is_file():
        return
    name = str(read_json(folder / "config.json").get("_class_name", ""))
    if _PART.match(name):
        hint = f"give the checkpoint's folder, with {_INDEX}; its weights as one file may be given "
        hint += f"with --model, {_WITH_PARTS}"
        raise fault("missing", f"this is one part of a checkpoint, a {name}", folder, hint)


def _refuse_folder_of_files(folder: Path) -> None:
    """Raise CheckpointError for a folder of single files, with the models in it."""
    if any(folder.glob("model.safetensors*")) or any(folder.glob("ema.*")):
        return
    roots = [folder, *(folder / one for one in _OF_FILES), *folder.glob("models/*")]
    files = [
        file
        for root in roots
        if root.is_dir() and (root == folder or root.name in _OF_FILES)
        for file in sorted(root.rglob("*") if root.name in _OF_FILES else root.iterdir())
        if file.suffix.lower() in SUFFIXES
    ]
    if not files:
        _refuse_repository_of_gguf(folder)
        return
    found, others = list[str](), list[str]()
    for file in files[:_MOST_FILES]:
        name = str(file.relative_to(folder))
        try:
            found.append(f"{name} ({architecture_of(read_single_file(file)).name})")
        except CheckpointError as error:
            others.append(error.what.replace(file.name, name, 1))
    more = f"; {len(files) - _MOST_FILES} more were not opened" * (len(files) > _MOST_FILES)
    what = f"this is a folder of single files; transformers in it: {names_text(found)}{more}"
    first = found[0].rpartition(" (")[0] if found else ""
    hint = f"give one of them: --model {folder / first}, {_WITH_PARTS}"
    if not found:
        what = f"this is a folder of single files without a transformer: {names_text(others, 3)}"
        hint = "give the transformer's file with --model, or a folder in diffusers' layout"
    raise fault("not-a-model", f"{what}", folder, hint)


def _refuse_repository_of_gguf(folder: Path) -> None:
    """Raise CheckpointError for a snapshot of a repository that has GGUF files alone."""
    name = public_model(str(folder.absolute()))
    if folder.absolute().parent.name == "snapshots" and "gguf" in name.lower():
        what = f"{name} is a repository of GGUF files, of which none is here"
        hint = f"get one with hyimg pull {name} FILE.gguf, and give --model {name}/FILE.gguf"
        raise fault("not-a-model", what, folder, f"{hint}, {_WITH_PARTS}")


def _parts_of(folder: Path) -> set[str]:
    """Return the parts in the index of a checkpoint; empty for other folders, and for LingBot's.

    Its transformer is a checkpoint by itself.
    """
    try:
        index = read_json(parts_index(folder))
    except CheckpointError:
        return set()
    if str(index.get("_class_name")).startswith("LingBot"):
        return set()
    return {name for name, one in index.items() if isinstance(one, list)}
