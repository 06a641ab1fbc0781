"""Inputs of a command line: a manifest, or pictures and prompts instead of one."""

import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import combinations, takewhile
from pathlib import Path, PurePosixPath
from typing import Any

from hyimg_cli.cli import options as o
from hyimg_cli.cli import packaged, render
from hyimg_cli.cli.completion import MANIFESTS
from hyimg_cli.cli.one_file import OneFile
from hyimg_cli.errors import HyimgError, ManifestError, UsageError
from hyimg_cli.journal.bucket import run_folder
from hyimg_cli.journal.journal import OUTPUTS, RunFolder, outputs_of
from hyimg_cli.journal.past_run import readable_jobs
from hyimg_cli.manifest.edits import manifest_of_prompts, prompts_of
from hyimg_cli.manifest.manifest import Manifest
from hyimg_cli.manifest.mask_folder import with_regions
from hyimg_cli.manifest.sources import Sources, is_pattern, is_picture_name, is_raw_name, sources
from hyimg_cli.media.kinds import RAW_HINT
from hyimg_cli.settings.config import Setting
from hyimg_cli.settings.name_template import fault_of, fill_template, read_template
from hyimg_cli.settings.values import BadValue
from hyimg_cli.spec.job import BY_ID

_WITH_PROMPT = 'add a prompt: --prompt "make the background white"'


def manifest_of(
    given: Mapping[str, Any],
    words: Sequence[str],
    settings: Mapping[str, Setting],
    *,
    is_growing: bool = False,
) -> Manifest:
    """Return the manifest of a command line with these `words`, for a run with these settings.

    `is_growing`: a line of a file counts when its end is written. Raises UsageError if no manifest
    is given, or if the inputs are ambiguous.
    """
    if given["prompt"]:
        found, prompts = pictures_and_prompts(given, words, settings)

        def recorded_by(manifest_name: str) -> Mapping[str, str] | None:
            """Return names of the files in the run's folder; None if a template names them."""
            if settings["name"].origin != "default":
                return None
            if "output_dir" not in given:  # texts are written
                return {}
            file = OneFile.named(given)
            folder = file.folder if file else o.output_folder(settings, manifest_name)
            return recorded_names(run_folder(folder))

        return manifest_of_prompts(found, prompts, given.get("task"), recorded_by)
    if given.get("task"):
        what = "--task is for pictures with --prompt; manifest lines have their own task"
        raise UsageError(what, hint="remove --task", code="usage.task")
    names = given["inputs"] or []
    if not names:
        raise UsageError(
            "no manifest or pictures are given",
            hint="give a manifest, for example quickstart, or pictures with --prompt",
            code="usage.no-manifest",
        )
    _refuse_pictures(names)
    return packaged.read(names[0], is_growing=is_growing)


def recorded_names(run: RunFolder) -> dict[str, str]:
    """Return the name of each job's file in a run's folder, existing or planned, by custom_id."""
    names = {}
    for custom_id, entry in readable_jobs(run.place).items():
        with suppress(BadValue, KeyError):
            template = read_template(entry.get("name", BY_ID))
            names[custom_id] = fill_template(template, {"custom_id": custom_id})
    for custom_id, entry in run.results().items():
        for output in outputs_of(entry)[:1]:
            path = PurePosixPath(output["path"]).relative_to(OUTPUTS)
            names[custom_id] = str(path.with_suffix(""))
    return {custom_id: name for custom_id, name in names.items() if not fault_of(name)}


def pictures_and_prompts(
    given: Mapping[str, Any], words: Sequence[str], settings: Mapping[str, Setting]
) -> tuple[Sources | None, list[str]]:
    """Return the pictures, if any are named, and the prompts; skipped files are reported.

    `words`: the command line, which shows prompts without quotes. Raises ManifestError with every
    fault of both.
    """
    names, faults = given["inputs"] or [], list[HyimgError]()
    found, prompts = None, list[str]()
    try:
        prompts = prompts_of(given["prompt"])
    except UsageError as error:
        faults += getattr(error, "faults", [error])
    try:
        if names:
            _refuse_manifest(names)
            hints = _split(names) | _unquoted(words, names)
            found = sources(names, is_recursive=given["recursive"], if_missing=hints)
            found = with_regions(
                found,
                settings["region"].value,
                keeps_outside=settings["keep_outside"].value,
                may_lack=settings["skip_invalid"].value,
            )
    except UsageError as error:
        faults += getattr(error, "faults", [error])
    if faults:
        raise ManifestError(faults) if len(faults) > 1 else faults[0]
    for text in found.notes if found else ():
        render.note_unless(given["quiet"])(text)
    return found, prompts


