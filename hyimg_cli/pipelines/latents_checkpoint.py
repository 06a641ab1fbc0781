"""Saved latents, from which a killed or failed job continues.

Latents are saved after the last denoise step, and every few steps if configured.

    OUT/latents/<custom_id>.safetensors     a line with a checksum, then the tensors

They are removed when the job's file and its line are on disk. Incomplete latents, or those of
another job, are ignored, and the job then starts at its first step.
"""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from hyimg_cli.files import LATENTS_BYTES, bytes_of, json_of, replace_file, storage_error, sync
from hyimg_cli.journal.kept_latents import seal, unseal

logger = logging.getLogger(__name__)
_LATENTS, _STATE = "latents", "state."


@dataclass(frozen=True)
class Kept:
    """Latents after the first `step` of `steps` denoise steps, and the denoiser's state there.

    After the last step it is only the state of the step cache. `warnings` and `notes` are about the
    job's inputs, for a job that only needs decoding. `text`: the text on which a picture is drawn,
    in JSON; None for a model without a text stage.
    """

    step: int
    steps: int
    latents: Tensor
    state: Mapping[str, Tensor]
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    text: Mapping[str, Any] | None = None

    @property
    def is_last(self) -> bool:
        """True if only the decode is left."""
        return self.step == self.steps


@dataclass
class LatentsCheckpoint:
    """The place for one job's latents; latents with a key other than `key` are ignored.

    With `every` 0 only the latents after the last step are kept. Existing latents are always used.
    `notes`: where the job continued; `warnings`: what went wrong. `holds_last`: only the decode is
    left. `is_stopping`: tells whether a stop was requested, so that this step may be the last.
    """

    path: Path
    key: str
    every: int
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    holds_last: bool = False
    is_stopping: Callable[[], bool] = lambda: False

    def is_due(self, step: int, steps: int) -> bool:
        """True if the latents after `step` steps must be kept."""
        return step == steps or (self.every > 0 and (step % self.every == 0 or self.is_stopping()))

    def keep(self, kept: Kept) -> None:
        """Replace the kept latents. A disk error only adds a warning, and logs it.

        Latents that are not finite are not kept, because every later attempt would fail on them.
        """
        tensors = {_LATENTS: kept.latents}
        tensors |= {_STATE + name: value for name, value in kept.state.items()}
        stored = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
        if not torch.isfinite(stored[_LATENTS]).all():
            return
        facts = {"key": self.key, "step": str(kept.step), "steps": str(kept.steps)}
        facts |= {"warnings": json.dumps(kept.warnings), "notes": json.dumps(kept.notes)}
        if kept.text is not None:
            facts["text"] = json.dumps(kept.text)
        data = safetensors.torch.save(stored, metadata=facts)
        try:
            if not (folder := self.path.parent).is_dir():
                folder.mkdir(exist_ok=True)
                sync(folder.parent)
            replace_file(self.path, seal(data))
        except OSError as error:
            refusal = storage_error(error, self.path.parent)
            text = f"the latents were not saved: {refusal.what}"
            if text not in self.warnings:
                self.warnings.append(text)
                # Logged at once too: the user may be able to free space before the decode ends.
                logger.warning("%s: %s", self.path.stem, text)
        else:
            self.holds_last = kept.is_last

    def found(self) -> Kept | None:
        """Return the latents kept by an earlier attempt at the job, or None."""
        kept, said = None, self.warnings
        try:
            kept = self._read(bytes_of(self.path, LATENTS_BYTES))
        except FileNotFoundError:
            return None
        except OSError as error:
            text = f"the saved latents cannot be read: {error.strerror}"
        except (ValueError, KeyError, TypeError, safetensors.SafetensorError):
            text = "ignored damaged latents; the job started at its first step"
        else:
            said, text = self.notes, "ignored saved latents of another job or other settings"
        if kept is not None:
            self.holds_last = kept.is_last
            text = f"resumed after denoise step {kept.step}, from saved latents"
            if kept.is_last:
                text = f"all {kept.steps} steps were denoised before; decoded from saved latents"
        if text not in said:
            said.append(text)
        return kept

    def _read(self, data: bytes) -> Kept | None:
        """Return the latents in the bytes; None for another job's. Raises for damaged ones."""
        payload, facts = unseal(data)
        if facts["key"] != self.key:
            return None
        tensors = safetensors.torch.load(payload)
        latents = tensors.pop(_LATENTS)
        state = {name.removeprefix(_STATE): value for name, value in tensors.items()}
        warnings, notes = (tuple(json_of(facts[name])) for name in ("warnings", "notes"))
        text = json_of(facts["text"]) if "text" in facts else None
        steps = int(facts["step"]), int(facts["steps"])
        return Kept(*steps, latents, state, warnings, notes, text)
