"""From what a file says about itself to a manifest of one job, and the settings it was made with.

The model and the source images must be the recorded ones: another digest is an error, unless the
user allows it.
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
from hyimg_cli.journal.keys import by_graphs, source_digest
from hyimg_cli.manifest.fields import PATH_FIELDS
from hyimg_cli.manifest.manifest import Manifest, manifest_of
from hyimg_cli.measure.replay.run_folder import TITLE, read_resolved, run_of
from hyimg_cli.media.recorded import Described, Record
from hyimg_cli.models import lora_files, registry
from hyimg_cli.settings.config import read_key
from hyimg_cli.settings.run import ModelChoice
from hyimg_cli.settings.values import BadValue, shown
from hyimg_cli.spec.job import INTRINSICS, VIDEO_TASKS

_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*", re.ASCII)
_ALLOW = "--allow-changed runs it all the same"
# What the files of a field are, in messages.
_NOUNS = {"images": "source image", "region": "mask", "camera": "camera path", "lora": "LoRA"}


@dataclass(frozen=True)
class Wishes:
    """Options of a replay: the folder of the files that its job reads, model with its components,
    and device, and whether other bytes than the recorded ones will do.
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


def restore_job(described: Described, wishes: Wishes) -> Restored:
    """The job of a file, ready to be run again.

    Raises UsageError where the file holds no job of hyimg, where its model or a source image is not
    found or is not the recorded one; ManifestError where the job is none that this version runs.
    """
    record = described.record
    if record is None:
        raise _fault(
            "replay.foreign", "the picture is not hyimg's: it holds no job", described.path
        )
    title = f"{TITLE}{described.path.name}"
    # What stands in the record goes first: files are looked for under names that were checked.
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
        raise UsageError("the record asks for several", where=title, code="metadata.damaged")
    return manifest


@dataclass(frozen=True)
class _Search:
    """Looks for what a record names: its model, and its files by name and then by digest."""

    path: Path
    record: Record
    # The job's line in the manifest of its run.
    resolved: Mapping[str, Any]
    wishes: Wishes
    # Folders in which files of earlier fields were found.
    folders: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def find_model(self) -> str:
        """The model that runs, checked against the recorded digest. Raises UsageError."""
        wishes, expected = self.wishes, self.record.model_fingerprint
        recorded = str(self.record.job.get("model", ""))
        model = wishes.model or self._located_model(recorded)
        if registry.fingerprint(model, wishes.revision, wishes.components) != expected:
            what = f"the model {PurePath(model).name} is not the one recorded"
            if not wishes.allow_changed:
                hint = f"name the folder or --revision of {shown(recorded)} with {expected[:10]}…"
                raise _fault("replay.other-model", what, self.path, f"{hint}; or {_ALLOW}")
            self.notes.append(what)
        return model

    def _located_model(self, recorded: str) -> str:
        """The recorded model: embedded, or a hub id as the cache has it. A file from elsewhere
        chooses no folder of this machine, nor does what lies beside it, and nothing is fetched for
        it.
        """
        if recorded in (registry.EMBEDDED, registry.EMBEDDED_VIDEO):
            return recorded
        if _HUB_ID.fullmatch(recorded):
            if (cached := registry.in_cache(recorded, self.wishes.revision)) is not None:
                return str(cached)
            name = shown(recorded).strip('"')
            if os.path.isdir(recorded):
                what = f"{name} is a folder here; a picture's record cannot choose a folder"
                raise _fault("model", what, self.path, f"to use the folder, add --model {name}")
            what = f"the model {name} is not on this machine, and no file has one fetched"
            raise _fault("replay.model", what, self.path, f"--model {name} fetches it")
        what = f"only the name of the model's folder is recorded: {shown(PurePath(recorded).name)}"
        name, hint = str(self.resolved.get("model", "")), "give the folder with --model"
        if os.sep in name and os.path.isdir(there := run_of(self.path) / name):
            hint += f"; its run had {there}"
        raise _fault("replay.model", what, self.path, hint)

    def find_files(self, name: str) -> Any:
        """A field of the job with the recorded files in place of their names. Raises UsageError."""
        kind, noun, digests = PATH_FIELDS[name], _NOUNS.get(name, name), _digests(self.record, name)
        value = kind.read(self.record.job[name])
        names = kind.names(value)
        if digests and len(digests) != len(names):
            raise _fault(
                "metadata.damaged", f"the record names other {noun}s than digests", self.path
            )
        if not digests and any(map(kind.is_path, names)):
            self.notes.append(f"digests of {noun}s are not recorded: not checked")
        there: list[Path] = []
        # Without a digest to know it by, no file is taken from where a folder of others leads.
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
            raise _fault("metadata.damaged", f"{shown(name)} is no name of a {noun}", self.path)
        folders = [self.path.parent, *self.folders]
        if self.wishes.images_from:
            folders.insert(0, self.wishes.images_from)
        fetched = None if is_path else lora_files.in_cache(name)
        places = [*(folder / base for folder in folders), *filter(None, (there, fetched))]
        present = [place for place in places if os.path.isfile(place)]
        if not present:
            missed = " nor in ".join(dict.fromkeys(str(place.parent) for place in places))
            what = f"the {noun} {shown(name)} is not in {missed}"
            code = "replay.missing-image" if is_image else "replay.missing-file"
            raise _fault(code, what, self.path, "give its folder with --images-from")
        same = (place for place in present if sha256 in (None, _digest(field, place)))
        file = next(same, present[0])
        if sha256 not in (None, _digest(field, file)):
            what = f"{file.name} is not the recorded {noun}"
            if not self.wishes.allow_changed:
                hint = f"--images-from names the folder of the original; or {_ALLOW}"
                code = "replay.changed-image" if is_image else "replay.changed-file"
                raise _fault(code, what, self.path, hint)
            self.notes.append(what)
        return str(file.absolute())


