"""A manifest's lines over the settings: the jobs that they become, `n` and `seeds` expanded."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Generic, TypeVar

from hyimg_cli.errors import HyimgError
from hyimg_cli.manifest.line import ManifestLine, fault
from hyimg_cli.manifest.manifest import Manifest
from hyimg_cli.manifest.pictures import PictureLine
from hyimg_cli.manifest.resolved_line import ResolvedLine
from hyimg_cli.manifest.videos import VideoLine
from hyimg_cli.settings.precedence import Setting
from hyimg_cli.spec.card import ModelCard, VideoCard
from hyimg_cli.spec.job import Job

Card = TypeVar("Card", bound=ModelCard | VideoCard)


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
            resolved = _resolved(line, settings, images, videos)
            found = list(resolved.faults())
        except HyimgError as error:
            if "model" not in line.fields:
                raise
            where = f"{line.where}: model"
            found = [fault("model", error.what, where=where, hint=error.hint)]
        if found:
            faults += found
        else:
            jobs += resolved.jobs(manifest.folder)
    # What a setting caused is the same in every line; it is said once.
    once = {(fault.where, fault.what): fault for fault in faults}
    return jobs, list(once.values())


def _resolved(
    line: ManifestLine,
    settings: Mapping[str, Setting],
    images: "_Cards[ModelCard]",
    videos: "_Cards[VideoCard] | None",
) -> ResolvedLine:
    if line.fields["task"] == "t2v":
        assert videos is not None, "nobody told how video models are looked up"
        model = videos.model_of(line)
        return VideoLine(line, settings, model, videos.of_model(model))
    model = images.model_of(line)
    return PictureLine(line, settings, model, images.of_model(model))


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
