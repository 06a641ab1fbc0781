"""Weights that look like LPIPS backbones and are none."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch


@pytest.fixture
def no_backbones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without backbones: an empty hub cache, whose folder this gives, and no package."""
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    monkeypatch.setattr("hyimg_cli.quality.backbones.WEIGHTS_PACKAGE", "no_such_package")
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    return tmp_path / "hub" / "checkpoints"


@pytest.fixture
def write_random_alexnet(tmp_path: Path) -> Callable[..., Path]:
    """Writes a state dict of AlexNet's shapes with random values, and gives its path."""
    shapes = {
        0: (64, 3, 11, 11),
        3: (192, 64, 5, 5),
        6: (384, 192, 3, 3),
        8: (256, 384, 3, 3),
        10: (256, 256, 3, 3),
    }

    def write(path: Path | None = None, **changed: torch.Tensor) -> Path:
        state = {}
        for layer, shape in shapes.items():
            state[f"features.{layer}.weight"] = torch.randn(shape) * 0.05
            state[f"features.{layer}.bias"] = torch.zeros(shape[0])
        path = path or tmp_path / "random.pth"
        torch.save(state | changed, path)
        return path

    return write
