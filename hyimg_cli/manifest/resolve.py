"""Turn a manifest's lines and the settings into jobs, with `n` and `seeds` expanded."""

import os
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from hyimg_cli.errors import HyimgError, SourceImageError
from hyimg_cli.manifest.chains import in_order, names_in
from hyimg_cli.manifest.fields import PATH_FIELDS
from hyimg_cli.manifest.ids import IdClaims, child_ids
from hyimg_cli.manifest.line import fault
from hyimg_cli.manifest.manifest import Manifest
from hyimg_cli.manifest.mask_folder import MaskFolder, folder_in, with_mask
from hyimg_cli.manifest.pictures import PictureLine, sampling_defaults
from hyimg_cli.manifest.resolved_line import unfollowed
from hyimg_cli.manifest.texts import TextLine
from hyimg_cli.manifest.videos import VideoLine
from hyimg_cli.settings.config import Setting, as_given
from hyimg_cli.settings.paths import MODEL_NAME, linked
from hyimg_cli.settings.values import shown
from hyimg_cli.spec.card import ModelCard, VideoCard
from hyimg_cli.spec.job import TEXT_TASKS, VIDEO_TASKS, ImageJob, Job, Size
from hyimg_cli.spec.model_name import parts_of, with_components

# Number of values with paths that are cached.
_PATHS_NEAR = 1024


