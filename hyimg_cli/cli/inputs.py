"""Inputs of a command line: a manifest, or pictures and prompts that stand for one."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hyimg_cli.cli import packaged, render
from hyimg_cli.errors import HyimgError, ManifestError, UsageError
from hyimg_cli.manifest.edits import manifest_of_prompts, prompts_of
from hyimg_cli.manifest.manifest import Manifest
from hyimg_cli.manifest.sources import Sources, is_pattern, is_picture_name, sources

_WITH_PROMPT = 'say what to do with them: --prompt "make the background white"'


def manifest_of(given: Mapping[str, Any]) -> Manifest:
    """The manifest of a command line. Raises UsageError where there is none, or it is unclear."""
    if given["prompt"]:
        found, prompts = pictures_and_prompts(given)
        return manifest_of_prompts(found, prompts, given.get("task"))
    if given.get("task"):
        what = "--task goes with pictures and --prompt; the lines of a manifest have their own"
        raise UsageError(what, hint="leave --task out", code="usage.task")
    names = given["inputs"] or []
    if not names:
        raise UsageError(
            "nothing to do is given",
            hint="name a manifest, for example quickstart, or pictures with --prompt",
            code="usage.no-manifest",
        )
    _refuse_pictures(names)
    return packaged.read(names[0])


def pictures_and_prompts(given: Mapping[str, Any]) -> tuple[Sources | None, list[str]]:
    """The pictures, if any are named, and the prompts; what was left out is told.

    Raises ManifestError with every fault of both.
    """
    names, faults = given["inputs"] or [], list[HyimgError]()
    found, prompts = None, list[str]()
    try:
        prompts = prompts_of(given["prompt"])
    except UsageError as error:
        faults += _each(error)
    try:
        if names:
            _refuse_manifest(names)
            found = sources(names, is_recursive=given["recursive"])
    except UsageError as error:
        faults += _each(error)
    if faults:
        raise ManifestError(faults) if len(faults) > 1 else faults[0]
    if found and not given["quiet"]:
        for text in found.notes:
            render.note(text)
    return found, prompts


def _each(error: UsageError) -> tuple[HyimgError, ...]:
    return error.faults if isinstance(error, ManifestError) else (error,)


def _refuse_pictures(names: Sequence[str]) -> None:
    """Raises UsageError for what is to be edited, where nobody says how."""
    what = ""
    if len(names) > 1:
        what = f"{len(names)} files are given; a manifest stands alone, and pictures need a prompt"
    elif is_pattern(names[0]):
        what = "a pattern stands for pictures, and there is no prompt"
    elif is_picture_name(names[0]) and not os.path.isdir(names[0]):
        what = "this is a picture, and there is no prompt"
    elif os.path.isdir(names[0]) and not packaged.is_packaged(names[0]):
        what = "this is a folder, and there is no prompt"
    if what:
        where = ", ".join(names[:3])
        raise UsageError(what, where=where, hint=_WITH_PROMPT, code="manifest.no-prompt")


def _refuse_manifest(names: Sequence[str]) -> None:
    """Raises UsageError for a manifest, whose lines have prompts of their own, beside --prompt."""
    for name in names:
        if name == "-" or (
            Path(name).suffix in (".jsonl", ".csv", ".tsv", ".txt") and os.path.isfile(name)
        ):
            raise UsageError(
                "--prompt goes with pictures; the lines of a manifest have prompts of their own",
                where=name,
                hint="leave --prompt out, or name the pictures; --prompt prompts.txt reads prompts",
                code="usage.prompt-and-manifest",
            )
