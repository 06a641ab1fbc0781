"""The one place of precedence: manifest line > flag > environment > recipe file > checkpoint.

`read_recipe` reads a TOML file, `settle` merges it with flags and environment, `resolve_jobs` lays
the manifest's lines over that and expands `n` and `seeds` into child jobs.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from hyimg_cli.errors import HyimgError, UsageError
from hyimg_cli.manifest.fields import FIELDS
from hyimg_cli.manifest.layers import ImageLayers, Setting
from hyimg_cli.manifest.line import ManifestLine, fault
from hyimg_cli.manifest.manifest import Manifest
from hyimg_cli.manifest.resolved import job_to_json
from hyimg_cli.manifest.video_layers import VideoLayers
from hyimg_cli.settings.kinds import BadValue, nearest, shown
from hyimg_cli.settings.table import (
    KNOBS,
    OF_THE_JOB,
    Knob,
    read_recipe,
)
from hyimg_cli.spec.card import ModelCard, VideoCard
from hyimg_cli.spec.job import Job, SizeRequest

__all__ = ["KNOBS", "Setting", "job_to_json", "read_recipe", "resolve_jobs", "settle"]

PREFIX = "HYIMG_"
Card = TypeVar("Card", bound=ModelCard | VideoCard)


_BY_NAME = {knob.name: knob for knob in KNOBS}


def settle(
    flags: Mapping[str, Any], environ: Mapping[str, str], recipe: Mapping[str, Any]
) -> dict[str, Setting]:
    """Every setting and what set it: flag (None: unset) > HYIMG_<NAME> > recipe > default.

    Raises UsageError for a bad value and for a HYIMG_ variable that looks like a typing error.
    """
    for name in flags:
        assert name in _BY_NAME, f"no setting is called {name}"
    _refuse_misspelt(environ)
    return {knob.name: _settled(knob, flags, environ, recipe) for knob in KNOBS}


def _settled(
    knob: Knob, flags: Mapping[str, Any], environ: Mapping[str, str], recipe: Mapping[str, Any]
) -> Setting:
    flag, variable = flags.get(knob.name), PREFIX + knob.name.upper()
    if flag is not None:
        return Setting(knob.name, _typed(knob, flag, where=_flag_of(knob.name)), "flag")
    if environ.get(variable):
        return Setting(knob.name, _typed(knob, environ[variable], where=variable), "environment")
    if knob.name in recipe:
        return Setting(knob.name, recipe[knob.name], "recipe")
    is_sampling = knob.table == "sampling" and knob.default is None
    is_of_model = is_sampling and knob.name not in OF_THE_JOB
    return Setting(knob.name, knob.default, "model" if is_of_model else "default")


def _typed(knob: Knob, value: Any, *, where: str) -> Any:
    """`value` typed: text and paths are parsed, anything else (a typed flag) is checked."""
    try:
        if isinstance(value, SizeRequest):
            return value
        if isinstance(value, str | Path):
            return knob.kind.parse(str(value))
        return knob.kind.read(value)
    except BadValue as bad:
        code = f"usage.{bad.slug}"
        raise UsageError(bad.what, where=where, hint=bad.hint, code=code) from None


def _flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def _refuse_misspelt(environ: Mapping[str, str]) -> None:
    # Other variables with this prefix may belong to others; only a near miss is refused.
    known = [PREFIX + name.upper() for name in _BY_NAME]
    aliases = {alias: field.name for field in FIELDS for alias in field.aliases}
    for variable in environ:
        if variable.startswith(PREFIX) and variable not in known:
            name = variable[len(PREFIX) :].lower()
            close = aliases.get(name) or nearest(name, _BY_NAME, cutoff=0.75)
            if close in _BY_NAME:
                raise UsageError(
                    f"{shown(variable)} is not known",
                    where="environment",
                    hint=f"did you mean {PREFIX}{close.upper()}?",
                    code="usage.unknown-variable",
                )


def resolve_jobs(
    manifest: Manifest,
    settings: Mapping[str, Setting],
    card_of: Callable[[str], ModelCard],
    video_card_of: Callable[[str], VideoCard] | None = None,
) -> tuple[list[Job], list[HyimgError]]:
    """The jobs of the good lines in manifest order, and the faults that only now can be seen.

    The cards are asked for once per model; without `video_card_of` there may be no line of t2v.
    Raises what they raise for the models of the settings; for a model that a line names, that
    becomes a fault of the line.
    """
    images = _Cards(card_of, manifest.folder, default=settings["model"].value)
    videos = None
    if video_card_of is not None:
        videos = _Cards(video_card_of, manifest.folder, default=settings["video_model"].value)
    jobs: list[Job] = []
    faults: list[HyimgError] = []
    for line in manifest.lines:
        try:
            layers = _layers(line, settings, images, videos)
            found = list(layers.faults())
        except HyimgError as error:
            if "model" not in line.fields:
                raise
            found = [_model_fault(error, line)]
        if found:
            faults += found
        else:
            jobs += layers.jobs(manifest.folder)
    # What a setting caused is the same in every line; it is said once.
    once = {(fault.where, fault.what): fault for fault in faults}
    return jobs, list(once.values())


def _layers(
    line: ManifestLine,
    settings: Mapping[str, Setting],
    images: "_Cards[ModelCard]",
    videos: "_Cards[VideoCard] | None",
) -> ImageLayers | VideoLayers:
    if line.fields["task"] == "t2v":
        assert videos is not None, "nobody told how video models are looked up"
        model = videos.model_of(line)
        return VideoLayers(line, settings, model, videos.of_model(model))
    model = images.model_of(line)
    return ImageLayers(line, settings, model, images.of_model(model))


class _Cards(Generic[Card]):
    """Cards by model; a model that has none is asked for once, too."""

    def __init__(self, card_of: Callable[[str], Card], folder: Path, *, default: str) -> None:
        self._card_of = card_of
        self._folder = folder
        self._default = default
        self._located: dict[str, str] = {}
        self._known: dict[str, Card | HyimgError] = {}

    def model_of(self, line: ManifestLine) -> str:
        """The line's model; a path, like those of images, begins at the manifest's folder.

        One that leads nowhere from there is left as it is: a name, or a path from here.
        """
        if "model" not in line.fields:
            return self._default
        name: str = line.fields["model"]
        if name not in self._located:
            beside = self._folder / name
            is_path = name.split("/")[0] in (".", "..") and beside.is_dir()
            self._located[name] = str(beside) if is_path else name
        return self._located[name]

    def of_model(self, model: str) -> Card:
        if model not in self._known:
            try:
                self._known[model] = self._card_of(model)
            except HyimgError as error:
                self._known[model] = error
        card = self._known[model]
        if isinstance(card, HyimgError):
            raise card
        return card


def _model_fault(error: HyimgError, line: ManifestLine) -> HyimgError:
    return fault("model", error.what, where=f"{line.where}: model", hint=error.hint)
