"""A model that is one file: what its components are, and where to get them."""

import os
import shlex
from collections.abc import Callable
from pathlib import Path

from hyimg_cli.errors import CheckpointError
from hyimg_cli.loading import hub
from hyimg_cli.loading.checkpoint import fault
from hyimg_cli.loading.single_file import read_single_file
from hyimg_cli.manifest.resolved import public_model
from hyimg_cli.mistyped import nearest_path
from hyimg_cli.models import releases
from hyimg_cli.models.architectures import architecture_of
from hyimg_cli.settings.paths import is_hub_file
from hyimg_cli.spec.units import names_text

# The part of a checkpoint whose weights a file replaces.
REPLACED = "transformer"


def find(name: str) -> Path:
    """Return the path of a model's file, or of OWNER/REPOSITORY/FILE in the hub's cache.

    Fetches nothing. Raises CheckpointError if there is neither.
    """
    path = Path(os.path.expanduser(name))
    if os.path.exists(path):  # unlike its method, never raises, not for long names
        return path
    near = nearest_path(str(path))
    if not is_hub_file(name):
        hint = near or "give the path of a file, or of a checkpoint's folder"
        raise fault("missing", f"model file not found: {name}", "", hint)
    if (found := hub.cached_file(name)) is not None:
        return found
    owner, repository, file = name.split("/", 2)
    hint = f"fetch it with: hyimg pull {owner}/{repository} {shlex.quote(file)}"
    what = f"model file not found: {name} is neither here nor in the hub's cache"
    raise fault("missing", what, "", f"{near}; or {hint}" if near else hint)


def refuse_alone(path: Path, components: str, is_here: Callable[[str], bool]) -> None:
    """Raise CheckpointError for a file that is no model, or without its components.

    `is_here`: whether a hub id is in the local cache.
    """
    if components:
        return
    found = architecture_of(read_single_file(path))
    known = releases.with_parts_for(found.name, path.stem)
    here = [one for one in known if is_here(one)]
    what = f"{path.name} is a transformer of {found.name}; its text encoder and VAE are apart"
    if here:
        hint = f"add --components {here[0]}, which is in the hub's cache"
        others = [one for one in known if one not in here[:1]]
        hint += f"; or that of {names_text(others)}" if others else ""
    elif known:
        hint = f"get them with hf download {known[0]} --exclude '{REPLACED}/*.safetensors', and add"
        hint += f" --components {known[0]}; the file does not say of which release it is: "
        hint += names_text(known)
    else:
        hint = "hyimg does not run this network: use a model that docs/editors.md names"
    raise fault("components", what, path, hint)


def other_components(path: Path, folder: Path) -> CheckpointError:
    """Return the error for components that are not of a picture editor in diffusers' layout."""
    what = f"the components for {path.name} are not those of a picture editor: "
    what += public_model(str(folder))
    hint = "name a folder in diffusers' layout, with model_index.json, text_encoder/ and vae/"
    return fault("components", what, folder, hint)
