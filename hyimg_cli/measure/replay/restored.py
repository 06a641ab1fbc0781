"""Turn the record in a file into a manifest of one job and the settings it was made with.

The model and the source images must have the recorded digests, unless the user allows others.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path, PurePath
from typing import Any

from hyimg_cli.errors import ManifestError, UsageError
from hyimg_cli.journal.keys import by_graphs, file_digest
from hyimg_cli.loading import hub
from hyimg_cli.manifest.fields import PATH_FIELDS
from hyimg_cli.manifest.manifest import Manifest, manifest_of
from hyimg_cli.measure.replay.run_folder import TITLE, read_resolved, run_of
from hyimg_cli.media.recorded import Described, Record
from hyimg_cli.models import lora_files, registry
from hyimg_cli.settings.config import read_key
from hyimg_cli.settings.paths import is_hub_file
from hyimg_cli.settings.run import ModelChoice
from hyimg_cli.settings.values import BadValue, shown
from hyimg_cli.spec.job import INTRINSICS, VIDEO_TASKS
from hyimg_cli.spec.model_name import names_file, parts_of, with_components

_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*", re.ASCII)
_ALLOW = "add --allow-changed to run it anyway"
# Names of a field's files in messages.
_NOUNS = {"images": "source image", "region": "mask", "camera": "camera path", "lora": "LoRA"}


@dataclass(frozen=True)
class Wishes:
    """Options of a replay.

    The folder of its job's input files, the model with its components, the device, and whether the
    model and the input files may have changed.
    """

    images_from: Path | None = None
    model: str | None = None
    revision: str | None = None
    components: str | None = None
    device: str = "auto"
    allow_changed: bool = False


@dataclass(frozen=True)
class Restored:
    """A manifest of one job, the settings it was made with, by name, and notes for the user."""

    manifest: Manifest
    custom_id: str
    settings: dict[str, Any]
    notes: tuple[str, ...]


def restore_job(described: Described, wishes: Wishes) -> Restored:
    """Return the job of a file, ready to run again.

    Raises UsageError if the file has no job of hyimg, or its model or a source image is missing or
    not the recorded one; ManifestError if this version cannot run the job.
    """
    record = described.record
    if record is None:
        what = "not made by hyimg: the file has no job"
        raise UsageError(what, where=described.path, code="replay.foreign")
    title = f"{TITLE}{described.path.name}"
    # The record is checked first: files are then searched by names that are safe.
    as_recorded = _manifest(record.job, title)
    custom_id = str(as_recorded.lines[0].fields["custom_id"])
    resolved = read_resolved(described.path, custom_id)
    search = _Search(described.path, record, resolved, wishes)
    job = record.job | {"custom_id": custom_id, "model": search.find_model()}
    for name in PATH_FIELDS:
        if name != "model" and name in job:
            job[name] = search.find_files(name)
    settings, removed = _settings(record, wishes.device)
    search.notes.extend(f"made with {name}, which this version does not have" for name in removed)
    return Restored(_manifest(job, title), custom_id, settings, tuple(search.notes))


def _manifest(job: dict[str, Any], title: str) -> Manifest:
    manifest = manifest_of(json.dumps(job).encode(), title)
    if manifest.faults:
        raise ManifestError(manifest.faults, where=title)
    fields = manifest.lines[0].fields
    if len(manifest.lines) > 1 or "seeds" in fields or fields.get("n", 1) != 1:
        raise UsageError("the record has several jobs", where=title, code="metadata.damaged")
    return manifest


@dataclass(frozen=True)
class _Search:
    """Find the model and files that a record names: files by name, then by digest."""

    path: Path
    record: Record
    # The job's line in its run's resolved manifest.
    resolved: Mapping[str, Any]
    wishes: Wishes
    # Folders in which files of earlier fields were found.
    folders: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def find_model(self) -> str:
        """Return the model to run, checked against the recorded digest. Raises UsageError."""
        wishes, expected = self.wishes, self.record.model_fingerprint
        recorded = str(self.record.job.get("model", ""))
        model = self._with_parts(wishes.model, parts_of(recorded)[1]) if wishes.model else ""
        model = model or self._located_model(recorded)
        if registry.fingerprint(model, wishes.revision, wishes.components) != expected:
            what = f"the model {PurePath(model).name} is not the one recorded"
            if not wishes.allow_changed:
                hint = f"name the folder or --revision of {shown(recorded)} with {expected[:10]}…"
                raise self._fault("replay.other-model", what, f"{hint}; or {_ALLOW}")
            self.notes.append(what)
        return model

    def _with_parts(self, given: str, recorded: str) -> str:
        """Return the model that the user gives; a file alone gets the recorded components.

        Only from the hub's cache, by their id: see `_located_model`.
        """
        is_id = _HUB_ID.fullmatch(recorded) is not None
        here = hub.cached(recorded, self.wishes.revision) if is_id else None
        return with_components(given, str(here) if here else None)

    def _located_model(self, recorded: str) -> str:
        """Return the recorded model: an embedded one, or a hub id that is in the cache.

        A file cannot choose a folder of this machine, nor can the files next to it, and nothing is
        downloaded for it.
        """
        if recorded in (registry.EMBEDDED, registry.EMBEDDED_VIDEO):
            return recorded
        weights, parts = parts_of(recorded)
        if names_file(weights) and is_hub_file(weights) and (file := hub.cached_file(weights)):
            found = self._with_parts(str(file), parts)
            if found != str(file):
                return found
        if _HUB_ID.fullmatch(recorded):
            if (cached := hub.cached(recorded, self.wishes.revision)) is not None:
                return str(cached)
            name = shown(recorded).strip('"')
            if os.path.isdir(recorded):
                what = f"{name} is a folder here; a picture's record cannot choose a folder"
                raise self._fault("replay.model", what, f"to use the folder, add --model {name}")
            what = f"the model {name} is not on this machine, and replay downloads none for a file"
            raise self._fault("replay.model", what, f"to download it, add --model {name}")
        hint = "give the folder with --model"
        what = f"only the name of the model's folder is recorded: {shown(PurePath(recorded).name)}"
        if parts:
            own, others = (shown(PurePath(one).name) for one in (weights, parts))
            what = f"only names are recorded of the model {own} and its components {others}"
            hint = "give them with --model FILE --components FOLDER_OR_ID"
        used = [*filter(None, parts_of(str(self.resolved.get("model", ""))))]
        run = run_of(self.path).resolve()
        there = [os.path.normpath(run / one) if os.sep in one else one for one in used]
        if there and all(map(os.path.exists, there)):
            hint += f"; its run used {' and '.join(there)}"
        raise self._fault("replay.model", what, hint)

    def find_files(self, name: str) -> Any:
        """Return a field of the job with file paths in place of names. Raises UsageError."""
        kind, noun, digests = PATH_FIELDS[name], _NOUNS.get(name, name), _digests(self.record, name)
        value = kind.read(self.record.job[name])
        names = kind.names(value)
        if digests and len(digests) != len(names):
            what = f"the numbers of {noun}s and of their digests differ"
            raise self._fault("metadata.damaged", what)
        if not digests and any(map(kind.is_path, names)):
            self.notes.append(f"{noun}s were not checked: their digests are not recorded")
        there: list[Path] = []
        # Without a digest to check, no file is taken from a place that an untrusted folder names.
        if digests:
            with suppress(BadValue):
                in_run = kind.names(kind.read(self.resolved.get(name)))
                there = [run_of(self.path) / one for one in in_run][: len(names)]
        found = [self._find_file(name, *one) for one in zip_longest(names, digests, there)]
        self.folders.extend(Path(file).parent for file in found if os.path.isabs(file))
        return kind.to_json(kind.with_names(value, found))

    def _find_file(self, field: str, name: str, sha256: str | None, there: Path | None) -> str:
        is_path, noun = PATH_FIELDS[field].is_path(name), _NOUNS.get(field, field)
        if not is_path and field != "lora":
            return name
        base, is_image = PurePath(name).name, field == "images"
        if (is_path and base != name) or base in ("", ".", ".."):
            raise self._fault("metadata.damaged", f"{shown(name)} does not name a {noun}")
        folders = [*filter(None, [self.wishes.images_from]), self.path.parent, *self.folders]
        fetched = None if is_path else hub.cached_file(name)
        places = [*(folder / base for folder in folders), *filter(None, (there, fetched))]
        present = [place for place in places if os.path.isfile(place)]
        if not present:
            missed = " nor in ".join(dict.fromkeys(str(place.parent) for place in places))
            what = f"{noun} {shown(name)} not found in {missed}"
            code = "replay.missing-image" if is_image else "replay.missing-file"
            raise self._fault(code, what, "give its folder with --images-from")
        file = next((one for one in present if sha256 in (None, _digest(field, one))), None)
        if file is None:
            what = f"{present[0].name} is not the recorded {noun}"
            if not self.wishes.allow_changed:
                hint = f"give the folder of the original with --images-from; or {_ALLOW}"
                code = "replay.changed-image" if is_image else "replay.changed-file"
                raise self._fault(code, what, hint)
            self.notes.append(what)
        return str((file or present[0]).absolute())

    def _fault(self, code: str, what: str, hint: str = "") -> UsageError:
        return UsageError(what, where=self.path, hint=hint, code=code)


def _digests(record: Record, field: str) -> Sequence[str]:
    """Return the recorded digests of a field's files, in order."""
    recorded = record.settings.get(field)
    if field == "images":
        return record.source_sha256
    if field == "lora":
        return re.findall("=([0-9a-f]{64})@", recorded or "")
    return [recorded] if recorded else []


