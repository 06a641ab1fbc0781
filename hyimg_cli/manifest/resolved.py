"""A resolved job as a manifest line, for `manifest.resolved.jsonl`, resume keys and PNGs."""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from functools import cache, lru_cache
from pathlib import Path, PurePath
from typing import Any

from hyimg_cli.addresses import address_of, joined
from hyimg_cli.manifest.fields import PATH_FIELDS
from hyimg_cli.settings.paths import is_hub_file
from hyimg_cli.spec.job import BY_ID, LINEAGE, ImageJob, Job, SizeRequest, TextJob, VideoJob
from hyimg_cli.spec.model_name import names_file, parts_of, with_components
from hyimg_cli.spec.options import PICTURE_OPTIONS, VIDEO_OPTIONS, boxes_text

# The user's own data can be anything and is kept in the result line only. The file's name is left
# out too, and the candidate's origin: the picture is the same without them.
_PRIVATE = ("metadata", "name", "links", *LINEAGE)
# Number of resolved paths of source images that are cached.
_PATHS_NEAR = 1024
# A file in the hub's cache.
_IN_CACHE = re.compile(r"models--((?:(?!--)[^/])+)--([^/]+)/snapshots/[^/]+/(.+)")
# Options that matter only if the text before the picture is written, or given.
_OF_TEXT = ("bot_task", "drop_think", "ar_seed")


def job_to_json(job: Job) -> dict[str, Any]:
    """Return the job as a complete manifest line: read again, it gives the same job.

    Fields that no stage would use are left out; `images` are as the job has them.
    """
    if isinstance(job, TextJob):
        return _answer_to_json(job) | _own_fields(job)
    options = VIDEO_OPTIONS if isinstance(job, VideoJob) else PICTURE_OPTIONS
    entry = {name: getattr(job, name) for name in ("custom_id", "task", "prompt", "model")}
    for name, unsaid in options.items():
        if (value := getattr(job, name)) != unsaid and name not in _OF_TEXT:
            entry[name] = value
    if job.images:
        entry["images"] = list(job.images)
    if job.links:
        entry["links"] = ["" if one is None else one.custom_id for one in job.links]
    if job.step_cache is not None:
        entry["step_cache"] = str(job.step_cache)
    if job.lora:
        entry["lora"] = PATH_FIELDS["lora"].to_json(job.lora)
    entry["size"] = size_text(job.size) if isinstance(job, ImageJob) else str(job.size)
    if isinstance(job, VideoJob):
        if job.branch_count > 1:
            entry["negative_prompt"] = job.negative_prompt
        else:
            entry.pop("negative_prompt", None)
        if job.camera:
            entry["camera"] = job.camera
    else:
        if "negative_prompt" in job.user_fields:
            entry["negative_prompt"] = job.negative_prompt  # empty differs from missing
        if not job.guidance_renorm_min:
            entry.pop("guidance_renorm_min", None)  # as if the field did not exist
        if not job.images:
            entry.pop("infer_align_image_size", None)
        if job.outside is not None:
            entry["keep_outside"] = True
            # Values that differ from their defaults.
            for field in fields(job.outside):
                if (value := getattr(job.outside, field.name)) != field.default:
                    entry[field.name] = value
            if job.crops:
                entry["crop"] = boxes_text(job.crops)
        entry |= _text_fields(job)
        # PNG adds nothing, so resume keys from before other formats existed remain valid.
        if job.encoding.format != "png":
            quality = job.encoding.quality
            how = {"lossless": True} if quality is None else {"quality": quality}
            entry |= {"format": job.encoding.format, **how}
    return entry | _own_fields(job)


def _answer_to_json(job: TextJob) -> dict[str, Any]:
    """Return the fields of a job that asks for a text; options of pictures are not among them."""
    entry: dict[str, Any] = {
        name: getattr(job, name)
        for name in ("custom_id", "task", "prompt", "model", "images", "choices", "system_prompt")
        if getattr(job, name)
    }
    if job.links:
        entry["links"] = ["" if one is None else one.custom_id for one in job.links]
    for name in ("images", "choices"):
        if name in entry:
            entry[name] = list(entry[name])
    if job.use_system_prompt != "custom":
        entry["use_system_prompt"] = job.use_system_prompt
    return entry | _text_fields(job)


def _own_fields(job: Job) -> dict[str, Any]:
    """Return the fields that shape no pixel: the file's name, lineage and the user's own data."""
    entry: dict[str, Any] = {} if job.file_name == BY_ID else {"name": job.file_name}
    entry |= job.lineage.to_json()
    if job.metadata_json != "null":
        entry["metadata"] = json.loads(job.metadata_json)
    entry.update(json.loads(job.extra_json))
    return entry


