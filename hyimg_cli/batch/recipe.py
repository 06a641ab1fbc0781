"""The one place of precedence: manifest line > flag > environment > recipe file > checkpoint.

`read_recipe` reads a TOML file, `settle` merges it with flags and environment, `resolve_jobs` lays
the manifest's lines over that and expands `n` and `seeds` into child jobs.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hyimg_cli.batch.fields import FIELDS
from hyimg_cli.batch.kinds import MAX_SEED, BadValue, nearest, shown
from hyimg_cli.batch.knobs import KNOBS, OF_THE_JOB, SAMPLING, Knob, read_recipe
from hyimg_cli.batch.line import ManifestLine, child_ids, fault, unconsumed
from hyimg_cli.batch.manifest import Manifest
from hyimg_cli.batch.resolved import job_to_json
from hyimg_cli.errors import HyimgError, UsageError
from hyimg_cli.spec.card import ModelCard
from hyimg_cli.spec.digest import seed_from
from hyimg_cli.spec.job import ImageJob, SizeRequest, TextSampling

__all__ = ["KNOBS", "Setting", "job_to_json", "read_recipe", "resolve_jobs", "settle"]

Origin = Literal["line", "flag", "environment", "recipe", "model", "default"]
PREFIX = "HYIMG_"
_MAX_SEEDS = MAX_SEED + 1


@dataclass(frozen=True)
class Setting:
    """A value and what set it. `model` with None: the checkpoint's own, known per job."""

    name: str
    value: Any
    origin: Origin


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
    is_of_model = knob.name in SAMPLING and knob.name not in OF_THE_JOB
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
    manifest: Manifest, settings: Mapping[str, Setting], card_of: Callable[[str], ModelCard]
) -> tuple[list[ImageJob], list[HyimgError]]:
    """The jobs of the good lines in manifest order, and the faults that only now can be seen.

    `card_of` is asked once per model. Raises what it raises for the model of the settings; for a
    model that a line names, that becomes a fault of the line.
    """
    cards = _Cards(card_of, manifest.folder, default=settings["model"].value)
    jobs: list[ImageJob] = []
    faults: list[HyimgError] = []
    for line in manifest.lines:
        try:
            model = cards.model_of(line)
            layers = _Layers(line, settings, model, cards.of_model(model))
            found = list(layers.faults())
        except HyimgError as error:
            if "model" not in line.fields:
                raise
            found = [_model_fault(error, line)]
        if found:
            faults += found
        else:
            jobs += layers.jobs(manifest.folder)
    return jobs, faults


class _Cards:
    """Cards by model; a model that has none is asked for once, too."""

    def __init__(self, card_of: Callable[[str], ModelCard], folder: Path, *, default: str) -> None:
        self._card_of = card_of
        self._folder = folder
        self._default = default
        self._located: dict[str, str] = {}
        self._known: dict[str, ModelCard | HyimgError] = {}

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

    def of_model(self, model: str) -> ModelCard:
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


@dataclass(frozen=True)
class _Layers:
    """A line over the settings over its model's card."""

    line: ManifestLine
    settings: Mapping[str, Setting]
    model: str
    card: ModelCard

    def value(self, name: str) -> Any:
        """The line's value, else the setting's, else the checkpoint's own."""
        if name in self.line.fields:
            return self.line.fields[name]
        setting = self.settings[name]
        if setting.value is not None or name in OF_THE_JOB:
            return setting.value
        return getattr(self.card.defaults, name)

    def faults(self) -> Iterator[HyimgError]:
        """What is wrong with the line only for this model and these settings."""
        fields, where = self.line.fields, self.line.where
        idle = unconsumed(fields, self.line.given, self.bot_task)
        for name, reason in idle.items():
            what = f"no stage would use it: {reason}"
            yield fault("unconsumed", what, where=f"{where}: {name}", hint="take the field out")
        if fields.get("use_system_prompt") == "custom" and self.value("system_prompt") is None:
            what, place = "custom without a system_prompt", f"{where}: use_system_prompt"
            yield fault("missing-field", what, where=place, hint="write the system_prompt")
        beyond = [n for n in fields.get("cot_token_ids", ()) if n >= self.card.vocab_size]
        if beyond:
            what, place = f"{beyond[0]} is no token of the model", f"{where}: cot_token_ids"
            hint = f"its tokens are 0 to {self.card.vocab_size - 1}"
            yield fault("out-of-range", what, where=place, hint=hint)

    @property
    def bot_task(self) -> Any:
        bot_task = self.value("bot_task")
        return "none" if bot_task == "image" else bot_task

    def jobs(self, folder: Path) -> Iterator[ImageJob]:
        """The line's job, or its children where it asks for several pictures."""
        seeds, base = self.line.fields.get("seeds"), self.value("seed")
        for index, name in enumerate(child_ids(self.line.fields)):
            if seeds:
                seed = seeds[index]
            elif base is None:
                seed = seed_from(name)
            else:
                seed = (base + index) % _MAX_SEEDS
            yield self._job(name, seed, folder)

    def _job(self, custom_id: str, seed: int, folder: Path) -> ImageJob:
        fields = self.line.fields
        use_system_prompt, system_prompt = self._system_prompt()
        return ImageJob(
            custom_id=custom_id,
            task=fields["task"],
            prompt=fields["prompt"],
            images=tuple(str(folder / image) for image in fields.get("images", ())),
            model=self.model,
            seed=seed,
            size=self.value("size"),
            num_inference_steps=self.value("num_inference_steps"),
            guidance_scale=self.value("guidance_scale"),
            flow_shift=self.value("flow_shift"),
            bot_task=self.bot_task,
            text=self._text_sampling(seed),
            cot_text=fields.get("cot_text"),
            cot_token_ids=fields.get("cot_token_ids"),
            drop_think=self.value("drop_think"),
            infer_align_image_size=self.value("infer_align_image_size"),
            use_system_prompt=use_system_prompt,
            system_prompt=system_prompt,
            metadata_json=json.dumps(fields.get("metadata")),
            extra_json=json.dumps(self.line.extra),
            source_line=self.line.where,
            user_fields=self.line.given,
        )

    def _text_sampling(self, seed: int) -> TextSampling:
        ar_seed = self.value("ar_seed")
        return TextSampling(
            seed=seed if ar_seed is None else ar_seed,
            temperature=self.value("temperature"),
            top_k=self.value("top_k"),
            top_p=self.value("top_p"),
            max_new_tokens=self.value("max_new_tokens"),
        )

    def _system_prompt(self) -> tuple[str, str | None]:
        """Which system prompt, and its text, which only `custom` has.

        A line that brings a text means it to be used; so do settings that name no other kind.
        """
        text = self.value("system_prompt")
        is_kind_set = self.settings["use_system_prompt"].value is not None
        if "system_prompt" in self.line.fields:
            kind = "custom"
        elif "use_system_prompt" in self.line.fields or is_kind_set or text is None:
            kind = str(self.value("use_system_prompt"))
        else:
            kind = "custom"
        if kind != "custom":
            return kind, None
        return (kind, text) if text is not None else ("None", None)
