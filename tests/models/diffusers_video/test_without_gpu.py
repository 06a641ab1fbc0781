"""The loop on a GPU that is not there: fake tensors know their device and have no values.

An operation that needs a value raises, and every operation that touches a tensor of the CPU is
seen: a copy between the two, whichever way, would wait for the GPU.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import thorough_but
from models.diffusers_video.stock import take_stock_forward
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hyimg_cli.kernels.offload import Offload
from hyimg_cli.models import registry
from hyimg_cli.models.diffusers_video.layout import Component
from hyimg_cli.models.diffusers_video.model import DiffusersVideo
from hyimg_cli.models.diffusers_video.scheduling import JobScheduler
from hyimg_cli.models.diffusers_video.weights import LoadTarget, component_class
from hyimg_cli.settings.run import ModelChoice
from hyimg_cli.spec.job import VideoJob

GPU = torch.device("cuda")


class OnTheHost(TorchDispatchMode):
    """Names the operations that read or write a tensor of the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, op: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs, result))
        if any(isinstance(leaf, Tensor) and leaf.device.type == "cpu" for leaf in leaves):
            self.seen.append(str(op))
        return result


def fake_network(model: DiffusersVideo, component: Component) -> Any:
    with GPU:
        network = component_class(component).from_config(component.config().values)
    for module in network.modules():  # some tables are made on the CPU and moved with the weights
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(GPU)
    model.prepare(network)
    return network.requires_grad_(False).eval()


def prepared_schedule(
    model: DiffusersVideo, job: VideoJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The family gets a schedule whose values were computed on the host, as they always are, and
    that only then moves to the device.
    """
    schedule = JobScheduler(
        model.layout.components["scheduler"],
        job,
        torch.device("cpu"),
        is_linear=model.card.family == "hunyuan_video15",
    )

    def moved(
        _component: Component, _job: VideoJob, device: torch.device, **_: Any
    ) -> JobScheduler:
        schedule.move_to(device)
        return schedule

    monkeypatch.setattr("hyimg_cli.models.diffusers_video.model.JobScheduler", moved)


@pytest.mark.parametrize("name", thorough_but(["hunyuan"], ["hunyuan", "wan", "wan22"]))
def test_the_loop_never_meets_the_host(
    folders: dict[str, Path], job: VideoJob, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, watch = on_fake_gpu(folders[name], job, monkeypatch)
    assert watch.seen == []
    assert model.device == GPU


def test_the_stock_forward_does(
    folders: dict[str, Path], job: VideoJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataDependentOutputException):
        on_fake_gpu(folders["hunyuan"], job, monkeypatch, is_stock=True)


def on_fake_gpu(
    folder: Path, job: VideoJob, monkeypatch: pytest.MonkeyPatch, *, is_stock: bool = False
) -> tuple[DiffusersVideo, OnTheHost]:
    """A loop of six steps, the operations of all but the first watched."""
    model = registry.load_video(ModelChoice(str(folder), device="cpu"))
    if is_stock:
        take_stock_forward(model)
    job = replace(job, num_inference_steps=6, flow_shift=3.0)
    embeddings = {text: model.prompts.encode(text) for text in model.texts(job)}
    prepared_schedule(model, job, monkeypatch)
    watch = OnTheHost()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.place = LoadTarget(Offload(GPU), torch.float32)
        model.networks = [
            fake_network(model, model.layout.components[name])
            for name in ("transformer", "transformer_2")
            if name in model.layout.components
        ]
        denoiser = model.denoiser(job, embeddings)
        # The first step moves the job's constants to the device, once.
        latents = denoiser.step(0, denoiser.latents.to(GPU))
        with watch:
            for index in range(1, denoiser.steps):
                latents = denoiser.step(index, latents)
    assert latents.device.type == "cuda"
    return model, watch
