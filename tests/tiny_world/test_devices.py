"""The recipe on a device: names, moving, and a stage's state from one run to the next."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tiny_world.device import fault, mixed, moved, worker_device
from tiny_world.run_state import RunState
from tiny_world.stages import WholeRun, finished_network, joint_stage, vae_stage
from tiny_world.train_joint import JointRun
from tiny_world.train_vae import VaeRun

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Data:
    tensor: torch.Tensor
    missing: torch.Tensor | None
    name: str


def test_a_dataclass_moves_with_its_tensors() -> None:
    data = Data(torch.zeros(2), None, "x")
    there = moved(data, torch.device("meta"))
    assert there.tensor.device.type == "meta"
    assert (there.missing, there.name) == (None, "x")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cpu", ""),
        ("cuda:99", "99 was asked for"),
        ("mps", "not supported"),
        ("tpu-x", "no device"),
    ],
)
def test_a_device_is_refused_before_anything_runs(name: str, message: str) -> None:
    found = fault(name)
    assert message in found
    assert bool(found) == bool(message)


def test_a_worker_on_the_cpu_computes_there() -> None:
    assert worker_device("cpu") == CPU
    with mixed(CPU):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


def _stepped(folder: Path, steps: int) -> tuple[RunState, torch.nn.Linear]:
    torch.manual_seed(0)
    module = torch.nn.Linear(2, 2)
    state = RunState(folder, "stage", {"module": module}, device=CPU)
    for _ in range(steps):
        with state.timed_step(), torch.no_grad():
            module.weight += 1
    return state, module


def test_a_stage_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    state, module = _stepped(tmp_path, 3)
    state.log({"loss": 0.5})
    state.save()
    again, restored = _stepped(tmp_path, 2)
    assert again.step == 5
    assert again.elapsed_s >= state.elapsed_s > 0
    assert torch.equal(restored.weight, module.weight + 2)
    assert not list(tmp_path.glob("*.part"))
    (line,) = (tmp_path / "stage_log.jsonl").read_text().splitlines()
    assert json.loads(line) == {"step": 3, "elapsed_s": round(state.elapsed_s, 1), "loss": 0.5}


def test_a_step_that_fails_is_not_counted(tmp_path: Path) -> None:
    state, _ = _stepped(tmp_path, 1)
    with pytest.raises(ZeroDivisionError), state.timed_step():
        _ = 1 / 0
    assert state.step == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")
def test_a_few_steps_of_both_stages_on_a_gpu_and_on_on_the_cpu(tmp_path: Path) -> None:
    for steps, device in ((2, "cuda"), (3, "cpu")):
        run = WholeRun(
            VaeRun(minutes=5, folder=tmp_path, max_steps=steps, device=device),
            JointRun(minutes=5, folder=tmp_path, max_steps=steps, device=device),
            workers=1,
            pairs=32,
            check_count=1,
        )
        vae_stage(run, lambda: None)
        joint_stage(run, lambda: None)
    network = finished_network(run)
    assert all(p.isfinite().all() for p in network.parameters())
    state = torch.load(tmp_path / "joint_state.pt", weights_only=True, map_location="cpu")
    assert state["step"] == 3