def resolve_jobs(
    manifest: Manifest,
    settings: Mapping[str, Setting],
    card_of: Callable[[str], ModelCard],
    video_card_of: Callable[[str], VideoCard] | None = None,
) -> tuple[list[Job], list[HyimgError]]:
    """Return the valid lines' jobs in manifest order, and faults that can only be found now.

    `card_of` is called once per model; without `video_card_of`, no line may ask for a video. Raises
    what they raise for the models of the settings; for a model that a line names, that becomes a
    fault of the line.
    """
    listed = settings["allow_model"]
    own = [settings[name].value for name in ("model", "video_model", "components")]
    own += (one.file for one in settings["lora"].value or ())

    @cache
    def place_of(name: str) -> str:
        """Return a model's resolved folder, or its name if it is not a folder."""
        path = os.path.expanduser(name)
        return os.path.realpath(path) if os.path.exists(path) else name

    named = (name for name in (*(listed.value or ()), *own) if name)
    allowed = {place_of(part) for name in named for part in MODEL_NAME.names(name)}
    jobs: list[Job] = []
    faults: list[HyimgError] = []

    @lru_cache(_PATHS_NEAR)
    def resolved_paths(name: str, value: Hashable) -> Any:
        return PATH_FIELDS[name].resolve_paths(value, manifest.folder)

    @cache
    def find_card(model: str, is_video: bool) -> Any:
        """Return a model's card, or the error if it has none."""
        try:
            return video_card_of(model) if video_card_of and is_video else card_of(model)
        except HyimgError as error:
            return error

    @cache
    def without_line(model: str, is_video: bool, is_edit: bool) -> dict[str, Any]:
        own = defaults_of(model, is_video, is_edit)
        follows = find_card(model, is_video).follows
        # A setting for some kinds of models may be meant for other lines.
        foreign = {
            field.name
            for field in unfollowed(follows, "videos" if is_video else "pictures")
            if field.only not in (None, "pictures", "videos")
        }
        return {
            name: getattr(own, name, None)
            if one.origin == "model" or name in foreign
            else one.value
            for name, one in settings.items()
        }

    def defaults_of(model: str, is_video: bool, is_edit: bool) -> Any:
        card = find_card(model, is_video)
        return card.defaults if is_video else sampling_defaults(card, is_edit=is_edit)

    # Paths in settings are relative to the working folder.
    settings = dict(settings) | {
        name: replace(one, value=kind.resolve_paths(one.value, Path()))
        for name, kind in PATH_FIELDS.items()
        if (one := settings.get(name)) and one.value
    }

    # The picture at the start of the chain that made a result, by the result's id.
    edited_in: dict[str, str] = {}

    @cache
    def masks_in(folder: str) -> MaskFolder:
        return MaskFolder(folder)

    def mask_from_folder(values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the region of an edit whose region is a folder: its source's mask there.

        The mask of a result is that of the picture which its line, or the first of a chain, edits.
        Raises SourceImageError.
        """
        images, number = values.get("images", ()), values["kept_source"]
        if not values["keep_outside"] or number > len(images):
            return {}
        if not (folder := folder_in(values["region"])):
            return {}
        picture = images[number - 1]
        mask = masks_in(folder).needed_for(edited_in.get(linked(picture), picture))
        return {"region": with_mask(values["region"], mask)}

    claims = IdClaims()
    # Without numbers from the caller, each line has the ids with which it was read.
    count = settings["n"].value
    makes_ids = count > 1
    lines, broken = in_order(
        manifest.lines,
        lambda line: child_ids({"n": count} | line.fields),
        {*manifest.bad_ids.values()},
    )
    faults += broken
    edited, made = {name for line in lines for name in names_in(line)}, dict[str, Size | None]()
    for line in lines:
        written = line.fields
        paths = PATH_FIELDS.keys() & written.keys()
        fields = written | {name: resolved_paths(name, written[name]) for name in paths}
        is_video = fields["task"] in VIDEO_TASKS
        model = fields.get("model") or settings["video_model" if is_video else "model"].value
        if not is_video:
            parts = fields.get("components") or settings["components"].value
            model = with_components(parts_of(model)[0] if "components" in fields else model, parts)
        # Field, name and place of the model, its parts and the LoRAs that the line names.
        own_fields = [name for name in ("model", "components") if name in fields]
        own_names = [*filter(None, parts_of(model))] if own_fields else []
        weights: list[tuple[str, Any, str]] = [
            (field, written[field], name)
            for name, field in zip(own_names, (*own_fields[:1], *own_fields[-1:]), strict=False)
        ]
        loras = zip(written.get("lora", ()), fields.get("lora", ()), strict=True)
        weights += [("lora", one.file, there.file) for one, there in loras if one.file]
        refused = [one for one in weights if place_of(one[2]) not in allowed]
        if refused and listed.value is not None:
            field, name, _ = refused[0]
            what = f"lines may not use the model {shown(name)}"
            hint = f"{as_given(listed)} allows: {', '.join(listed.value) or 'none'}"
            faults.append(fault("model-not-allowed", what, f"{line.where}: {field}", hint))
            continue
        card = find_card(model, is_video)
        if isinstance(card, HyimgError):
            if not own_fields:
                raise card
            where = f"{line.where}: {own_fields[0]}"
            faults.append(fault("model", card.what, where, card.hint))
            continue
        case = model, is_video, bool(fields.get("images"))
        values = without_line(*case) | fields
        try:
            values |= {} if is_video else mask_from_folder(values)
        except SourceImageError as error:
            faults.append(fault("region", error.what, f"{line.where}: region", error.hint))
            continue
        kind: type[VideoLine | PictureLine | TextLine] = VideoLine if is_video else PictureLine
        kind = TextLine if fields["task"] in TEXT_TASKS else kind
        resolved = kind(
            line=line,
            fields=fields,
            values=values,
            settings=settings,
            model=model,
            child_ids=child_ids(values),
            card=card,
            defaults=defaults_of(*case),
            made=made,
        )
        found = list(resolved.faults())
        if makes_ids:
            found += claims.claim(resolved.child_ids, line.line_number, line.where)
        faults += found
        if not found:
            for index in range(len(resolved.child_ids)):
                job: Job = resolved.job(index)
                jobs.append(job)
                if job.custom_id in edited:
                    if isinstance(job, ImageJob) and job.outside is not None:
                        picture = job.kept_image
                        edited_in[job.custom_id] = edited_in.get(linked(picture), picture)
                    size = resolved.size_of(job)
                    # The edit of a source that cannot be read will fail, and those after it.
                    if size is not None or getattr(job, "outside", None) is None:
                        made[job.custom_id] = size
    if edited:
        places = {line.where: number for number, line in enumerate(manifest.lines)}
        jobs.sort(key=lambda job: places[job.source_line])
    # A fault that a setting causes is the same in every line, so it is reported once.
    return jobs, list({(one.where, one.what): one for one in faults}.values())
