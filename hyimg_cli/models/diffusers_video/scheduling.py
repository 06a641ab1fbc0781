"""A job's scheduler: diffusers' class, stepped without reads on the host, resumable."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hyimg_cli.models.diffusers_video.layout import Component, shift_name
from hyimg_cli.models.diffusers_video.weights import configured
from hyimg_cli.spec.job import VideoJob

# The attributes that `step` changes in either class. A test compares every attribute of a restored
# scheduler with one that was never interrupted.
_REMEMBERED = (
    "_step_index",
    "lower_order_nums",
    "this_order",
    "last_sample",
    "model_outputs",
    "timestep_list",
)


class JobScheduler:
    """The denoise steps of one job: `timesteps` on the device, `levels` the same on the host."""

    def __init__(
        self, component: Component, job: VideoJob, device: torch.device, *, is_linear: bool
    ) -> None:
        """Make the scheduler's steps; `is_linear` spaces sigmas in HunyuanVideo-1.5's straight
        line.

        Otherwise the class decides. `euler` takes Euler steps along that line, to which models are
        distilled, with any class.
        """
        is_euler, steps = job.scheduler == "euler", job.num_inference_steps
        if is_euler:
            count = component.config().count("num_train_timesteps", 1000)
            self.scheduler: Any = FlowMatchEulerDiscreteScheduler(count, job.flow_shift)
        else:
            self.scheduler = configured(component, **{shift_name(component): job.flow_shift})
        scheduler = self.scheduler
        if is_linear or is_euler:
            scheduler.set_timesteps(sigmas=np.linspace(1.0, 0.0, steps + 1)[:-1])
        else:
            scheduler.set_timesteps(steps)
        # Without a begin index, the first step looks up its timestep on the host.
        scheduler.set_begin_index(0)
        self.levels: list[float] = scheduler.timesteps.tolist()
        self.sigmas: list[float] = scheduler.sigmas.tolist()
        self.move_to(device)

    def move_to(self, device: torch.device) -> None:
        """Move everything that a step reads to the device once, so that no step waits for it."""
        scheduler: Any = self.scheduler
        scheduler.sigmas = scheduler.sigmas.to(device)
        scheduler.timesteps = scheduler.timesteps.to(device)
        self.timesteps: Tensor = scheduler.timesteps
        self.device = device

    def advance(self, index: int, velocity: Tensor, latents: Tensor) -> Tensor:
        """Return the latents after step `index`."""
        with _UncheckedSolve():
            moved: tuple[Tensor] = self.scheduler.step(
                velocity, self.timesteps[index], latents, return_dict=False
            )
        return moved[0]

    def state(self) -> dict[str, Tensor]:
        """Return all state of the scheduler, as copies on the CPU."""
        kept: dict[str, Tensor] = {}
        for name in _REMEMBERED:
            value: Any = getattr(self.scheduler, name, None)
            is_list = isinstance(value, list)
            parts = {f"{name}.{i}": v for i, v in enumerate(value)} if is_list else {name: value}
            for key, part in parts.items():
                if isinstance(part, Tensor):
                    kept[key] = part.detach().cpu().clone()
                elif part is not None:
                    kept[key] = torch.tensor(part, dtype=torch.int32)
        return kept

    def restore(self, index: int, state: Mapping[str, Tensor]) -> None:
        """Restore `state` from after step `index - 1`.

        Raises ValueError for another step's state.
        """
        if "_step_index" not in state or int(state["_step_index"]) != index:
            raise ValueError(f"not the state of the scheduler at step {index}")
        for name in _REMEMBERED:
            value = getattr(self.scheduler, name, None)
            if isinstance(value, list):
                parts = [self._back(state.get(f"{name}.{i}")) for i in range(len(value))]
                setattr(self.scheduler, name, parts)
            elif name in state:
                setattr(self.scheduler, name, self._back(state[name]))

    def _back(self, kept: Tensor | None) -> Tensor | int | None:
        """Return a counter or a tensor as the scheduler holds it; counters are saved as scalar
        int32.
        """
        if kept is None:
            return None
        return int(kept) if kept.dtype == torch.int32 else kept.to(self.device, copy=True)


class _UncheckedSolve(TorchFunctionMode):
    """`linalg.solve` as `solve_ex`, the same kernel without reading its error code on the host.

    UniPC's corrector solves a 2 x 2 system at each step; the system is never singular.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.linalg.solve:
            return torch.linalg.solve_ex(*args, **(kwargs or {})).result
        return func(*args, **(kwargs or {}))
