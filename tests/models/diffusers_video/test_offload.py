"""Networks that take turns on the device: the same bits, and never two of them there."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import diagonal
from fake_gpu.device import fake_gpu
from torch import Tensor, nn

from hyimg_cli.kernels.offload import Offload
from hyimg_cli.models import registry
from hyimg_cli.models.diffusers_video import weights
from hyimg_cli.models.diffusers_video.layout import Component, read_layout
from hyimg_cli.models.diffusers_video.model import DiffusersVideo
from hyimg_cli.models.diffusers_video.weights import LoadTarget, load_weights
from hyimg_cli.models.latent_video import LatentVideoModel
from hyimg_cli.settings.run import ModelChoice, Offloading
from hyimg_cli.spec.job import VideoJob

CPU = torch.device("cpu")
Draw = Callable[[DiffusersVideo, VideoJob], Tensor]


class Watched:
    """Where every network's weights are, seen at each of its forwards: `away` from the tensors that
    it was read into, or at home.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.homes: dict[str, tuple[nn.Module, list[int]]] = {}
        self.seen: list[str] = []
        original = weights.load_weights

        def watched(component: Component, place: LoadTarget, **options: Any) -> Any:
            module = original(component, place, **options)
            if place.cpu_offload == "none":
                return module
            tensors = (*module.parameters(), *module.buffers())
            self.homes[component.name] = module, [t.data_ptr() for t in tensors]
            for part in module.modules():
                part.register_forward_pre_hook(lambda *_: self._at_work(component.name))
            return module

        for name in ("encoders", "networks", "weights"):
            monkeypatch.setattr(f"hyimg_cli.models.diffusers_video.{name}.load_weights", watched)

    def away(self) -> list[str]:
        return [name for name in self.homes if self._is_away(name)]

    def _at_work(self, name: str) -> None:
        if not self.seen or self.seen[-1] != name:
            self.seen.append(name)
            assert self.away() == [name], "the one at work, and no other"

    def _is_away(self, name: str) -> bool:
        module, home = self.homes[name]
        tensors = (*module.parameters(), *module.buffers())
        moved = {t.data_ptr() != p for t, p in zip(tensors, home, strict=True) if t.numel()}
        assert len(moved) == 1, "a network is on one side as a whole"
        return moved.pop()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def offloaded(folder: Path, how: Offloading = "model", **more: Any) -> DiffusersVideo:
    choice = ModelChoice(str(folder), dtype="float32", device="cpu", cpu_offload=how, **more)
    return registry.load_video(choice)


@pytest.mark.parametrize(("name", "is_tiled"), diagonal(["hunyuan", "wan", "wan22"], [True, False]))
def test_the_same_frames_with_one_network_at_a_time(
    models: dict[str, DiffusersVideo],
    folders: dict[str, Path],
    job: VideoJob,
    draw: Draw,
    watched: Watched,
    name: str,
    is_tiled: bool,
) -> None:
    job = replace(job, num_inference_steps=8)
    latents = draw(models[name], job)
    models[name].tiles = "own" if is_tiled else "auto"
    expected = [piece.tobytes() for piece in models[name].decode_latents(latents)]
    models[name].tiles = "own"
    model = offloaded(folders[name], vae_use_tiling=is_tiled)
    model.load_weights()
    assert watched.away() == [], "nothing is brought before its work"
    rounds = 1 if is_tiled else 2
    for _ in range(rounds):
        found = draw(model, job)
        assert torch.equal(found, latents)
        assert [piece.tobytes() for piece in model.decode_latents(found)] == expected
    encoders = ["text_encoder", "text_encoder_2"] if name == "hunyuan" else ["text_encoder"]
    networks = ["transformer", "transformer_2"] if name == "wan22" else ["transformer"]
    texts = len(model.texts(job))
    turn = [*encoders, *networks, "vae"]
    if name == "hunyuan":  # the first text quotes, the second does not
        assert texts == 2
        turn = ["text_encoder", "text_encoder_2", "text_encoder", *networks, "vae"]
    assert watched.seen == turn * rounds
    model.prompts.release()
    assert watched.away() == []


def test_a_network_that_does_not_fit_is_left_whole(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    network = load_weights(read_layout(folders["wan"]).components["transformer"], _place())
    before = {name: t.data_ptr() for name, t in network.state_dict().items()}
    offload, copies = Offload(CPU), iter(range(5))
    offload.keep(network)
    original = Tensor.to

    def short(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
        if next(copies, None) is None:
            raise torch.OutOfMemoryError("no room")
        return original(tensor, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "to", short)
        with pytest.raises(torch.OutOfMemoryError):
            offload.onload(network)
    assert {name: t.data_ptr() for name, t in network.state_dict().items()} == before
    offload.onload(network)
    assert all(t.data_ptr() != before[name] for name, t in network.state_dict().items())


def test_a_transformer_that_leaves_the_gpu_comes_back_for_its_next_forward() -> None:
    """As where a decode runs out of memory without any offload; it then goes without a copy."""
    pytest.importorskip("triton")
    with fake_gpu() as gpu:
        place = LoadTarget(Offload(torch.device("cuda:0")), torch.float32)
        network, beside = (nn.Linear(8, 8, device=place.device) for _ in range(2))
        model: Any = SimpleNamespace(device=place.device, place=place, networks=[network])
        both, one = gpu.live, gpu.live // 2
        for fetched in (one, one):
            place.offload.onload(network)
            assert (gpu.live, gpu.sent) == (both, gpu.fetched)
            LatentVideoModel.unload_transformer(model)
            assert (gpu.live, gpu.fetched) == (one, fetched)
            assert (network.weight.device.type, beside.weight.device.type) == ("cpu", "cuda")
            place.offload.onload(beside)
            assert network.weight.device.type == "cpu", "the other one was never kept"


def _place() -> LoadTarget:
    return LoadTarget(Offload(CPU), torch.float32, "model")
