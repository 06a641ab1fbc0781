"""LPIPS, version 0.1, through the lpips package: real backbones only, inputs in [-1, 1].

A backbone whose file is not the published one is accepted only if it reproduces the stored numbers.
"""

import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hyimg_cli.errors import UsageError, require
from hyimg_cli.quality.backbones import HUB_FILES, Backbone, Net, find_backbone
from hyimg_cli.quality.metrics import Metric, Pixels, require_same_size, require_side

if TYPE_CHECKING:
    from torch import Tensor, nn

VERSION = "0.1"
TOLERANCE = 1e-3
# AlexNet's last pooling needs 31 pixels; one limit for all nets, so that a file suits each or none.
MIN_SIDE = 32
# Memory for each pixel of a picture, by activations of the net's first layers; measured on a CPU.
PIXEL_BYTES: dict[Net, int] = {"alex": 250, "squeeze": 800, "vgg": 2050}
# Distances of scikit-image's astronaut from itself after the named change.
STORED: dict[Net, dict[str, float]] = {
    "alex": {
        "identical": 0.0,
        "flipped left-right": 0.72573,
        "rolled by 8 columns": 0.16741,
        "times 0.5 in [-1, 1]": 0.13121,
        "channels reversed": 0.19424,
    },
    "vgg": {
        "identical": 0.0,
        "flipped left-right": 0.74139,
        "rolled by 8 columns": 0.31107,
        "times 0.5 in [-1, 1]": 0.15360,
        "channels reversed": 0.19361,
    },
}
# Two pairs are enough to tell LPIPS's backbone from any other; all of them take VGG 12 s.
TELLING = ("rolled by 8 columns", "channels reversed")


@dataclass(frozen=True)
class StoredPair:
    """One pair of the self-test: the stored distance, and the one measured here."""

    name: str
    stored: float
    found: float

    @property
    def agrees(self) -> bool:
        return abs(self.found - self.stored) <= TOLERANCE


class Lpips:
    """A loaded metric. `origin`: where its backbone was found."""

    def __init__(self, net: Net, module: "nn.Module", origin: str) -> None:
        self.net = net
        self.origin = origin
        self._module = module

    @classmethod
    def load(cls, net: Net = "alex", weights: Path | None = None) -> "Lpips":
        """Return the metric with a backbone that was found, never a random one.

        Raises MachineError if none was found, UsageError if the given one has another shape or does
        not reproduce LPIPS's numbers.
        """
        backbone = find_backbone(net, weights)
        metric = cls(net, _module(backbone), backbone.origin)
        if not backbone.is_known:
            metric._require_stored_numbers()
        return metric

    @property
    def title(self) -> str:
        """Return version, net and weights, as others need them to compare results."""
        return f"LPIPS {VERSION}, {self.net}, {self.origin}"

    @property
    def metric(self) -> Metric:
        """Return the distance as a `Metric`, like the metrics without weights."""
        return Metric("lpips", "", False, self.distance, MIN_SIDE, PIXEL_BYTES[self.net])

    def distance(self, a: Pixels, b: Pixels) -> float:
        """Return LPIPS of two pictures, uint8 [H, W, 3]: 0 if they are equal, lower is closer.

        Raises UsageError if the sizes differ or a side is shorter than 32 pixels.
        """
        require_same_size(a, b)
        require_side("LPIPS", MIN_SIDE, a, hint="measure psnr or ssim")
        return self._between(_in_range(a), _in_range(b))

    def self_test(self, names: Collection[str] = ()) -> tuple[StoredPair, ...]:
        """Measure the stored pairs, or the ones in `names`; squeeze has none."""
        stored = STORED[self.net]
        return tuple(
            StoredPair(name, stored[name], self._between(a, b))
            for name, a, b in _stored_pairs()
            if name in (names or stored)
        )

    def _between(self, a: "Tensor", b: "Tensor") -> float:
        import torch

        with torch.inference_mode():
            return float(self._module(a, b))

    def _require_stored_numbers(self) -> None:
        hint = f"give torchvision's {HUB_FILES[self.net]}"
        if self.net not in STORED:
            what = f"the file is not the published one, and no numbers are stored for {self.net}"
            raise UsageError(what, where=self.origin, hint=hint, code="lpips.weights")
        wrong = [pair for pair in self.self_test(TELLING) if not pair.agrees]
        if wrong:
            worst = max(wrong, key=lambda pair: abs(pair.found - pair.stored))
            what = (
                f"with these weights, {worst.name!r} has a distance of {worst.found:.5f}; "
                f"expected {worst.stored:.5f}"
            )
            raise UsageError(what, where=self.origin, hint=hint, code="lpips.weights")


def _module(backbone: Backbone) -> "nn.Module":
    """Build the lpips package's network with the values of `backbone`."""
    require("lpips")
    import lpips
    import torch

    # The random start is overwritten below; it must not change the caller's random state either.
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        # NOTE: lpips calls torchvision by a parameter name that torchvision is about to drop.
        warnings.filterwarnings("ignore", message="The parameter 'pretrained'|Arguments other than")
        module: nn.Module = lpips.LPIPS(
            net=backbone.net, version=VERSION, pnet_rand=True, verbose=False
        )
    with torch.no_grad():
        for name, parameter in module.get_submodule("net").named_parameters():
            # `slice2.3.weight` is torchvision's `features.3.weight`.
            _write(parameter, f"features.{name.partition('.')[2]}", backbone)
    return module


def _write(parameter: "Tensor", name: str, backbone: Backbone) -> None:
    """Copy one array of the backbone. Raises UsageError if it is missing or unusable."""
    import torch

    array = backbone.arrays.get(name)
    if array is None or array.shape != tuple(parameter.shape) or not np.isfinite(array).all():
        found = "is missing" if array is None else f"has the shape {array.shape}"
        what = f"{name} {found}; {backbone.net} needs finite values {tuple(parameter.shape)}"
        hint = "give the weights of the net that --net names"
        raise UsageError(what, where=backbone.origin, hint=hint, code="lpips.weights")
    parameter.copy_(torch.from_numpy(array))


def _in_range(pixels: Pixels) -> "Tensor":
    """Return pixels as LPIPS expects them: float32 [1, 3, H, W] in [-1, 1]."""
    import torch

    return torch.from_numpy(pixels.astype(np.float32) / 127.5 - 1).permute(2, 0, 1)[None]


def _stored_pairs() -> Iterator[tuple[str, "Tensor", "Tensor"]]:
    from skimage.data import astronaut

    picture = _in_range(astronaut())
    yield "identical", picture, picture
    yield "flipped left-right", picture, picture.flip(3)
    yield "rolled by 8 columns", picture, picture.roll(8, 3)
    yield "times 0.5 in [-1, 1]", picture, picture * 0.5
    yield "channels reversed", picture, picture.flip(1)