def _digests(record: Record, field: str) -> Sequence[str]:
    """Recorded digests of a field's files, in order; none where there are none."""
    recorded = record.settings.get(field)
    if field == "images":
        return record.source_sha256
    if field == "lora":
        return re.findall("=([0-9a-f]{64})@", recorded or "")
    return [recorded] if recorded else []


def _digest(field: str, path: Path) -> str:
    """Digest of a file, of a camera's path also of what is beside it."""
    if field == "lora":
        return lora_files.file_digest(str(path))
    files = [path, path.with_name(INTRINSICS)] if field == "camera" else [path]
    return ",".join(source_digest(str(file)) for file in files)


def _settings(record: Record, device: str) -> tuple[dict[str, Any], list[str]]:
    """The recorded settings that shape pixels, as flags, and what of them is no longer there; what
    is not recorded stays unset.

    A CPU's picture is made on the CPU again; which GPU, and whether there is one, is the machine's.
    """
    recorded = record.settings
    if not recorded:
        return {}, []
    is_video = record.job.get("task") in VIDEO_TASKS
    found, removed = read_key(recorded, "videos" if is_video else "pictures")
    if found["dtype"] == "auto":  # none is recorded
        found["dtype"] = None
    if found["vae_use_tiling"] is None:  # as either kind does by itself
        found["vae_use_tiling"] = is_video
    if recorded.get("device") == "cpu" and device == "auto":
        found["device"] = device = "cpu"
    if is_video:
        return found, removed
    if {"cot_text", "cot_token_ids"} & record.job.keys():
        found["bot_task"] = record.bot_task or None
    # Where there can be no graphs the file is made without, and the verdict tells.
    can_be = by_graphs(ModelChoice(device=device), found["tensor_parallel_size"])
    found["decode_graphs"] = "on" if found["decode_graphs"] == "on" and can_be else "off"
    return found, removed


def _fault(code: str, what: str, path: Path, hint: str = "") -> UsageError:
    return UsageError(what, where=path, hint=hint, code=code)