def lines_beside(jobs: Iterable[Job], folder: Path) -> Iterator[dict[str, Any]]:
    """Yield `job_to_json` with paths of images and models relative to `folder`."""
    from_folder = leading_from(folder)
    for job in jobs:
        entry = job_to_json(job)
        weights, parts = parts_of(job.model)
        # A model that ships with hyimg may have a folder's name; the parts of a file have not.
        parts = os.path.abspath(os.path.expanduser(parts)) if _is_there(parts) else parts
        entry["model"] = with_components(_as_path(weights), parts)
        yield map_paths(entry, lambda path: from_folder(Path(path)))


def lines_moved(
    lines: Iterable[Mapping[str, Any]], former: Path, folder: Path
) -> Iterator[dict[str, Any]]:
    """Move an untrusted manifest's lines from folder `former` to `folder`. Raises BadValue."""
    from_folder = leading_from(folder)
    for line in lines:
        yield map_paths(line, lambda path: from_folder(joined(former, path)))


def public_line(job: Job) -> dict[str, Any]:
    """Return `job_to_json` without the user's own data; paths are cut to their last name."""
    return public_fields(job_to_json(job))


def public_fields(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a resolved line without the user's own data; paths are cut to their last name."""
    line = {
        name: value
        for name, value in entry.items()
        if name not in _PRIVATE and not name.startswith("x_")
    }
    model = public_model(entry["model"])
    return map_paths(line, lambda path: PurePath(path).name) | {"model": model}


def public_model(model: str) -> str:
    """Return a checkpoint's name without its parent folders.

    A hub id, or OWNER/REPOSITORY/FILE, is returned unchanged; what is in the hub's cache gives it.
    """
    weights, components = parts_of(model)
    if components:
        return with_components(public_model(weights), public_model(components))
    path = PurePath(model)
    hub = path.parents[1] if path.parent.name == "snapshots" else path
    hub = hub.parent if hub.name == "snapshots" else hub
    if hub.name.startswith("models--"):
        return hub.name.removeprefix("models--").replace("--", "/", 1)
    if names_file(model):
        if is_hub_file(model) and not _is_there(model):
            return model
        in_cache = _IN_CACHE.search(path.as_posix())
        return "/".join(in_cache.groups()) if in_cache else path.name
    if model.startswith(("/", ".", "~")) or model.count("/") > 1:
        return path.name
    return model


def _as_path(name: str) -> str:
    """Return a model's name as a path if it is one; a flag's path may lack dots."""
    is_path = os.sep in name and _is_there(name)
    return os.path.abspath(os.path.expanduser(name)) if is_path else name


def _is_there(name: str) -> bool:
    return bool(name) and os.path.exists(os.path.expanduser(name))


def map_paths(line: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """Return a copy of the line with every path changed. Raises BadValue."""
    return dict(line) | {
        name: kind.to_json(kind.map_paths(kind.read(line[name]), change))
        for name, kind in PATH_FIELDS.items()
        if name in line
    }


def leading_from(folder: Path) -> Callable[[Path], str]:
    """Return a function that makes paths relative to `folder`."""
    # NOTE: the system follows links before it resolves "..", so both ends must be free of links.
    real = cache(Path.resolve)
    start = folder.resolve()

    @lru_cache(_PATHS_NEAR)
    def leading(path: Path) -> str:
        if address := address_of(path):
            return address
        there = real(path.parent) / path.name
        return str(there) if address_of(folder) else os.path.relpath(there, start)

    return leading


def _text_fields(job: ImageJob) -> dict[str, Any]:
    """Return the values that affect the text before the picture, if the job has such a text."""
    if job.has_given_text:
        ids = job.cot_token_ids
        given = {"cot_text": job.cot_text} if ids is None else {"cot_token_ids": list(ids)}
        task = {"bot_task": job.bot_task} if job.use_system_prompt == "dynamic" else {}
        written = {"written": json.loads(job.written_json)} if job.written_json else {}
        return {**given, **task, "drop_think": job.drop_think, **written}
    entry: dict[str, Any] = {"bot_task": job.bot_task}
    if job.writes_text:
        if job.bot_task != "recaption" and job.draws:
            entry["drop_think"] = job.drop_think
        entry["temperature"] = job.text.temperature
        if job.text.temperature:  # by chance
            entry |= {"ar_seed": job.ar_seed, "top_k": job.text.top_k, "top_p": job.text.top_p}
        entry["max_new_tokens"] = job.text.max_new_tokens
    return entry


def size_text(size: SizeRequest) -> str:
    """Return the size as a manifest writes it; a ratio of small numbers as `W:H`."""
    if size.is_auto or min(size.height, size.width) >= 16:
        return str(size)
    return f"{size.width}:{size.height}"
