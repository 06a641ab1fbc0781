"""A component loads exactly what its configuration describes, and runs nothing of its own."""

import json
import logging
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_video import TINY_VIDEO, write_wan

from hyimg_cli.errors import CheckpointError, MachineError
from hyimg_cli.kernels.offload import Offload
from hyimg_cli.models import registry
from hyimg_cli.models.diffusers_video.layout import read_layout
from hyimg_cli.models.diffusers_video.weights import LoadTarget, check_weights, load_weights
from hyimg_cli.settings.run import ModelChoice

FILES = {
    "transformer": "diffusion_pytorch_model.safetensors",
    "vae": "diffusion_pytorch_model.safetensors",
    "text_encoder": "model.safetensors",
    "text_encoder_2": "model.safetensors",
}
PLACE = LoadTarget(Offload(torch.device("cpu")), torch.float32)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY_VIDEO, tmp_path / "copied"))


def rewrite(folder: Path, name: str, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / name / FILES[name]
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def fault_of(folder: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        registry.load_video(ModelChoice(str(folder), device="cpu"))
    return caught.value


@pytest.mark.parametrize("name", FILES)
def test_a_missing_tensor_is_named(copied: Path, name: str) -> None:
    gone = sorted(load_file(copied / name / FILES[name]))[0]
    rewrite(copied, name, lambda tensors: tensors.pop(gone))
    error = fault_of(copied)
    assert error.code == "checkpoint.mismatch"
    assert f"{name}: " in error.what
    assert f"1 missing: {gone}" in error.what


@pytest.mark.parametrize("name", FILES)
def test_an_unexpected_tensor_is_named(copied: Path, name: str) -> None:
    rewrite(copied, name, lambda tensors: tensors.update({"extra.weight": torch.zeros(2)}))
    assert "1 unexpected: extra.weight" in fault_of(copied).what


@pytest.mark.parametrize("name", FILES)
def test_a_wrong_shape_is_named(copied: Path, name: str) -> None:
    wrong = sorted(load_file(copied / name / FILES[name]))[0]
    rewrite(copied, name, lambda tensors: tensors.update({wrong: torch.zeros(3, 7)}))
    assert f"{wrong} is [3, 7], expected" in fault_of(copied).what


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_named(copied: Path, name: str) -> None:
    path = copied / name / FILES[name]
    path.write_bytes(path.read_bytes()[:-8])
    assert fault_of(copied).code == "checkpoint.truncated"


def test_a_tied_weight_may_be_stored_under_both_names(copied: Path) -> None:
    twice = "encoder.embed_tokens.weight"
    rewrite(copied, "text_encoder_2", lambda t: t.update({twice: t["shared.weight"].clone()}))
    component = read_layout(copied).components["text_encoder_2"]
    encoder = load_weights(component, PLACE)
    assert encoder.encoder.embed_tokens.weight is encoder.shared.weight


def test_a_tied_weight_may_be_stored_under_the_other_name(copied: Path) -> None:
    rewrite(
        copied,
        "text_encoder_2",
        lambda t: t.update({"encoder.embed_tokens.weight": t.pop("shared.weight")}),
    )
    component = read_layout(copied).components["text_encoder_2"]
    original = load_weights(read_layout(TINY_VIDEO).components["text_encoder_2"], PLACE)
    assert torch.equal(load_weights(component, PLACE).shared.weight, original.shared.weight)


def test_shards_load_like_one_file(copied: Path) -> None:
    folder = copied / "transformer"
    tensors = load_file(folder / FILES["transformer"])
    (folder / FILES["transformer"]).unlink()
    stem, names = "diffusion_pytorch_model", sorted(tensors)
    shards = {f"{stem}-0000{i}-of-00002.safetensors": names[i - 1 :: 2] for i in (1, 2)}
    for file, own in shards.items():
        save_file({n: tensors[n] for n in own}, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, own in shards.items() for name in own}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index))
    sharded = load_weights(read_layout(copied).components["transformer"], PLACE).state_dict()
    whole = load_weights(read_layout(TINY_VIDEO).components["transformer"], PLACE).state_dict()
    assert all(torch.equal(sharded[name], whole[name]) for name in whole)
    (folder / next(iter(shards))).unlink()
    assert fault_of(copied).code == "checkpoint.missing-shard"


