"""A manifest line that asks for videos: its size and frames by the rules of its model, its jobs."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hyimg_cli.errors import HyimgError
from hyimg_cli.manifest.layers import Layers
from hyimg_cli.manifest.line import fault
from hyimg_cli.settings.kinds import MAX_SIDE
from hyimg_cli.spec.card import VideoCard
from hyimg_cli.spec.job import Size, SizeRequest, VideoJob


@dataclass(frozen=True)
class VideoLayers(Layers):
    """A line that asks for videos."""

    card: VideoCard

    def faults(self) -> Iterator[HyimgError]:
        """What is wrong with the line only for this model and these settings.

        Libraries round sizes and frames down without a word; here they are refused.
        """
        yield from self._size_faults()
        stride, frames = self.card.frame_stride, self.value("num_frames")
        if (frames - 1) % stride:
            what = f"{frames} frames are not {stride} * k + 1"
            below = (frames - 1) // stride * stride + 1
            hint = f"the nearest are {below} and {below + stride}"
            yield self._fault("frames", what, "num_frames", hint)
        yield from self._guidance_faults()

    def _guidance_faults(self) -> Iterator[HyimgError]:
        """What would be asked of a guidance that is off, or that this model does not have."""
        scale = self.value("guidance_scale")
        if scale < 1 and not self.card.guides_below_one:
            what = f"guidance_scale {scale:g} would be none: this model guides above 1 only"
            hint = "give 1 for no guidance, or more"
            yield self._fault("guidance", what, "guidance_scale", hint)
        if "negative_prompt" in self.line.given and scale == 1:
            what = "no stage would use it: guidance_scale is 1, so nothing is held against it"
            yield self._fault("unconsumed", what, "negative_prompt", "take the field out")
        has_two = self.card.defaults.guidance_scale_2 is not None
        if "guidance_scale_2" in self.line.given and (not has_two or scale == 1):
            off = "guidance_scale is 1, which switches guidance off for both transformers"
            what = f"no stage would use it: {off if has_two else 'the model has one transformer'}"
            yield self._fault("unconsumed", what, "guidance_scale_2", "take the field out")

    def _size_faults(self) -> Iterator[HyimgError]:
        size, multiple = self.size(), self.card.size_multiple
        for side, pixels in (("height", size.height), ("width", size.width)):
            if pixels % multiple:
                what = f"{size}: its {side} {pixels} is not a multiple of {multiple}"
                near = " and ".join(str(n) for n in _nearest(pixels, multiple))
                yield self._fault("size", what, "size", f"the nearest are {near}")

    def _fault(self, slug: str, what: str, name: str, hint: str) -> HyimgError:
        """A fault at the line's field, or at the setting that gave the value."""
        place = self.line.where if name in self.line.given else self.settings[name].origin
        return fault(slug, what, where=f"{place}: {name}", hint=hint)

    def size(self) -> Size:
        """Pixels of the video: as asked; the model's own; or of that area in a ratio asked for."""
        request: SizeRequest = self.value("size")
        own = self.card.defaults.size
        if request.is_auto:
            return own
        if not request.is_ratio:
            return Size(request.height, request.width)
        ratio = request.height / request.width
        height = math.sqrt(own.height * own.width * ratio)
        return Size(self._on_grid(height), self._on_grid(height / ratio))

    def _on_grid(self, pixels: float) -> int:
        multiple = self.card.size_multiple
        return max(multiple, round(pixels / multiple) * multiple)

    def jobs(self, folder: Path) -> Iterator[VideoJob]:
        """The line's job, or its children where it asks for several videos."""
        for name, seed in self.seeds():
            yield self._job(name, seed)

    def _job(self, custom_id: str, seed: int) -> VideoJob:
        fields = self.line.fields
        scale_2 = self.card.defaults.guidance_scale_2
        return VideoJob(
            custom_id=custom_id,
            task="t2v",
            prompt=fields["prompt"],
            negative_prompt=self.value("negative_prompt"),
            model=self.model,
            seed=seed,
            size=self.size(),
            num_frames=self.value("num_frames"),
            fps=self.value("fps"),
            num_inference_steps=self.value("num_inference_steps"),
            guidance_scale=self.value("guidance_scale"),
            flow_shift=self.value("flow_shift"),
            guidance_scale_2=None if scale_2 is None else self.value("guidance_scale_2"),
            metadata_json=json.dumps(fields.get("metadata")),
            extra_json=json.dumps(self.line.extra),
            source_line=self.line.where,
            user_fields=self.line.given,
        )


def _nearest(pixels: int, multiple: int) -> list[int]:
    """The multiples around `pixels` that a side may have."""
    below = pixels // multiple * multiple
    return [side for side in (below, below + multiple) if multiple <= side <= MAX_SIDE]