def _digest(field: str, path: Path) -> str:
    """Return the digest of a file; for a camera path also that of its intrinsics file."""
    if field == "lora":
        return lora_files.file_digest(str(path))
    files = [path, path.with_name(INTRINSICS)] if field == "camera" else [path]
    return ",".join(file_digest(str(file)) for file in files)


def _settings(record: Record, device: str) -> tuple[dict[str, Any], list[str]]:
    """Return the recorded settings that shape pixels, as flags, and the unknown ones' names.

    Unknown settings no longer exist; settings that are not recorded stay unset. A picture made on a
    CPU is made on the CPU again; the machine decides about GPUs.
    """
    recorded = record.settings
    if not recorded:
        return {}, []
    is_video = record.job.get("task") in VIDEO_TASKS
    found, removed = read_key(recorded, "videos" if is_video else "pictures")
    if found["dtype"] == "auto":  # none is recorded
        found["dtype"] = None
    if found["vae_use_tiling"] is None:  # the default of either kind
        found["vae_use_tiling"] = is_video
    if recorded.get("device") == "cpu" and device == "auto":
        found["device"] = device = "cpu"
    if is_video:
        return found, removed
    if {"cot_text", "cot_token_ids"} & record.job.keys():
        found["bot_task"] = record.bot_task or None
    # If graphs are not possible, the file is made without them, and the verdict says so.
    can_be = by_graphs(ModelChoice(device=device), found["tensor_parallel_size"])
    found["decode_graphs"] = "on" if found["decode_graphs"] == "on" and can_be else "off"
    return found, removed
