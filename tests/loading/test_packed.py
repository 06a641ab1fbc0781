"""Matrices that bitsandbytes has packed, against its own numbers.

`bitsandbytes/model.safetensors` holds what its 0.50 modules save, twice packed and plain, in 4 and
in 8 bits; `expected.safetensors` what its own functions make of them.
"""

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hyimg_cli import errors
from hyimg_cli.errors import CheckpointError, MachineError
from hyimg_cli.loading.packed import stored_index
from hyimg_cli.loading.readers import read_all

GOLDEN = Path(__file__).parent / "bitsandbytes"
Tensors = dict[str, torch.Tensor]
UNPACKS = pytest.mark.skipif(
    find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)


@pytest.fixture
def tensors() -> Tensors:
    return dict(load_file(GOLDEN / "model.safetensors"))


def _whole(folder: Path) -> Tensors:
    stored = stored_index(folder)
    found: Tensors = {}
    files = sorted(folder.glob("model*.safetensors"))
    read_all(files, stored, lambda one: found.update({one.name: one.whole().clone()}))
    assert {n: tuple(t.shape) for n, t in found.items()} == {
        n: info.shape for n, info in stored.items()
    }
    return found


@UNPACKS
def test_packed_matrices_are_made_whole_as_bitsandbytes_makes_them() -> None:
    expected = load_file(GOLDEN / "expected.safetensors")
    found = _whole(GOLDEN)
    assert found.keys() == {*expected, "eight.bias"}
    for name, tensor in expected.items():
        assert torch.equal(found[name].to(tensor.dtype), tensor), name


@UNPACKS
def test_parts_may_lie_in_another_shard(tensors: Tensors, tmp_path: Path) -> None:
    names = [f"model-{n}.safetensors" for n in range(2)]
    # Every other tensor: no matrix has all its parts in one file.
    places = {name: names[n % 2] for n, name in enumerate(sorted(tensors))}
    for file in names:
        save_file({n: t for n, t in tensors.items() if places[n] == file}, tmp_path / file)
    index = {"weight_map": places}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for name, tensor in _whole(GOLDEN).items():
        assert torch.equal(_whole(tmp_path)[name], tensor)


def _state(**changes: object) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        name = "plain.weight.quant_state.bitsandbytes__nf4"
        state = json.loads(bytes(tensors[name].tolist())) | changes
        tensors[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("plain.weight.absmax"), "plain.weight.absmax is missing"),
        (lambda t: t.pop("plain.weight"), "plain.weight .* is missing"),
        (lambda t: t.pop("eight.weight"), "eight.weight .* not a matrix of 8-bit integers"),
        (
            lambda t: t.update({"eight.SCB": torch.ones(3)}),
            "eight.SCB is 12 bytes, expected 128 bytes",
        ),
        (
            lambda t: t.update({"eight.weight": torch.ones(32, 64)}),
            "not a matrix of 8-bit integers",
        ),
        (
            lambda t: t.update({"eight.weight_format": torch.ones((), dtype=torch.uint8)}),
            "ordered for one kind of GPU",
        ),
        (
            lambda t: t.update({"nested.weight.nested_absmax": torch.ones(1)}),
            "nested.weight.nested_absmax is 4 bytes, expected 8 bytes",
        ),
        (_state(shape=[64, 64]), "plain.weight is 1024 bytes, expected 2048 bytes"),
        (_state(shape=[-32, -64]), "cannot be read"),
        (_state(shape=5), "cannot be read"),
        (_state(blocksize=0), "cannot be read"),
        (_state(blocksize=60), "cannot be read"),
        (_state(blocksize=128), "plain.weight.absmax is 128 bytes, expected 64 bytes"),
        (_state(dtype="int8"), "cannot be read"),
    ],
)
def test_parts_that_do_not_fit_are_named(
    tensors: Tensors, tmp_path: Path, change: Callable[[Tensors], None], said: str
) -> None:
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=said) as caught:
        stored_index(tmp_path)
    assert "--quantization nf4" in caught.value.hint


def test_a_packed_matrix_is_not_read_without_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "find_spec", lambda name: None)
    with pytest.raises(MachineError, match="bitsandbytes is not installed") as caught:
        _whole(GOLDEN)
    assert "[nf4]" in caught.value.hint


def test_what_is_stored_is_counted_as_it_lies_there() -> None:
    infos = stored_index(GOLDEN)
    assert infos["plain.weight"].bytes == 1024 + 32 * 4 + 16 * 4 + 78
    assert infos["eight.weight"].bytes == 32 * 64 + 32 * 4 + 1
