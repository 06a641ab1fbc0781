"""A manifest line over the run's settings over its checkpoint's own defaults: the values that hold,
and the jobs that a line of pictures becomes.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hyimg_cli.errors import HyimgError
from hyimg_cli.manifest.line import ManifestLine, child_ids, fault, unconsumed
from hyimg_cli.settings.kinds import MAX_SEED
from hyimg_cli.settings.table import OF_THE_JOB
from hyimg_cli.spec.card import ModelCard, VideoCard
from hyimg_cli.spec.digest import seed_from
from hyimg_cli.spec.job import ImageJob, TextSampling

Origin = Literal["line", "flag", "environment", "recipe", "model", "default"]
_MAX_SEEDS = MAX_SEED + 1


@dataclass(frozen=True)
class Setting:
    """A value and what set it. `model` with None: the checkpoint's own, known per job."""

    name: str
    value: Any
    origin: Origin


@dataclass(frozen=True)
class Layers:
    """A line over the settings over its model's card."""

    line: ManifestLine
    settings: Mapping[str, Setting]
    model: str
    card: ModelCard | VideoCard

    def value(self, name: str) -> Any:
        """The line's value, else the setting's, else the checkpoint's own."""
        if name in self.line.fields:
            return self.line.fields[name]
        setting = self.settings[name]
        if setting.value is not None or name in OF_THE_JOB:
            return setting.value
        return getattr(self.card.defaults, name)

    def seeds(self) -> Iterator[tuple[str, int]]:
        """Id and seed of the line's job, or of its children where it asks for several."""
        seeds, base = self.line.fields.get("seeds"), self.value("seed")
        for index, name in enumerate(child_ids(self.line.fields)):
            if seeds:
                yield name, seeds[index]
            elif base is None:
                yield name, seed_from(name)
            else:
                yield name, (base + index) % _MAX_SEEDS


@dataclass(frozen=True)
class ImageLayers(Layers):
    """A line that asks for pictures."""

    card: ModelCard

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
        """The line's job, or its children; paths of images begin at `folder`."""
        for name, seed in self.seeds():
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
