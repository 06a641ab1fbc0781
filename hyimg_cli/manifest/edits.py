"""The manifest that pictures and prompts stand for: every picture with every prompt.

Its lines are JSON like any other's, so that they can be written to a file, edited, and run from
there as the same jobs.
"""

import json
import os
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from hyimg_cli.errors import HyimgError, ManifestError
from hyimg_cli.files import SETTINGS_BYTES, bytes_of
from hyimg_cli.manifest.line import fault
from hyimg_cli.manifest.manifest import Manifest, manifest_of
from hyimg_cli.manifest.names import ids_of_files, in_id, short
from hyimg_cli.manifest.sources import Sources
from hyimg_cli.media.images import SUFFIXES

_BOM = b"\xef\xbb\xbf"
_NO_FOLDER = "prompts"


def prompts_of(given: Sequence[str]) -> list[str]:
    """The prompts that flags give: texts, and the lines of `.txt` files; each once.

    Raises ManifestError with every fault of them.
    """
    faults: list[HyimgError] = []
    prompts: list[str] = []
    for text in given:
        if text.lower().endswith(".txt") and "\n" not in text:
            prompts += _lines_of(Path(text), faults)
        elif text.strip():
            prompts.append(text)
        else:
            faults.append(fault("empty-text", "the prompt is empty", where="--prompt"))
    if faults:
        raise ManifestError(faults)
    return list(dict.fromkeys(prompts))


def _lines_of(path: Path, faults: list[HyimgError]) -> list[str]:
    try:
        data = bytes_of(path, SETTINGS_BYTES, or_stream=True)
        lines = data.removeprefix(_BOM).decode().splitlines()
    except (OSError, ValueError) as error:
        what = f"the prompts cannot be read: {getattr(error, 'strerror', None) or 'not UTF-8'}"
        hint = "a --prompt that ends in .txt is a file with a prompt per line"
        faults.append(fault("unreadable", what, where=path, hint=hint))
        return []
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        faults.append(fault("empty", "it holds no prompts", where=path))
    return prompts


def manifest_of_prompts(
    found: Sources | None, prompts: Sequence[str], task: str | None = None
) -> Manifest:
    """Jobs that edit each picture by each prompt; without pictures, jobs of the prompts alone.

    Its name, and so the default folder of its results, is the pictures' folder and a digest of the
    prompts. `task`: what becomes of them, if not an edit or a picture.
    """
    title = str(found.base) if found else _NO_FOLDER
    folder = Path(os.path.abspath(found.base)).name if found else _NO_FOLDER
    data = json_lines(found, prompts, Path(), task)
    asked = json.dumps([*prompts, task] if task else list(prompts))
    name = f"{in_id(folder) if folder else _NO_FOLDER}-{short(asked)}"
    return manifest_of(data, title, name)


def json_lines(
    found: Sources | None, prompts: Sequence[str], folder: Path, task: str | None = None
) -> bytes:
    """The lines of such a manifest that stands in `folder`."""
    entries = _of_pictures(found, prompts, folder) if found else _of_prompts(prompts)
    said = {"task": task} if task else {}
    lines = (json.dumps(entry | said, ensure_ascii=False) + "\n" for entry in entries)
    return "".join(lines).encode()


def _of_pictures(found: Sources, prompts: Sequence[str], folder: Path) -> Iterator[dict[str, Any]]:
    place = _from(folder)
    ids = ids_of_files(found.files, SUFFIXES)
    # The first prompt's jobs keep their names when others come behind it.
    marks = ["", *(f"-{short(prompt)}" for prompt in prompts[1:])]
    for name, path in found.files.items():
        image = place(path)
        for prompt, mark in zip(prompts, marks, strict=True):
            yield {"custom_id": f"{ids[name]}{mark}", "prompt": prompt, "images": [image]}


def _of_prompts(prompts: Sequence[str]) -> Iterator[dict[str, Any]]:
    for prompt in prompts:
        yield {"custom_id": f"prompt-{short(prompt)}", "prompt": prompt}


def _from(folder: Path) -> Any:
    """Gives a path as it leads from `folder`; one from here stays as it was given."""
    # NOTE: the system follows links before it goes up by "..", so both ends must be without them.
    start, here = folder.resolve(), Path().resolve()
    real = cache(Path.resolve)

    def placed(path: Path) -> str:
        if path.is_absolute() or start == here:
            return str(path)
        return os.path.relpath(real(path.parent) / path.name, start)

    return placed
