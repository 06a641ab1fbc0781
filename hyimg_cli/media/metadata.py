"""Metadata of a file: in a picture the A1111 `parameters` text, the whole job as JSON (the record)
and how it came about; in an MP4 that JSON as its comment. `formats` knows where each kind of
picture keeps them, `recorded` reads them back.

Basenames only: a picture that is passed on names no folder, user or host. Format 2 added to format
1 how the file was made, and the digests of its source images.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from hyimg_cli.media import xmp
from hyimg_cli.spec.job import POSES_SUFFIX, ImageJob, Size

FORMAT = 2
# The PNG text chunks that hold the parameters and the record.
PARAMETERS, KEYWORD = "parameters", "hyimg"
# The user's own data belongs to the result line; it may hold anything. A file has its name.
_LEFT_OUT = ("metadata", "name")
# No XML holds these, no file half a surrogate pair.
_ESCAPED = re.compile("[\ud800-\udfff\ufffe\uffff]")


@dataclass(frozen=True)
class Provenance:
    """Provenance of a file: hyimg's version, the checkpoint, by name what else decides its bits.

    `settings`: of the run (device, dtype, KV reuse, ...); `packages`: versions.
    """

    version: str
    model_fingerprint: str
    settings: Mapping[str, str] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "model_fingerprint": self.model_fingerprint,
            "settings": dict(self.settings),
            "packages": dict(self.packages),
        }


@dataclass(frozen=True)
class PictureText:
    """Texts of a picture's metadata. `source_type`: IPTC's word for how it came about."""

    parameters: str
    record: str
    source_type: str


@dataclass(frozen=True)
class PictureFacts:
    """Results of a job beyond what was asked: enough to make the same pixels again.

    `source_sha256`: of the bytes of each source image, in order.
    """

    model_name: str
    provenance: Provenance
    source_sha256: tuple[str, ...] = ()
    cot_text: str | None = None
    cot_token_ids: tuple[int, ...] | None = None
    ratio_index: int | None = None


def picture_text(
    job: ImageJob, resolved: Mapping[str, Any], facts: PictureFacts, size: Size, pixel_sha256: str
) -> PictureText:
    """Metadata of the job's picture of this size and these pixels. `resolved` is the job as a
    manifest line.
    """
    record = _record(job, resolved, facts) | {"size": str(size), "pixel_sha256": pixel_sha256}
    source_type = xmp.EDITED if job.task == "it2i" else xmp.MADE
    return PictureText(_parameters(job, facts, size), _json(record), source_type)


def retold(
    text: PictureText, resolved: Mapping[str, Any], size: Size, pixel_sha256: str
) -> PictureText:
    """The same of another picture that was made of this one, by a job that draws the same."""
    record = json.loads(text.record) | {"job": _public(resolved)}
    record |= {"size": str(size), "pixel_sha256": pixel_sha256}
    parameters = re.sub(r"(?<=, Size: )[0-9]+x[0-9]+(?=, )", str(size), text.parameters)
    return PictureText(parameters, _json(record), text.source_type)


def video_text(
    resolved: Mapping[str, Any], provenance: Provenance, source_sha256: Sequence[str] = ()
) -> str:
    """Contents of an MP4's `comment` and of its sidecar file: the job as JSON, and what made it."""
    sources = {"source_sha256": list(source_sha256)} if source_sha256 else {}
    return _json({"format": FORMAT, "job": _public(resolved), **provenance.to_json(), **sources})


def _json(record: Mapping[str, Any]) -> str:
    text = json.dumps(record, ensure_ascii=False, sort_keys=True)
    return _ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _parameters(job: ImageJob, facts: PictureFacts, size: Size) -> str:
    """Prompt, then one line of settings. Source: the layout of AUTOMATIC1111's infotext."""
    settings = {
        "Steps": job.num_inference_steps,
        "Sampler": "Flow-match Euler",
        "CFG scale": f"{job.guidance_scale:g}",
        "Seed": job.seed,
        "Size": size,
        "Model hash": facts.provenance.model_fingerprint[:10],
        "Model": _quoted(facts.model_name),
        "Version": f"hyimg {facts.provenance.version}",
    }
    return f"{job.prompt}\n" + ", ".join(f"{name}: {value}" for name, value in settings.items())


def _quoted(text: str) -> str:
    """`text`, quoted where its commas or colons would end a setting."""
    plain = PurePath(text).name
    return json.dumps(plain, ensure_ascii=False) if set(plain) & set(',:\n"') else plain


def _record(job: ImageJob, resolved: Mapping[str, Any], facts: PictureFacts) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "job": _public(resolved),
        **facts.provenance.to_json(),
        # Where the text is given the job has no bot_task, but a dynamic system prompt hangs on it.
        "bot_task": job.bot_task,
        "source_sha256": list(facts.source_sha256),
        "ratio_index": facts.ratio_index,
        "cot_text": facts.cot_text,
        "cot_token_ids": None if facts.cot_token_ids is None else list(facts.cot_token_ids),
    }


def _public(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """A job without the user's own data and without paths."""
    job = {
        name: value
        for name, value in resolved.items()
        if name not in _LEFT_OUT and not name.startswith("x_")
    }
    if "images" in job:
        job["images"] = [PurePath(image).name for image in job["images"]]
    if "region" in job:
        job["region"] = PurePath(job["region"]).name
    if str(job.get("camera", "")).endswith(POSES_SUFFIX):
        job["camera"] = PurePath(job["camera"]).name
    if "lora" in job:
        parts = (re.sub(r"^((?:high|low)=)?.*/", r"\1", part) for part in job["lora"].split(";"))
        job["lora"] = ";".join(parts)
    job["model"] = _public_name(job["model"])
    return job


def _public_name(model: str) -> str:
    """A hub id as it is, also that of a folder in the hub's cache; any other by its last name."""
    hub = PurePath(model).parent
    if hub.name == "snapshots" and hub.parent.name.startswith("models--"):
        return hub.parent.name.removeprefix("models--").replace("--", "/", 1)
    is_folder = model.startswith(("/", ".", "~")) or model.count("/") > 1
    return PurePath(model).name if is_folder else model
