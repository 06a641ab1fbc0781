"""Make a manifest from pictures and prompts: every picture with every prompt.

Its lines are ordinary JSON lines. Written to a file and edited there, they run as the same jobs.
"""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hyimg_cli.errors import HyimgError, ManifestError
from hyimg_cli.files import SETTINGS_BYTES, bytes_of
from hyimg_cli.manifest.fields import PATH_FIELDS
from hyimg_cli.manifest.line import fault
from hyimg_cli.manifest.manifest import Manifest, manifest_of, text_lines
from hyimg_cli.manifest.resolved import leading_from
from hyimg_cli.manifest.source_ids import ids_of_files, in_id, names_of_files, short
from hyimg_cli.manifest.sources import Sources
from hyimg_cli.media.kinds import SUFFIXES
from hyimg_cli.settings.name_template import template_of

# Names of what has no folder's name: prompts alone, and pictures of this folder.
_NO_FOLDER, _THIS_FOLDER = "prompts", "pictures"
# A single word that looks like a file name, such as prompts.txt with a typing error.
_LIKE_A_FILE = re.compile(r"\S*[\w/-]\.([A-Za-z]{1,5})")


def prompts_of(given: Sequence[str]) -> list[str]:
    """Return the prompts that the flags give, each once: texts and lines of `.txt` files.

    Raises ManifestError with every fault.
    """
    faults: list[HyimgError] = []
    prompts: list[str] = []
    for text in given:
        if text.lower().endswith(".txt") and "\n" not in text:
            prompts += _lines_of(Path(text), faults)
        elif file := _LIKE_A_FILE.fullmatch(text):
            what = f"{text} looks like a file, but prompts are read from .txt files only"
            itself = f"--prompt '{text} '"
            hint = f"give a .txt file with one prompt per line; to use the word itself: {itself}"
            if file[1].lower() in ("jsonl", "csv", "tsv"):
                hint = f"run a manifest without --prompt: hyimg generate {text}"
            faults.append(fault("prompt-file", what, "--prompt", hint))
        elif text.strip():
            prompts.append(text)
        else:
            faults.append(fault("empty-text", "the prompt is empty", "--prompt"))
    if faults:
        raise ManifestError(faults)
    return list(dict.fromkeys(prompts))


def _lines_of(path: Path, faults: list[HyimgError]) -> list[str]:
    try:
        data = bytes_of(path, SETTINGS_BYTES, or_stream=True)
        lines = [raw.decode() for _, raw in text_lines(data)]
    except (OSError, ValueError) as error:
        what = f"the prompts cannot be read: {getattr(error, 'strerror', None) or 'not UTF-8'}"
        hint = "a --prompt that ends in .txt names a file with one prompt per line"
        faults.append(fault("unreadable", what, path, hint))
        return []
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        faults.append(fault("empty", "the file has no prompts", path))
    return prompts


def manifest_of_prompts(
    found: Sources | None,
    prompts: Sequence[str],
    task: str | None = None,
    recorded_by: Callable[[str], Mapping[str, str] | None] = lambda name: {},
) -> Manifest:
    """Make jobs that edit each picture by each prompt, or jobs of the prompts alone.

    The manifest's name, which is also the default output folder, is made from the pictures' folder
    and a digest of the prompts. `task`: the task, if the default (an edit, or a new picture) is not
    meant. `recorded_by`: from the manifest's name, the file names that its results already have;
    None if a template names them.
    """
    title = _NO_FOLDER
    if found is not None:
        title = _THIS_FOLDER if found.base == Path() else str(found.base)
    folder = Path(os.path.abspath(found.base)).name if found else _NO_FOLDER
    asked = json.dumps([*prompts, task] if task else list(prompts))
    name = f"{in_id(folder) if folder else _NO_FOLDER}-{short(asked)}"
    fields = {"task": task} if task else {}
    data = json_lines(found, prompts, Path(), fields, recorded_by(name))
    return manifest_of(data, title, name)


def json_lines(
    found: Sources | None,
    prompts: Sequence[str],
    folder: Path,
    fields: Mapping[str, Any] = MappingProxyType({}),
    recorded: Mapping[str, str] | None = MappingProxyType({}),
) -> bytes:
    """Return the lines of such a manifest, with paths relative to `folder`.

    `fields`: those that every line has.
    """
    entries: list[dict[str, Any]] = []
    if found is None:
        entries += ({"custom_id": f"prompt-{short(one)}", "prompt": one} for one in prompts)
    else:
        leading, is_here = leading_from(folder), folder.resolve() == Path().resolve()
        ids = ids_of_files(found.files, SUFFIXES)
        names = ids if recorded is None else names_of_files(ids, recorded)
        # The first prompt's jobs keep their names when more prompts are added after it.
        marks = ["", *(f"-{short(prompt)}" for prompt in prompts[1:])]

        def written(path: Path) -> str:
            """Return a path as the lines have it; from the working folder, as it was given."""
            return str(path) if is_here or path.is_absolute() else leading(path)

        for name, path in found.files.items():
            own: dict[str, Any] = {"images": [PATH_FIELDS["images"].as_path(written(path))]}
            if region := found.regions.get(name):
                own["region"] = PATH_FIELDS["region"].map_paths(
                    region, lambda mask: written(Path(mask))
                )
            for prompt, mark in zip(prompts, marks, strict=True):
                job = {"custom_id": f"{ids[name]}{mark}", "prompt": prompt} | own
                if names[name] != ids[name]:
                    job["name"] = template_of(f"{names[name]}{mark}")
                entries.append(job)
    return "".join(
        json.dumps(one | {**fields}, ensure_ascii=False) + "\n" for one in entries
    ).encode()
