"""What the networks are really given of a crop: exactly the size in which it is drawn."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import thorough_but
from models.diffusers_image.classic import Checkpoint, line, results
from models.diffusers_image.conftest import shrink_references
from PIL import Image

from hyimg_cli.models.registry import model_card

QUICK = "qwen-image-edit-plus"
EDITORS = ["qwen-image-edit", QUICK, "qwen-image-edit-2511", "qwen-image-2.1"]
EDITORS += ["qwen-image-2.1-turbo", "klein", "klein-base", "klein-kv", "kontext", "longcat-edit"]
EDITORS += ["flux2-dev", "flux3", "flux3-base"]
# Pixels of a token, along a side.
TOKEN = 16


@contextmanager
def spied(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[set[Any], set[Any]]]:
    """The sizes of pictures that a VAE encodes, and the sizes by which tokens have positions."""
    encoded, placed, plain = set[Any](), set[Any](), torch.nn.Module.__call__

    def see(module: Any, *given: Any, **named: Any) -> Any:
        name = type(module).__name__
        if name in ("Encoder", "QwenImageEncoder3d", "QwenImage21Encoder3d"):
            encoded.add(tuple(given[0].shape[-2:]))
        for sizes in named.get("img_shapes") or ():
            placed.update((high * TOKEN, wide * TOKEN) for _, high, wide in sizes)
        if (ids := named.get("img_ids")) is not None:
            rows = ids.reshape(-1, ids.shape[-1])
            for picture in rows[:, 0].unique():
                own = rows[rows[:, 0] == picture][:, 1:3]
                counts = [len(one.unique()) for one in own.T]
                placed.add(tuple(count * TOKEN for count in counts))
        return plain(module, *given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.Module, "__call__", see)
        yield encoded, placed


@pytest.mark.parametrize("kind", thorough_but([QUICK], EDITORS))
def test_the_vae_and_the_positions_have_the_size_of_the_crop(
    run_cli: Any, write_manifest: Any, tmp_path: Path, checkpoint: Checkpoint,
    monkeypatch: pytest.MonkeyPatch, kind: str,
) -> None:  # fmt: skip
    shrink_references(monkeypatch)
    pixels = np.random.default_rng(1).integers(0, 256, (300, 420, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    model = str(checkpoint(kind))
    # The quick one is drawn once more by another kind.
    for size in model_card(model).crop_sizes()[: 1 if kind == QUICK else None]:
        box = [40, 30, 40 + size.width, 30 + size.height]
        one = line(f"a{size}", "red", "photo.png", crop=box, region=[60, 50, 70, 60])
        del one["num_inference_steps"]
        one |= {} if kind.endswith("turbo") else {"num_inference_steps": 2}
        del one["size"]
        out = tmp_path / f"out{size}"
        with spied(monkeypatch) as (encoded, placed):
            command = ("generate", str(write_manifest(one)), "--model", model)
            assert run_cli(*command, "-o", str(out)).code == 0
        assert results(out)[f"a{size}"]["edit"]["crop"]["drawn"] == [size.width, size.height]
        assert encoded == placed == {(size.height, size.width)}
