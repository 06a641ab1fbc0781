"""Read the scene of a small-world film from its pixels alone.

The picture world's judge, which knows more shapes and colours than films have, reads every frame.
The motion comes from the shape's middle in the first and in the last frames.

Shapes: T frames · C colour channels · H W rows, columns.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from tiny_world.judge import Verdict as FrameVerdict
from tiny_world.judge import judge as judge_frame
from torch import Tensor

from tiny_films.draw import TRAVEL_PX
from tiny_films.world import BACKGROUND, FACTS, FRAMES, MOTIONS, Scene

_CLEAN_FRAMES = 7
_MOVED_PX = TRAVEL_PX / 2
_STILL_PX = 5.0
_ASTRAY_PX = 6.0


@dataclass(frozen=True)
class Verdict:
    """The scene, the number of clean frames, and how far the shape went (down, right)."""

    seen: Scene | None
    clean_frames: int
    moved_px: tuple[float, float]

    def wrong(self, wanted: Scene, facts: Iterable[str] = FACTS) -> tuple[str, ...]:
        """Return the `facts` that are not as wanted; all of them if the film is not clean."""
        if self.seen is None:
            return tuple(facts)
        return tuple(fact for fact in facts if getattr(self.seen, fact) != getattr(wanted, fact))


def judge(film_TCHW: Tensor) -> Verdict:
    """Return the verdict on one uint8 film [9, 3, 64, 64].

    It shows a scene if at least seven frames are clean, on black, and agree on shape and colour,
    and the path is one of the five.
    """
    frames = [judge_frame(frame) for frame in film_TCHW]
    moved = _moved(film_TCHW)
    (shape, colour), count = _agreed(frames)
    motion = _motion(moved, _strayed(film_TCHW))
    is_film = len(frames) == FRAMES and count >= _CLEAN_FRAMES and motion is not None
    seen = Scene(shape, colour, motion) if is_film and motion else None
    return Verdict(seen, count, moved)


def _agreed(frames: Sequence[FrameVerdict]) -> tuple[tuple[str, str], int]:
    """Return shape and colour of the most clean frames on black, and the number of these."""
    looks = [
        (frame.scene.shape, frame.scene.colour)
        for frame in frames
        if frame.scene is not None and frame.scene.background == BACKGROUND and frame.is_clean
    ]
    return Counter(looks).most_common(1)[0] if looks else (("", ""), 0)


def _middles(film_TCHW: Tensor) -> Tensor:
    """Return the middle of what differs from the background, (down, right) in pixels: [T, 2]."""
    pixels_TCHW = film_TCHW.float()
    border_TCN = torch.cat([pixels_TCHW[:, :, 0], pixels_TCHW[:, :, -1]], dim=-1)
    background_TC11 = border_TCN.median(dim=-1).values[:, :, None, None]
    contrast_THW = (pixels_TCHW - background_TC11).norm(dim=1)
    weight_THW = torch.where(contrast_THW > 40, contrast_THW, 0.0)
    total_T = weight_THW.sum(dim=(1, 2)).clamp(min=1e-6)
    height, width = weight_THW.shape[1:]
    down_T = (weight_THW.sum(2) @ torch.arange(height).float()) / total_T
    right_T = (weight_THW.sum(1) @ torch.arange(width).float()) / total_T
    return torch.stack([down_T, right_T], dim=1)


def _moved(film_TCHW: Tensor) -> tuple[float, float]:
    middles_T2 = _middles(film_TCHW)
    down, right = (middles_T2[-1] - middles_T2[0]).tolist()
    return down, right


def _strayed(film_TCHW: Tensor) -> float:
    """Return how far the path leaves the straight line at one speed, in pixels."""
    middles_T2 = _middles(film_TCHW)
    share_T1 = torch.linspace(0, 1, len(middles_T2))[:, None]
    line_T2 = middles_T2[0] + share_T1 * (middles_T2[-1] - middles_T2[0])
    return (middles_T2 - line_T2).norm(dim=1).amax().item()


def _motion(moved: tuple[float, float], strayed: float) -> str | None:
    """Return which of the five motions the path is; None for any other path."""
    if strayed > _ASTRAY_PX:
        return None
    if max(map(abs, moved)) <= _STILL_PX:
        return "still"
    for name, direction in MOTIONS.items():
        along = sum(m * d for m, d in zip(moved, direction, strict=True))
        across = sum(abs(m) for m, d in zip(moved, direction, strict=True) if d == 0)
        if name != "still" and along >= _MOVED_PX and across <= _ASTRAY_PX:
            return name
    return None
