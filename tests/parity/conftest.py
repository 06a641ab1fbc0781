"""Golden cases: tensors that the official code produced on a small random checkpoint.

The folder is the copy next to this file, or what HYIMG_GOLDENS names: any folder of the same
layout. Every number comes from the folder; a case may omit tensors, but a test that compared
nothing fails.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hyimg_cli.models.hunyuan_image3.config import Architecture, architecture
from hyimg_cli.models.hunyuan_image3.model import HunyuanImage3ForCausalMM
from hyimg_cli.models.hunyuan_image3.vocabulary import Vocabulary
from hyimg_cli.models.hunyuan_image3.weights import load

ABSOLUTE, RELATIVE = 2e-4, 1e-4


class Case:
    """One case file: its tensors by name, and how many of them were compared."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors = load_file(path)
        self.compared = 0

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def close(self, name: str, ours: Tensor) -> None:
        """`ours` equals the stored tensor within the stated tolerance; skipped where it is
        omitted.
        """
        if name not in self.tensors:
            return
        stored = self.tensors[name]
        assert ours.shape == stored.shape, name
        torch.testing.assert_close(
            ours.float(), stored.float(), atol=ABSOLUTE, rtol=RELATIVE, msg=lambda m: f"{name}: {m}"
        )
        self.compared += 1

    def equal(self, name: str, ours: Any) -> None:
        """`ours` equals the stored integers exactly; skipped where they are omitted."""
        if name not in self.tensors:
            return
        stored = self.tensors[name].long()
        assert torch.equal(torch.as_tensor(ours).long().reshape(stored.shape), stored), name
        self.compared += 1


@pytest.fixture(scope="session")
def goldens() -> Path:
    return Path(os.environ.get("HYIMG_GOLDENS") or Path(__file__).parent / "tiny")


@pytest.fixture(scope="session")
def config(goldens: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((goldens / "checkpoint" / "config.json").read_text())
    return value


@pytest.fixture(scope="session")
def arch(config: dict[str, Any]) -> Architecture:
    return architecture(config)


@pytest.fixture(scope="session")
def generation(goldens: Path) -> dict[str, Any]:
    path = goldens / "checkpoint" / "generation_config.json"
    value: dict[str, Any] = json.loads(path.read_text())
    return value


@pytest.fixture(scope="session")
def network(goldens: Path) -> HunyuanImage3ForCausalMM:
    return load(goldens / "checkpoint", dtype=torch.float32)


@pytest.fixture(scope="session")
def vocabulary(goldens: Path, arch: Architecture) -> Vocabulary:
    return Vocabulary.from_folder(
        goldens / "checkpoint", base_size=arch.image_base_size, ratio_count=37
    )


@pytest.fixture
def open_case(goldens: Path) -> Iterator[Any]:
    """Opens cases by their number and name. Each must be compared, unless it is only borrowed
    from.
    """
    opened: list[Case] = []

    def opener(name: str, *, borrowed: bool = False) -> Case:
        path = goldens / "cases" / f"{name}.safetensors"
        if not path.is_file():
            pytest.skip(f"this folder has no case {name}")
        case = Case(path)
        if not borrowed:
            opened.append(case)
        return case

    yield opener
    for case in opened:
        assert case.compared > 0, f"{case.path.name}: nothing to compare"
