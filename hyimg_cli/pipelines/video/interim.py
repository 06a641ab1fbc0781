"""The latents of a video on its way, kept every few steps: a killed job goes on inside itself.

    OUT/latents/<custom_id>.safetensors     a line with a checksum, then the tensors

What is not whole, or is of another job, is left aside: the job then starts at its first step.
"""

import contextlib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import safetensors
import safetensors.torch
from torch import Tensor

from hyimg_cli.files import bytes_of, replace_file, storage_error

_FORMAT = b"hyimg-latents 1"
# The latents of a film of minutes, several times over.
_MAX_BYTES = 10_000_000_000
_LATENTS, _STATE = "latents", "state."


@dataclass(frozen=True)
class Halfway:
    """Latents behind the first `step` denoise steps, and what the denoiser remembers there."""

    step: int
    latents_BCFYX: Tensor
    state: Mapping[str, Tensor]


@dataclass
class Interim:
    """The place for one job's latents. `key` is the job's: latents of another key are not its own.

    With `every` 0 nothing is kept, but what is there is still taken up. `notes` say what went wrong
    and where the job went on.
    """

    path: Path
    key: str
    every: int
    _notes: list[str] = field(default_factory=list)

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(self._notes)

    def is_due(self, step: int, steps: int) -> bool:
        """Whether the latents behind `step` steps are to be kept; those of the last one are not."""
        return self.every > 0 and step % self.every == 0 and step < steps

    def keep(self, halfway: Halfway) -> None:
        """Replace what is kept. A disk that refuses costs the job nothing but a note."""
        tensors = {_LATENTS: halfway.latents_BCFYX}
        tensors |= {_STATE + name: value for name, value in halfway.state.items()}
        stored = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
        facts = {"key": self.key, "step": str(halfway.step)}
        data = safetensors.torch.save(stored, metadata=facts)
        try:
            self.path.parent.mkdir(exist_ok=True)
            replace_file(self.path, b"%s %s\n%s" % (_FORMAT, _checksum(data), data))
        except OSError as error:
            refusal = storage_error(error, self.path.parent)
            self._note(f"the latents were not kept: {refusal.what}")

    def found(self, steps: int) -> Halfway | None:
        """What an earlier run kept of a job of `steps` steps, or None."""
        try:
            data = bytes_of(self.path, _MAX_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._note(f"the latents kept on the way cannot be read: {error.strerror}")
            return None
        try:
            halfway = self._read(data)
        except (ValueError, KeyError, safetensors.SafetensorError):
            self._note("damaged latents were left aside; the job began at its first step")
            return None
        if halfway is None or not 0 < halfway.step < steps:
            return None
        self._note(f"went on behind denoise step {halfway.step}, from latents kept on the way")
        return halfway

    def discard(self) -> None:
        """Remove what is kept: the job is done."""
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)

    def _read(self, data: bytes) -> Halfway | None:
        """What the bytes hold; None for another job's. Raises for damaged ones."""
        header, _, payload = data.partition(b"\n")
        if header != b"%s %s" % (_FORMAT, _checksum(payload)):
            raise ValueError("the checksum is another")
        facts = _metadata(payload)
        if facts["key"] != self.key:
            return None
        tensors = safetensors.torch.load(payload)
        latents_BCFYX = tensors.pop(_LATENTS)
        state = {name.removeprefix(_STATE): value for name, value in tensors.items()}
        return Halfway(int(facts["step"]), latents_BCFYX, state)

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)


def _checksum(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode()


def _metadata(payload: bytes) -> dict[str, str]:
    """The metadata in a safetensors file's bytes: its header is JSON behind its own length."""
    length = int.from_bytes(payload[:8], "little")
    header = json.loads(payload[8 : 8 + length])
    return dict(header["__metadata__"])
