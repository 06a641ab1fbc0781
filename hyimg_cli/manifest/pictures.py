"""A manifest line that asks for pictures: what its model cannot do, its jobs."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hyimg_cli.errors import HyimgError
from hyimg_cli.manifest.line import unconsumed
from hyimg_cli.manifest.resolved_line import ResolvedLine
from hyimg_cli.spec.card import ModelCard
from hyimg_cli.spec.job import Encoding, ImageJob, TextSampling


@dataclass(frozen=True)
class PictureLine(ResolvedLine):
    """A line that asks for pictures."""

    card: ModelCard

    def faults(self) -> Iterator[HyimgError]:
        fields = self.line.fields
        for name, reason in unconsumed(fields, self.line.given, self.value("bot_task")).items():
            yield self.unused(name, reason)
        if fields.get("use_system_prompt") == "custom" and self.value("system_prompt") is None:
            what, hint = "custom without a system_prompt", "write the system_prompt"
            yield self.fault("missing-field", what, "use_system_prompt", hint)
        beyond = [n for n in fields.get("cot_token_ids", ()) if n >= self.card.vocab_size]
        if beyond:
            what = f"{beyond[0]} is no token of the model"
            hint = f"its tokens are 0 to {self.card.vocab_size - 1}"
            yield self.fault("out-of-range", what, "cot_token_ids", hint)
        yield from self._encoding_faults()

    def _encoding_faults(self) -> Iterator[HyimgError]:
        """What was said of a file that its format cannot be, or is anyway."""
        kind, is_lossless = self.value("format"), self.value("lossless")
        if kind == "jpeg" and is_lossless:
            yield self.fault("conflict", "no JPEG is lossless", "lossless", "use webp or png")
        if "lossless" in self.line.given and is_lossless and kind == "png":
            yield self.unused("lossless", "a PNG loses nothing as it is")
        if "quality" in self.line.given and self._encoding().quality is None:
            what = "a PNG" if kind == "png" else "a lossless WebP"
            yield self.unused("quality", f"{what} has none")

    def job(self, custom_id: str, seed: int, folder: Path) -> ImageJob:
        fields = self.line.fields
        use_system_prompt, system_prompt = self._system_prompt()
        return ImageJob(
            custom_id=custom_id,
            task=fields["task"],
            images=tuple(str(folder / image) for image in fields.get("images", ())),
            seed=seed,
            size=self.value("size"),
            bot_task=self.value("bot_task"),
            text=self._text_sampling(seed),
            cot_text=fields.get("cot_text"),
            cot_token_ids=fields.get("cot_token_ids"),
            drop_think=self.value("drop_think"),
            infer_align_image_size=self.value("infer_align_image_size"),
            use_system_prompt=use_system_prompt,
            system_prompt=system_prompt,
            encoding=self._encoding(),
            **self.shared(),
        )

    def _encoding(self) -> Encoding:
        kind = self.value("format")
        is_lossless = kind == "png" or (kind == "webp" and self.value("lossless"))
        return Encoding(kind, None if is_lossless else self.value("quality"))

    def _text_sampling(self, seed: int) -> TextSampling:
        ar_seed = self.value("ar_seed")
        names = ("temperature", "top_k", "top_p", "max_new_tokens")
        values = {name: self.value(name) for name in names}
        return TextSampling(seed=seed if ar_seed is None else ar_seed, **values)

    def _system_prompt(self) -> tuple[str, str | None]:
        """Which system prompt, and its text, which only `custom` has.

        A line that brings a text means it to be used; so do settings that name no other kind.
        """
        text, line = self.value("system_prompt"), self.line.fields
        is_named = "use_system_prompt" in line or self.settings["use_system_prompt"].value
        if "system_prompt" in line or (text is not None and not is_named):
            kind = "custom"
        else:
            kind = str(self.value("use_system_prompt"))
        if kind != "custom":
            return kind, None
        return (kind, text) if text is not None else ("None", None)
