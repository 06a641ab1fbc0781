"""Metadata of a file: A1111 `parameters`, the job as JSON (the record), the source type.

`formats` knows where each kind of picture keeps them; an MP4 has the record as its comment, and
an answer in its result line.
`recorded` reads them back. Only base names: a shared picture names no folder, user or host. Format
2 added how the file was made, and digests of source images.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import PurePath
from typing import Any

from hyimg_cli.media import xmp
from hyimg_cli.spec.job import ImageJob, Size

FORMAT = 2
# The PNG text chunks that hold the parameters and the record.
PARAMETERS, KEYWORD = "parameters", "hyimg"
# In the record of an edit that keeps its source: its history; see `media.history`.
CHAIN = "chain"
# Characters that XML cannot hold, and half surrogate pairs, which no file can hold.
_ESCAPED = re.compile("[\ud800-\udfff\ufffe\uffff]")


@dataclass(frozen=True)
class Provenance:
    """A file's origin: hyimg's version, the checkpoint, and all else that decides its bits.

    `settings`: of the run (device, dtype, KV reuse, ...). `packages`: versions.
    """

    version: str
    model_fingerprint: str
    settings: Mapping[str, str] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PictureText:
    """Texts of a picture's metadata. `source_type`: IPTC's term for its origin."""

    parameters: str = ""
    record: str = ""
    source_type: str = ""


@dataclass(frozen=True)
class PictureFacts:
    """Facts of a finished job beyond its settings: enough to make the same pixels again.

    `source_sha256`: of the bytes of each source image, in order. `layer`: its number from 1, if the
    file is one of a picture's layers.
    """

    model_name: str
    provenance: Provenance
    source_sha256: tuple[str, ...] = ()
    cot_text: str | None = None
    cot_token_ids: tuple[int, ...] | None = None
    ratio_index: int | None = None
    layer: int | None = None


def picture_text(
    job: ImageJob, line: Mapping[str, Any], facts: PictureFacts, size: Size, pixel_sha256: str
) -> PictureText:
    """Return the metadata of a job's picture. `line`: the job's public line."""
    record = {
        "format": FORMAT,
        "job": line,
        **asdict(facts.provenance),
        # A job with a given text has no bot_task, except if a dynamic system prompt depends on it.
        "bot_task": job.bot_task,
        "source_sha256": facts.source_sha256,
        "ratio_index": facts.ratio_index,
        "cot_text": facts.cot_text,
        "cot_token_ids": facts.cot_token_ids,
        "size": str(size),
        "pixel_sha256": pixel_sha256,
        **({"layer": facts.layer} if facts.layer else {}),
    }
    # The prompt, then one line of settings. Source: the layout of AUTOMATIC1111's infotext, in
    # which a name with commas or colons is quoted.
    name = PurePath(facts.model_name).name
    settings = {
        "Steps": job.num_inference_steps,
        "Sampler": "Flow-match Euler",
        "CFG scale": f"{job.guidance_scale:g}",
        "Seed": job.seed,
        "Size": size,
        "Model hash": facts.provenance.model_fingerprint[:10],
        "Model": json.dumps(name, ensure_ascii=False) if set(name) & set(',:\n"') else name,
        "Version": f"hyimg {facts.provenance.version}",
    }
    said = ", ".join(f"{name}: {value}" for name, value in settings.items())
    source_type = xmp.EDITED if job.task == "it2i" else xmp.MADE
    return PictureText(f"{job.prompt}\n{said}", _json(record), source_type)


def rewrite_metadata(
    text: PictureText,
    line: Mapping[str, Any],
    region: dict[str, str],
    size: Size,
    pixel_sha256: str,
    chain: Mapping[str, Any],
) -> PictureText:
    """Return the metadata of another picture made from this one, by a job that draws the same.

    `region`: the region in its settings. `chain`: the edits since its first source.
    """
    record = json.loads(text.record) | {"job": line}
    settings = {name: word for name, word in record["settings"].items() if name != "region"}
    record |= {"settings": settings | region, "size": str(size), "pixel_sha256": pixel_sha256}
    record[CHAIN] = chain
    parameters = re.sub(r"(?<=, Size: )[0-9]+x[0-9]+(?=, )", str(size), text.parameters)
    return PictureText(parameters, _json(record), text.source_type)


def video_text(
    line: Mapping[str, Any], provenance: Provenance, source_sha256: Sequence[str] = ()
) -> str:
    """Return the text for an MP4's comment and its sidecar: job and provenance as JSON."""
    return _json(job_record(line, provenance, source_sha256))


def job_record(
    line: Mapping[str, Any], provenance: Provenance, source_sha256: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the record of a job without pictures of its own: a video's, or an answer's."""
    sources = {"source_sha256": source_sha256} if source_sha256 else {}
    return {"format": FORMAT, "job": line, **asdict(provenance), **sources}


def _json(record: Mapping[str, Any]) -> str:
    text = json.dumps(record, ensure_ascii=False, sort_keys=True)
    return _ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