def test_every_dtype_as_stored_becomes_the_one_asked_for() -> None:
    network = load_weights(read_layout(TINY_VIDEO).components["transformer"], PLACE)
    assert {p.dtype for p in network.parameters()} == {torch.float32}
    assert not any(p.requires_grad for p in network.parameters())
    assert not network.training


def test_wan_keeps_its_norms_in_float32(wan_folder: Path) -> None:
    place = LoadTarget(Offload(torch.device("cpu")), torch.bfloat16)
    network = load_weights(read_layout(wan_folder).components["transformer"], place)
    assert network.dtype == torch.bfloat16
    assert network.scale_shift_table.dtype == torch.float32


class _Trace:
    """Unpickling this creates a file: proof that a pickle was opened."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def plant(folder: Path, trace: Path) -> None:
    """Pickles and modules in every component, named by every configuration."""
    code = f"from pathlib import Path\nPath({str(trace)!r}).touch()\nclass Own: pass\n"
    for part in (folder, *(p for p in folder.iterdir() if p.is_dir())):
        for name in ("pytorch_model.bin", "diffusion_pytorch_model.bin", "model.pt"):
            (part / name).write_bytes(pickle.dumps(_Trace(trace)))
        for name in ("own.py", "pipeline.py", "modeling_own.py"):
            (part / name).write_text(code)
        for path in part.glob("*config.json"):
            config = json.loads(path.read_text())
            autos = ("AutoConfig", "AutoModel", "AutoTokenizer")
            config["auto_map"] = dict.fromkeys(autos, "own.Own")
            path.write_text(json.dumps(config))


@pytest.mark.parametrize("family", ["hunyuan", "wan"])
def test_pickles_and_auto_map_are_never_executed(copied: Path, tmp_path: Path, family: str) -> None:
    folder = copied if family == "hunyuan" else write_wan(tmp_path / "wan")
    trace = tmp_path / "trace"
    plant(folder, trace)
    model = registry.load_video(ModelChoice(str(folder), device="cpu"))
    model.load_weights()
    model.prompts.encode('a "word"')
    assert not trace.exists()
    for path in folder.rglob("*.safetensors"):
        path.unlink()
        error = fault_of(folder)
        assert error.code == "checkpoint.pickle"
        break
    assert not trace.exists()


def test_a_component_of_the_checkpoints_own_module_is_never_imported(
    copied: Path, tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    plant(copied, trace)
    index = json.loads((copied / "model_index.json").read_text())
    index["guider"] = ["own", "Own"]
    (copied / "model_index.json").write_text(json.dumps(index))
    assert fault_of(copied).code == "checkpoint.component"
    assert not trace.exists()


def test_a_configuration_of_something_else_is_a_fault(copied: Path) -> None:
    path = copied / "transformer" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_layers": "two"}))
    assert fault_of(copied).code == "checkpoint.config"


def test_options_that_the_library_does_not_know_are_noted_and_not_logged(
    copied: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_wan(copied.parent / "wan") / "vae"
    config = json.loads((folder / "config.json").read_text())
    monkeypatch.setattr(logging.getLogger("diffusers"), "propagate", True)
    for values, is_said in (({"clip_output": False}, False), ({"clip_input": False}, True)):
        caplog.clear()
        (folder / "config.json").write_text(json.dumps(config | values))
        check_weights(read_layout(folder.parent).components["vae"])
        notes = " ".join(read_layout(folder.parent).notes)
        # Every released checkpoint of 5B has `clip_output`, which no version reads.
        assert ("vae/config.json has clip_input, unknown to diffusers" in notes) == is_said
        assert not [text for text in caplog.messages if "are not expected" in text]


@pytest.mark.parametrize("device", ["balanced", "cuda:3"])
def test_devices_that_cannot_be_had(device: str) -> None:
    if device != "balanced" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(MachineError):
        registry.load_video(ModelChoice("tiny-video", device=device))


def test_parameters_are_counted_without_loading() -> None:
    component = read_layout(TINY_VIDEO).components["vae"]
    loaded = load_weights(component, PLACE)
    assert check_weights(component) == sum(p.numel() for p in loaded.parameters())
