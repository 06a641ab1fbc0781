"""Runs of lines and pictures that a Python program holds, without files of its own."""

import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from hyimg_cli.engine.run import run_manifest
from hyimg_cli.files import replace_file
from hyimg_cli.journal.past_run import past_jobs
from hyimg_cli.manifest.ids import child_ids
from hyimg_cli.manifest.manifest import manifest_of
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.spec import digest

_SOURCES = "sources"
_IN_PNG = ("1", "L", "LA", "P", "I", "I;16", "RGB", "RGBA")


def draw(
    lines: Iterable[Mapping[str, Any]], config: RunConfig, **how: Any
) -> dict[str, list[Image.Image]]:
    """Run lines of a manifest, given as dictionaries, and return the pictures by custom_id.

    `images` may contain pictures of PIL, which are saved in `sources` of the output folder. `how`:
    keyword arguments of `run_manifest`. A second call with equal lines draws nothing. Jobs that
    failed are missing from the result; `past_jobs` has their errors. Raises what `run_manifest`
    raises.
    """
    folder = config.output.folder
    written = [json.dumps(_with_files(line, folder / _SOURCES)) for line in lines]
    manifest = manifest_of("\n".join(written).encode(), "lines")
    run_manifest(manifest, config, **how)
    found = {job.custom_id: job for job in past_jobs(folder) if job.is_done}
    names = [name for line in manifest.lines for name in child_ids(line.fields)]
    return {
        name: [_read(found[name].folder / one["path"]) for one in found[name].outputs]
        for name in names
        if name in found
    }


def _with_files(line: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return a line whose pictures are paths of files in `folder`, named by their contents."""
    images = line.get("images", ())
    images = [images] if isinstance(images, str | Path | Image.Image) else images
    files = [_saved(one, folder) if isinstance(one, Image.Image) else str(one) for one in images]
    return {**line, **({"images": files} if files else {})}


def _saved(picture: Image.Image, folder: Path) -> str:
    """Save a picture without loss, once, with its colour profile and orientation."""
    form = "PNG" if picture.mode in _IN_PNG else "TIFF"
    facts = {"exif": picture.getexif(), "icc_profile": picture.info.get("icc_profile")}
    picture.save(data := io.BytesIO(), form, **facts)
    content = data.getvalue()
    path = folder / f"{digest.of_bytes(content)[:32]}.{form.lower()}"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)
    return str(path)


def _read(path: Path) -> Image.Image:
    with Image.open(path) as picture:
        return picture.copy()
