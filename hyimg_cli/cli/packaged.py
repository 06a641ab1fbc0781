"""Manifests and pages that ship with the package."""

import os
from pathlib import Path

import hyimg_cli
from hyimg_cli.errors import UsageError
from hyimg_cli.manifest.manifest import Manifest, read_manifest
from hyimg_cli.mistyped import nearest_path
from hyimg_cli.settings.values import nearest


def read(name: str, *, is_growing: bool = False) -> Manifest:
    """Read the manifest that a command line names: a file, `-` for stdin, or a packaged one.

    `is_growing`: see `read_manifest`.
    """
    path = Path(name)
    if name == "-":
        return read_manifest("-")
    is_file = os.path.exists(path) and not os.path.isdir(path)
    if is_file or path.suffix or path.name != name:
        return read_manifest(path, is_growing=is_growing)
    packaged = folder("recipes") / f"{name}.jsonl"
    if not packaged.is_file():
        close = nearest(name, names(), 0.75)
        hint = f"did you mean {close}?" if close else nearest_path(name)
        if " " in name:
            hint = f'to draw it, give a prompt: --prompt "{name}"'
        elif name == "help":
            hint = "for help, give --help"
        raise UsageError(
            f"{name!r} is neither a file nor a built-in manifest",
            hint=hint
            or f"give a .jsonl or .txt file, - for standard input, or one of: {', '.join(names())}",
            code="manifest.missing",
        )
    return read_manifest(packaged)


def names() -> list[str]:
    """Return the names of the packaged manifests."""
    return sorted(file.stem for file in folder("recipes").glob("*.jsonl"))


def folder(name: str) -> Path:
    """Return a folder of an installed package, or at the top of a checkout."""
    package = Path(hyimg_cli.__file__).parent
    installed = package / name
    return installed if installed.is_dir() else package.parent / name
