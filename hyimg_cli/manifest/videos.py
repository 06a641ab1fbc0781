"""A manifest line that asks for videos: its jobs, with sizes that its model allows."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from hyimg_cli.errors import HyimgError
from hyimg_cli.manifest.resolved_line import ResolvedLine
from hyimg_cli.settings.kinds import MAX_SIDE
from hyimg_cli.spec.card import VideoCard, VideoDefaults
from hyimg_cli.spec.job import Size, SizeRequest, VideoJob
from hyimg_cli.spec.options import VIDEO_OPTIONS


@dataclass(frozen=True)
class VideoLine(ResolvedLine):
    """A line that asks for videos."""

    card: VideoCard
    defaults: VideoDefaults
    kind = "videos"

    def faults_together(self) -> Iterator[HyimgError]:
        # A task that the checkpoint does not have, or pictures that it cannot use.
        rule, count = self.card.start, len(self.images)
        if self.card.needs_start and not count:
            what = "this model needs a start image as well as a prompt"
            hint = "set task i2v and images, or use the t2v checkpoint of the same size"
            yield self.fault("task", what, "task", hint)
        elif rule is None and count:
            what = "this model makes videos from a prompt only, and cannot use the picture"
            hint = "use the i2v checkpoint of the same size, or task t2v without images"
            yield self.fault("task", what, "task", hint)
        elif rule and count > rule.most:
            kinds = "the first frame" if rule.most == 1 else "the first and the last frame"
            what = f"{count} pictures, but this model takes {kinds}"
            yield self.fault("images", what, "images", "remove the others")
        elif rule and 0 < count < rule.fewest:
            what = "this model needs a first and a last frame, and the last one is missing"
            hint = "name two pictures, or use the i2v checkpoint"
            yield self.fault("images", what, "images", hint)
        # Libraries silently round sizes and frame counts down.
        size, multiple = self.size(), self.card.size_multiple
        for side, pixels in (("height", size.height), ("width", size.width)):
            if rest := pixels % multiple:
                what = f"size {size}: the {side} {pixels} is not a multiple of {multiple}"
                around = (pixels - rest, pixels - rest + multiple)
                near = " and ".join(str(n) for n in around if multiple <= n <= MAX_SIDE)
                yield self.fault("size", what, "size", f"the nearest are {near}")
        stride, frames = self.card.frame_stride, self.values["num_frames"]
        if (frames - 1) % stride:
            what = f"the number of frames must be {stride} * k + 1, not {frames}"
            below = (frames - 1) // stride * stride + 1
            hint = f"the nearest are {below} and {below + stride}"
            yield self.fault("frames", what, "num_frames", hint)
        # Guidance that is asked for but off, or that this model does not have.
        scale = self.values["guidance_scale"]
        if scale < 1 and not self.card.guides_below_one:
            what = f"guidance_scale {scale:g} has no effect: this model guides above 1 only"
            hint = "use 1 for no guidance, or a larger value"
            yield self.fault("guidance", what, "guidance_scale", hint)
        if "negative_prompt" in self.line.given and self.values["negative_prompt"] and scale == 1:
            yield self.unused("negative_prompt", "guidance_scale is 1, which turns guidance off")
        if "guidance_scale_2" in self.line.given and scale == 1:
            why = "guidance_scale is 1, which switches guidance off for both transformers"
            yield self.unused("guidance_scale_2", why)
        few_steps = self.card.is_distilled or self.values["scheduler"] is not None
        yield from self.step_cache_faults(is_distilled=few_steps)
        yield from self.lora_faults(has_two="guidance_scale_2" in self.card.follows)

    def size(self) -> Size:
        """Return the video's size in pixels.

        It is the size asked for, or the model's own size. With a ratio, or a first picture, it has
        the area of the model's own size and that shape.
        """
        request: SizeRequest = self.values["size"]
        own, rule = self.card.defaults.size, self.card.start
        shape = Size(request.height, request.width)
        if request.is_auto:
            picture = self.source_size(0) if self.images and rule else None
            if picture is None:
                return own
            shape = picture
        elif not request.is_ratio:
            return shape
        if rule and (found := rule.size_for(shape)):
            return found
        ratio = shape.height / shape.width
        height = math.sqrt(own.height * own.width * ratio)
        return Size(self._on_grid(height), self._on_grid(height / ratio))

    def _on_grid(self, pixels: float) -> int:
        multiple = self.card.size_multiple
        return max(multiple, round(pixels / multiple) * multiple)

    def job(self, index: int) -> VideoJob:
        values = {name: self.values[name] for name in VIDEO_OPTIONS} | self.own(index)
        values |= {"seed": self.seed(index), "fit": None}
        # How pictures become frames: as asked, or as the checkpoint's authors do it.
        if self.images and self.card.start is not None:
            asked = self.fields.get("fit") or self.settings["fit"].value
            values["fit"] = asked or self.card.start.fit
        return VideoJob(**values, size=self.size(), camera=self.fields.get("camera", ""))
