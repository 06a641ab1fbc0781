"""A manifest line that asks for videos: its size and frames by the rules of its model, its jobs."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hyimg_cli.errors import HyimgError
from hyimg_cli.manifest.resolved_line import Child, ResolvedLine
from hyimg_cli.settings.kinds import MAX_SIDE
from hyimg_cli.spec.card import VideoCard
from hyimg_cli.spec.job import Size, SizeRequest, VideoJob


@dataclass(frozen=True)
class VideoLine(ResolvedLine):
    """A line that asks for videos."""

    card: VideoCard

    def faults(self, folder: Path) -> Iterator[HyimgError]:
        # Libraries round sizes and frames down without a word.
        yield from self._size_faults()
        stride, frames = self.card.frame_stride, self.value("num_frames")
        if (frames - 1) % stride:
            what = f"{frames} frames are not {stride} * k + 1"
            below = (frames - 1) // stride * stride + 1
            hint = f"the nearest are {below} and {below + stride}"
            yield self.fault("frames", what, "num_frames", hint)
        yield from self._guidance_faults()

    def _guidance_faults(self) -> Iterator[HyimgError]:
        """Faults of a guidance that is asked for and is off, or that this model does not have."""
        scale = self.value("guidance_scale")
        if scale < 1 and not self.card.guides_below_one:
            what = f"guidance_scale {scale:g} would be none: this model guides above 1 only"
            hint = "give 1 for no guidance, or more"
            yield self.fault("guidance", what, "guidance_scale", hint)
        if "negative_prompt" in self.line.given and scale == 1:
            reason = "guidance_scale is 1, so nothing is held against it"
            yield self.unused("negative_prompt", reason)
        has_two = self.card.defaults.guidance_scale_2 is not None
        if "guidance_scale_2" in self.line.given and (not has_two or scale == 1):
            off = "guidance_scale is 1, which switches guidance off for both transformers"
            yield self.unused(
                "guidance_scale_2", off if has_two else "the model has one transformer"
            )

    def _size_faults(self) -> Iterator[HyimgError]:
        size, multiple = self.size(), self.card.size_multiple
        for side, pixels in (("height", size.height), ("width", size.width)):
            if pixels % multiple:
                what = f"{size}: its {side} {pixels} is not a multiple of {multiple}"
                near = " and ".join(str(n) for n in _nearest(pixels, multiple))
                yield self.fault("size", what, "size", f"the nearest are {near}")

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

    def job(self, child: Child, folder: Path) -> VideoJob:
        has_two = self.card.defaults.guidance_scale_2 is not None
        return VideoJob(
            custom_id=child.custom_id,
            task="t2v",
            negative_prompt=self.value("negative_prompt"),
            seed=child.seed,
            size=self.size(),
            num_frames=self.value("num_frames"),
            fps=self.value("fps"),
            guidance_scale_2=self.value("guidance_scale_2") if has_two else None,
            **self.shared(),
        )


def _nearest(pixels: int, multiple: int) -> list[int]:
    """The multiples around `pixels` that a side may have."""
    below = pixels // multiple * multiple
    return [side for side in (below, below + multiple) if multiple <= side <= MAX_SIDE]
