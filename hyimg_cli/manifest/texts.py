"""A manifest line that asks for texts: answers by a model that also draws."""

from collections.abc import Iterator
from dataclasses import dataclass

from hyimg_cli.errors import HyimgError
from hyimg_cli.manifest.resolved_line import ResolvedLine
from hyimg_cli.spec.card import ModelCard, SamplingDefaults
from hyimg_cli.spec.job import SizeRequest, TextJob
from hyimg_cli.spec.options import PICTURE_OPTIONS, TEXT_OPTIONS, TextSampling
from hyimg_cli.spec.units import counted

# Prompts that ask for a drawing, and the one that a bot_task chooses.
_OF_DRAWINGS = ("dynamic", "en_vanilla", "en_recaption", "en_think_recaption")
# Greedy answers are shared and the same in any order, as published demos of these models have it.
_GREEDY = 0.0
_STEPLESS = {"num_inference_steps": 0, "guidance_scale": 1.0, "flow_shift": 1.0}


@dataclass(frozen=True)
class TextLine(ResolvedLine):
    """A line that asks for texts."""

    card: ModelCard
    defaults: SamplingDefaults
    kind = "pictures"

    def faults(self) -> Iterator[HyimgError]:
        # An option that this model does not follow is one of drawings, which the line cannot have.
        yield from self.faults_together()

    def faults_together(self) -> Iterator[HyimgError]:
        if self.card.denoises_latents:
            what = f"{self.card.name} draws only: it writes no text"
            hint = "name a checkpoint of HunyuanImage-3 Instruct or BAGEL"
            yield self.fault("task", what, "task", hint)
            return
        count, most = len(self.images), self.card.most_images
        if count > most:
            what = f"{counted(count, 'source image')}, but {self.card.name} takes at most {most}"
            yield self.fault("too-many-images", what, "images", "remove the others")
        asked, thinks = self.fields.get("bot_task", "none"), self._thinks
        if asked not in ("none", "think"):
            what = f"bot_task {asked} is for drawings: an answer may have none or think"
            yield self.fault("conflict", what, "bot_task", "use think, or remove it")
        elif thinks and self.fields.get("choices"):
            what = "a choice is made without thinking"
            yield self.fault("conflict", what, "bot_task", "remove it, or the choices")
        kind = self.fields.get("use_system_prompt")
        if kind in _OF_DRAWINGS:
            what = f"the system prompt {kind} asks for a drawing"
            hint = "use en_unified, custom or None"
            yield self.fault("conflict", what, "use_system_prompt", hint)
        elif kind == "custom" and self.fields.get("system_prompt") is None:
            what, hint = "custom needs a system_prompt", "write the system_prompt"
            yield self.fault("missing-field", what, "use_system_prompt", hint)

    @property
    def _thinks(self) -> bool:
        return self.fields.get("bot_task") == "think"

    def job(self, index: int) -> TextJob:
        fields, own = self.fields, self.own(index)
        values = dict.fromkeys(PICTURE_OPTIONS) | _STEPLESS
        values |= {"step_cache": None, "lora": (), "negative_prompt": "", "layers": None}
        values |= {"infer_align_image_size": False, "drop_think": False}
        values |= {"bot_task": "think" if self._thinks else "none", "seed": self.seed(index)}
        prompt = fields.get("system_prompt")
        kind = "custom" if prompt is not None else fields.get("use_system_prompt", "None")
        values |= {"use_system_prompt": kind, "system_prompt": prompt}
        ar_seed = fields.get("ar_seed")
        values["ar_seed"] = self.seed(index) if ar_seed is None else ar_seed
        sampling = {name: self.values[name] for name in TEXT_OPTIONS}
        # The checkpoint's own temperature is for drawings.
        sampling["temperature"] = fields.get("temperature", _GREEDY)
        return TextJob(
            **own | values,
            size=SizeRequest(),
            text=TextSampling(**sampling),
            choices=fields.get("choices", ()),
        )