def _unquoted(words: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Return a hint for each name that is a word of a prompt without quotes.

    `words`: the command line. Such words follow the first word of the prompt and are not files.
    """
    hints: dict[str, str] = {}
    for at, word in enumerate(words):
        if word == "--prompt" and at + 1 < len(words):
            first, after = words[at + 1], words[at + 2 :]
        elif word.startswith("--prompt="):
            first, after = word.partition("=")[2], words[at + 1 :]
        else:
            continue
        more = [*takewhile(lambda one: one in names and _is_a_word(one), after)]
        rest = [name for name in names if name not in more]
        if " " not in first:
            hint = _in_quotes(rest, (first, *more))
            hints |= dict.fromkeys(more, hint)
    return hints


def _split(names: Sequence[str]) -> dict[str, str]:
    """Return a hint for each name that is part of an existing one with spaces."""
    return {
        name: f'put the name in quotes: "{whole}"'
        for start, end in combinations(range(len(names) + 1), 2)
        if end - start > 1 and os.path.lexists(whole := " ".join(names[start:end]))
        for name in names[start:end]
        if not os.path.lexists(name)
    }


def _in_quotes(names: Sequence[str], words: Iterable[str]) -> str:
    """Return a hint to write words as one prompt."""
    text = " ".join(words).replace('"', "'")
    return f'put the prompt in quotes: {shlex.join([*names, "--prompt"])} "{text}"'


def _is_a_word(name: str) -> bool:
    """Return True for a word of a text, rather than a file that exists or could exist."""
    if os.path.lexists(name) or is_pattern(name) or is_picture_name(name) or is_raw_name(name):
        return False
    return name.isprintable() and not {"/", "\\"} & {*name} and Path(name).suffix not in MANIFESTS


def _refuse_pictures(names: Sequence[str]) -> None:
    """Raise UsageError for pictures without a prompt."""
    what, hint = "", _WITH_PROMPT
    if is_raw_name(names[0]) and not os.path.isdir(names[0]):
        what = "camera RAW files are not supported"
        hint = RAW_HINT.format(names[0], os.path.splitext(names[0])[0])
    elif len(names) > 1:
        what = f"{len(names)} names are given, but only one manifest can run, "
        what += "and pictures need a prompt"
        words = [name for name in names if _is_a_word(name)]
        hint = _in_quotes([name for name in names if name not in words], words) if words else hint
        if all(name.endswith(MANIFESTS) for name in names):
            hint = "run one after the other, or join files of one kind into one"
    elif is_pattern(names[0]):
        what = "this is a pattern for pictures, but no prompt is given"
    elif is_picture_name(names[0]) and not os.path.isdir(names[0]):
        what = "this is a picture, but no prompt is given"
    elif os.path.isdir(names[0]) and names[0] not in packaged.names():
        what = "this is a folder, but no prompt is given"
    if what:
        where = ", ".join(names[:3])
        raise UsageError(what, where=where, hint=hint, code="manifest.no-prompt")


def _refuse_manifest(names: Sequence[str]) -> None:
    """Raise UsageError for a manifest together with --prompt: its lines have their own prompts."""
    for name in names:
        if name == "-" or (Path(name).suffix in MANIFESTS and os.path.isfile(name)):
            what = "--prompt is for pictures; manifest lines have their own prompts"
            hint = "remove --prompt, or name pictures instead; --prompt prompts.txt reads prompts "
            hint += "from a file"
            raise UsageError(what, where=name, hint=hint, code="usage.prompt-and-manifest")
