"""The state of a training stage: its parts' weights, its step, its clock and its log.

One file a stage, `<stage>_state.pt`, is written under another name every minute and then renamed.
`<stage>_log.jsonl` gets one line at a time. Worker 0 writes, and all workers read.
"""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from tiny_world.workers import agreed, rank

_SAVE_EVERY_S = 60.0
_LOG_EVERY = 20


class Part(Protocol):
    """A module, an optimiser, an average."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


class RunState:
    """Step and clock of one stage in one worker.

    Training time counts over all resumed runs.
    """

    def __init__(
        self, folder: Path, stage: str, parts: Mapping[str, Part], *, device: torch.device
    ) -> None:
        """Restore an earlier run's state; `parts` have names that never change."""
        self.step, self.elapsed_s = 0, 0.0
        self._parts = parts
        self._file, self._log = folder / f"{stage}_state.pt", folder / f"{stage}_log.jsonl"
        self._saved_at = time.monotonic()
        if self._file.exists():
            self._restore(device)

    @contextmanager
    def timed_step(self) -> Iterator[None]:
        """Train one step; every worker's clock then equals worker 0's."""
        began = time.monotonic()
        yield
        self.step += 1
        self.elapsed_s = agreed(self.elapsed_s + time.monotonic() - began)

    @property
    def is_log_due(self) -> bool:
        return self.step % _LOG_EVERY == 0

    def log(self, facts: Mapping[str, float]) -> None:
        """Log a line with the step and the clock."""
        self.note({"step": self.step, "elapsed_s": round(self.elapsed_s, 1)} | dict(facts))

    def note(self, line: Mapping[str, float]) -> None:
        """Log a line unchanged."""
        if rank() == 0:
            with self._log.open("a", encoding="utf-8") as log:
                log.write(json.dumps(dict(line)) + "\n")

    def save_if_due(self) -> None:
        if time.monotonic() - self._saved_at > _SAVE_EVERY_S:
            self.save()

    def save(self) -> None:
        """Save everything to the state file; after a kill it is the old or the new one."""
        self._saved_at = time.monotonic()
        if rank() != 0:
            return
        state: dict[str, Any] = {name: part.state_dict() for name, part in self._parts.items()}
        part_file = self._file.with_suffix(".part")
        torch.save(state | {"step": self.step, "elapsed_s": self.elapsed_s}, part_file)
        part_file.replace(self._file)

    def _restore(self, device: torch.device) -> None:
        state = torch.load(self._file, weights_only=True, map_location=device)
        for name, part in self._parts.items():
            part.load_state_dict(state[name])
        self.step, self.elapsed_s = state["step"], state["elapsed_s"]
