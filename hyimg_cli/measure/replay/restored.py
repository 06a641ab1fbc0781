"""From what a file says about itself to a manifest of one job, and the settings it was made with.

The model and the source images must be the recorded ones: another digest is an error, unless the
user allows it.
"""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from hyimg_cli.errors import ManifestError, UsageError
from hyimg_cli.journal.keys import by_graphs, source_digest
from hyimg_cli.manifest.manifest import Manifest, manifest_of
from hyimg_cli.measure.replay.run_folder import images_there, model_there, title_of
from hyimg_cli.media.images import MAX_SOURCE_BYTES
from hyimg_cli.media.recorded import Described, Record
from hyimg_cli.models import registry
from hyimg_cli.settings.config import values_in_key
from hyimg_cli.settings.kinds import shown
from hyimg_cli.spec import digest
from hyimg_cli.spec.job import POSES_SUFFIX, VIDEO_TASKS, KeepOutside
from hyimg_cli.spec.run import ModelChoice

_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*", re.ASCII)
_ALLOW = "--allow-changed runs it all the same"


@dataclass(frozen=True)
class Wishes:
    """Options of a replay: the folder of its images and camera path, model with its components, and
    device, and whether other bytes than the recorded ones will do.
    """

    images_from: Path | None = None
    model: str | None = None
    revision: str | None = None
    components: str | None = None
    device: str = "auto"
    allow_changed: bool = False


@dataclass(frozen=True)
class Restored:
    """A manifest of one job, the settings that it was made with, by name, and what to tell."""

    manifest: Manifest
    custom_id: str
    settings: dict[str, Any]
    notes: tuple[str, ...]


def restored(described: Described, wishes: Wishes) -> Restored:
    """The job of a file, ready to be run again.

    Raises UsageError where the file holds no job of hyimg, where its model or a source image is not
    found or is not the recorded one; ManifestError where the job is none that this version runs.
    """
    record = described.record
    if record is None:
        raise _fault("foreign", "the picture is not hyimg's: it holds no job", described.path)
    title = title_of(described.path)
    # What stands in the record goes first: files are looked for under names that were checked.
    as_recorded = _manifest(record.job, title)
    custom_id = str(as_recorded.lines[0].fields["custom_id"])
    model, notes = _model(described.path, record, custom_id, wishes)
    job = record.job | {"custom_id": custom_id, "model": model}
    if "images" in job:
        images, more = _images(described.path, record, custom_id, wishes)
        job["images"], notes = images, [*notes, *more]
        if KeepOutside(region=str(job.get("region", ""))).mask:
            job["region"] = _beside(described.path, str(job["region"]), images, wishes)
        if str(job.get("camera", "")).endswith(POSES_SUFFIX):
            job["camera"] = _camera(described.path, record, images, wishes)
    settings = _settings(record, wishes.device)
    return Restored(_manifest(job, title), custom_id, settings, tuple(notes))


def _manifest(job: dict[str, Any], title: str) -> Manifest:
    manifest = manifest_of(json.dumps(job).encode(), title)
    if manifest.faults:
        raise ManifestError(manifest.faults, where=title)
    fields = manifest.lines[0].fields
    if len(manifest.lines) > 1 or "seeds" in fields or fields.get("n", 1) != 1:
        raise UsageError("the record asks for several", where=title, code="metadata.damaged")
    return manifest


def _model(path: Path, record: Record, custom_id: str, wishes: Wishes) -> tuple[str, list[str]]:
    """Which model runs, checked against the recorded digest."""
    recorded = str(record.job.get("model", ""))
    model = wishes.model or _located_model(path, recorded, custom_id, wishes.revision)
    found, expected = (
        registry.fingerprint(model, wishes.revision, wishes.components),
        record.provenance.model_fingerprint,
    )
    if found == expected:
        return model, []
    what = f"the model {PurePath(model).name} is not the one recorded"
    if not wishes.allow_changed:
        hint = (
            f"name the folder or --revision of {shown(recorded)} with {expected[:10]}…; or {_ALLOW}"
        )
        raise _fault("other-model", what, path, hint)
    return model, [what]


def _located_model(path: Path, recorded: str, custom_id: str, revision: str | None) -> str:
    """The recorded model: embedded, or a hub id as the cache has it. A file from elsewhere chooses
    no folder of this machine, nor does what lies beside it, and nothing is fetched for it.
    """
    if recorded in (registry.EMBEDDED, registry.EMBEDDED_VIDEO):
        return recorded
    if _HUB_ID.fullmatch(recorded):
        if (cached := registry.in_cache(recorded, revision)) is not None:
            return str(cached)
        name = shown(recorded).strip('"')
        what = f"the model {name} is not on this machine, and no file has one fetched"
        raise _fault("model", what, path, f"--model {name} fetches it")
    what = f"only the name of the model's folder is recorded: {shown(PurePath(recorded).name)}"
    there = model_there(path, custom_id)
    hint = "give the folder with --model"
    raise _fault("model", what, path, hint if there is None else f"{hint}; its run had {there}")


