"""The random golden checkpoint as a small network, and one with the released numbers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from released import released

from hyimg_cli.models.hunyuan_image3.model import HunyuanImage3ForCausalMM
from hyimg_cli.models.hunyuan_image3.weights import load

SMALL = Path(__file__).parent.parent / "parity" / "tiny" / "checkpoint"


@pytest.fixture(scope="session")
def small_folder() -> Path:
    return SMALL


@pytest.fixture(scope="session")
def small_network() -> HunyuanImage3ForCausalMM:
    return load(SMALL, dtype=torch.float32)


@pytest.fixture(scope="session")
def small_config() -> dict[str, Any]:
    value: dict[str, Any] = json.loads((SMALL / "config.json").read_text())
    return value


@pytest.fixture(scope="session")
def released_config(small_config: dict[str, Any]) -> dict[str, Any]:
    """config.json of the released Instruct checkpoint, by the numbers that shape the network."""
    return released(small_config)
