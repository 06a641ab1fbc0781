"""Manifests that ship with the package, found by their bare name."""

import os
from pathlib import Path

import hyimg_cli
from hyimg_cli.errors import UsageError
from hyimg_cli.manifest.manifest import Manifest, read_manifest


def read(name: str) -> Manifest:
    """Read the manifest that a command line names: a file, `-` for stdin, or a packaged one."""
    path = Path(name)
    if name == "-":
        return read_manifest("-")
    is_file = os.path.exists(path) and not os.path.isdir(path)
    if is_file or path.suffix or path.name != name:
        return read_manifest(path)
    packaged = recipes_folder() / f"{name}.jsonl"
    if not packaged.is_file():
        raise UsageError(
            f"{name!r} is neither a file nor a built-in manifest",
            hint="give a .jsonl or .txt file, - for standard input, or one of: "
            f"{', '.join(names())}",
            code="manifest.missing",
        )
    return read_manifest(packaged)


def names() -> list[str]:
    """Return the names of the packaged manifests."""
    return sorted(file.stem for file in recipes_folder().glob("*.jsonl"))


def recipes_folder() -> Path:
    """Return the folder of recipes, in an installed package or at the top of a checkout."""
    package = Path(hyimg_cli.__file__).parent
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parent / "recipes"