def _images(
    path: Path, record: Record, custom_id: str, wishes: Wishes
) -> tuple[list[str], list[str]]:
    """Path of each source image, checked against its recorded digest, and notes."""
    images = record.job["images"]
    names = [str(name) for name in (images if isinstance(images, list) else [images])]
    digests: Sequence[str] = record.source_sha256
    if digests and len(digests) != len(names):
        raise _fault("damaged", "the record names other images than digests", path)
    notes = [] if digests else ["digests of source images are not recorded: not checked"]
    # Without a digest to know it by, no file is taken from where a folder of others leads.
    there = images_there(path, custom_id) if digests else []
    found = []
    for number, name in enumerate(names):
        if PurePath(name).name != name or name in ("", ".", ".."):
            raise _fault("damaged", f"{shown(name)} is no name of an image", path)
        # Where it may be, in the order of looking.
        beside = [path.parent / name, *there[number : number + 1]]
        places = [wishes.images_from / name] if wishes.images_from else beside
        present = [place for place in places if os.path.isfile(place)]
        if not present:
            folders = " nor in ".join(dict.fromkeys(str(place.parent) for place in places))
            what = f"the source image {shown(name)} is not in {folders}"
            raise _fault("missing-image", what, path, "give its folder with --images-from")
        image = next((p for p in present if not digests or _digest(p) == digests[number]), None)
        if image is None:
            image = present[0]
            what = f"{image.name} is not the recorded image: its bytes are others"
            if not wishes.allow_changed:
                hint = f"--images-from names the folder of the original; or {_ALLOW}"
                raise _fault("changed-image", what, path, hint)
            notes.append(what)
        found.append(str(image.absolute()))
    return found, notes


def _camera(path: Path, record: Record, images: Sequence[str], wishes: Wishes) -> str:
    """The file of a camera path, its intrinsics beside it, checked against the recorded digests."""
    name = str(record.job["camera"])
    camera = _beside(path, name, images, wishes)
    files = (camera, str(Path(camera).with_name(f"intrinsics{POSES_SUFFIX}")))
    is_other = ",".join(map(source_digest, files)) != record.provenance.settings.get("camera")
    if is_other and not wishes.allow_changed:
        what, hint = f"{name} is not the recorded camera path", "give its folder with --images-from"
        raise _fault("changed-camera", what, path, f"{hint}; or {_ALLOW}")
    return camera


def _beside(path: Path, name: str, images: Sequence[str], wishes: Wishes) -> str:
    """A file that the job reads beside its images, looked for by its name where they are."""
    beside = [path.parent, *(Path(image).parent for image in images)]
    places = [wishes.images_from] if wishes.images_from else beside
    found = next((place / name for place in places if (place / name).is_file()), None)
    if found is None or PurePath(name).name != name:
        what = f"{name}, which the job reads beside its images, is not there"
        raise _fault("missing-image", what, path, "give its folder with --images-from")
    return str(found.absolute())


def _digest(path: Path) -> str:
    try:
        return digest.of_file(path, MAX_SOURCE_BYTES)
    except OSError as error:
        what = f"it cannot be read: {error.strerror}"
        raise _fault("unreadable-image", what, path) from None


def _settings(record: Record, device: str) -> dict[str, Any]:
    """The recorded settings that shape pixels, as flags; what is not recorded stays unset.

    A CPU's picture is made on the CPU again; which GPU, and whether there is one, is the machine's.
    """
    recorded = record.provenance.settings
    if not recorded:
        return {}
    is_video = record.job.get("task") in VIDEO_TASKS
    found = values_in_key(recorded, "videos" if is_video else "pictures")
    if found["dtype"] == "auto":  # none is recorded
        found["dtype"] = None
    if found["vae_use_tiling"] is None:  # as either kind does by itself
        found["vae_use_tiling"] = is_video
    if recorded.get("device") == "cpu" and device == "auto":
        found["device"] = device = "cpu"
    if is_video:
        return found
    if {"cot_text", "cot_token_ids"} & record.job.keys():
        found["bot_task"] = record.bot_task or None
    # Where there can be no graphs the file is made without, and the verdict tells.
    can_be = by_graphs(ModelChoice(device=device), found["tensor_parallel_size"])
    return found | {"decode_graphs": "on" if found["decode_graphs"] == "on" and can_be else "off"}


def _fault(slug: str, what: str, path: Path, hint: str = "") -> UsageError:
    code = f"metadata.{slug}" if slug == "damaged" else f"replay.{slug}"
    return UsageError(what, where=path, hint=hint, code=code)
