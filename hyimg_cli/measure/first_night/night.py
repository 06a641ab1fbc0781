"""A model's first night on photographs of the user, step by step.

    doctor ▸ pull ▸ plan ▸ fit, killed once ▸ resumed ▸ native, killed once ▸ resumed ▸ diffusers

Each step is a command as the user would type it, in its own process. A step that fails is recorded,
and the night goes on. What is recorded has no path, no name, no prompt and no pixel of the user's.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hyimg_cli import __version__
from hyimg_cli.errors import HyimgError
from hyimg_cli.files import json_of, replace_file
from hyimg_cli.loading import hub
from hyimg_cli.measure.first_night.commands import Ended, call, finished, killed
from hyimg_cli.measure.first_night.figures import machine, megapixels, resumed, run_figures, spread
from hyimg_cli.media.images import size_of
from hyimg_cli.models.releases import RELEASES
from hyimg_cli.report.page import render
from hyimg_cli.spec.units import counted, time_text

FORMAT = 1
RECORD, PAGE, LOG = "first-night.json", "first-night.html", "first-night.log"
_LOOP = "hyimg_cli.pipelines.library_loop"
# The two runs: the photograph fitted to the model's size, and its region at its own resolution.
_RUNS = ("fit", "native")


@dataclass
class Night:
    """What is measured: a `model`, given with the `flags` of generate, on `pictures`.

    `yes`: fetch the model without asking. `record`: what is known so far.
    """

    model: str
    flags: Sequence[str]
    pictures: Sequence[Path]
    prompt: str
    folder: Path
    device: str = "auto"
    yes: bool = False
    record: dict[str, Any] = field(default_factory=dict)

    def steps(self) -> Iterator[str]:
        """Work, and yield a sentence on each step as it ends."""
        self.folder.mkdir(parents=True, exist_ok=True)
        sizes = [size_of(str(path)) for path in self.pictures]
        self.record |= {
            "format": FORMAT,
            "hyimg": __version__,
            "model": self.model if self.model in RELEASES else "another checkpoint",
            "pictures": len(self.pictures),
            "megapixels": megapixels([(size.height, size.width) for size in sizes]),
        }
        steps: tuple[tuple[str, Callable[[], str]], ...] = (
            ("doctor", self._doctor),
            ("pull", self._pull),
            ("plan", self._plan),
            *((kind, lambda kind=kind: self._run(kind)) for kind in _RUNS),
            ("diffusers", self._loop),
        )
        for name, step in steps:
            began = time.monotonic()
            try:
                said = step()
            except HyimgError as error:
                self.record[name] = {"error": error.code}
                said = f"failed[{error.code}]: {error.what}"
            yield f"{name}: {said}, in {time_text(time.monotonic() - began)}"
            self.write()

    @property
    def is_whole(self) -> bool:
        """Return True if each step was done, and no result is missing."""
        runs = (self.record.get(kind, {}) for kind in _RUNS)
        return all(
            one.get("done") == len(self.pictures) and not one["outside_differing_pixels"]
            for one in runs
        )

    def write(self) -> None:
        """Write the record and its page, as far as the night is."""
        data = json.dumps(self.record, indent=1, ensure_ascii=False) + "\n"
        replace_file(self.folder / RECORD, data.encode())
        runs = [(kind, self.record[kind]) for kind in _RUNS if kind in self.record]
        page = render(
            "first-night.html",
            entry={"question": "Do photographs survive?", "verdict": self._verdict()},
            record=self.record,
            runs=runs,
            theirs={"compared": False} | self.record.get("diffusers", {}),
            file=RECORD,
        )
        replace_file(self.folder / PAGE, page.encode())

    def _verdict(self) -> dict[str, Any]:
        missing = [kind for kind in _RUNS if self.record.get(kind, {}).get("done") is None]
        name = "all results are here" if self.is_whole else "results are missing"
        reasons = [f"{kind} has not ended" for kind in missing]
        return {"exit_code": 0 if self.is_whole else 1, "name": name, "reasons": reasons}

    @property
    def _log(self) -> Path:
        return self.folder / LOG

    @property
    def _of_model(self) -> list[str]:
        return ["--model", self.model, "--device", self.device]

    def _doctor(self) -> str:
        ended = call("doctor", *self._of_model, "--json", log=self._log)
        facts = _last(ended)
        checks = {one["name"]: one["status"] for one in facts.get("checks", ())}
        self.record["doctor"] = ended.facts() | {"ready": facts.get("ready"), "checks": checks}
        return "ready" if facts.get("ready") else "not ready"

    def _pull(self) -> str:
        if not hub.is_id(self.model) or hub.cached(self.model) is not None:
            self.record["pull"] = {"was_here": True}
            return "the model is here"
        more = ["--yes"] if self.yes else []
        ended = call("pull", self.model, *more, log=self._log, shows=True)
        self.record["pull"] = ended.facts()
        return "fetched" if ended.code == 0 else "not fetched"

    def _plan(self) -> str:
        ended = call("plan", *self._generate("fit")[1:], "--json", log=self._log)
        facts = _last(ended)
        # By model, whose name stays here.
        per_model = {
            name: [*facts.get(name, {}).values()]
            for name in ("weight_bytes", "memory", "on_gpu_bytes", "auto_fit")
        }
        groups = [
            {name: one.get(name) for name in ("jobs", "denoise_steps", "memory", "cards")}
            for one in facts.get("groups", ())
        ]
        of_all = {"time": facts.get("time"), "groups": groups}
        self.record["plan"] = ended.facts() | of_all | per_model
        return "it fits" if ended.code == 0 else f"refused with exit code {ended.code}"

    def _run(self, kind: str) -> str:
        """Draw all pictures, killed after a third of them; then resume."""
        folder, command = self.folder / kind, self._generate(kind)
        after = max(1, len(self.pictures) // 3)
        had = len(finished(folder))
        kill = killed(
            *command, folder=folder, after=min(had + after, len(self.pictures)), log=self._log
        )
        ended = call(*command, "-q", log=self._log)
        self.record[kind] = {
            **ended.facts(),
            "seconds_before_the_kill": round(kill.seconds, 1),
            "resume": resumed(kill, folder),
            **run_figures(folder),
        }
        self.record |= machine(folder)
        own = self.record[kind]
        kept = own["resume"]
        said = f"{own['done']} of {own['jobs']} done"
        if kept["killed_after"]:
            said += (
                f", killed after {kept['killed_after']} and resumed: {kept['drawn_again']} again"
            )
        return f"{said}, {own['outside_differing_pixels']} pixels differ outside the edits"

    def _generate(self, kind: str) -> list[str]:
        pictures = [str(path) for path in self.pictures]
        run = ["generate", *pictures, "--prompt", self.prompt, "-o", str(self.folder / kind)]
        return [*run, "--keep-outside", "--region-size", kind, *self.flags]

    def _loop(self) -> str:
        """Edit the same pictures by a plain loop of diffusers, if that has the model."""
        steps = self.record.get("fit", {}).get("steps") or [0]
        place = Path(self.model) if Path(self.model).is_dir() else hub.cached(self.model)
        if place is None or not (place / "model_index.json").is_file():
            self.record["diffusers"] = {"compared": False}
            return "not compared, because diffusers has no such pipeline"
        asked = {
            "model": str(place.resolve()),
            "pictures": [str(path.resolve()) for path in self.pictures],
            "prompt": self.prompt,
            "steps": steps[-1],
            "seed": 0,
            "device": self.device,
            "out": str((self.folder / "diffusers").resolve()),
        }
        began = time.monotonic()
        with self._log.open("ab") as said:
            done = subprocess.run(
                [sys.executable, "-m", _LOOP],
                input=json.dumps(asked).encode(),
                stdout=subprocess.PIPE,
                stderr=said,
                check=False,
            )
        lines = done.stdout.splitlines()
        found = json_of(lines[-1]) if done.returncode == 0 and lines else {}
        self.record["diffusers"] = {
            "compared": bool(found.get("seconds")),
            "exit_code": done.returncode,
            "wall_s": round(time.monotonic() - began, 1),
            "seconds_a_picture": spread(found.pop("seconds", ())),
            **found,
        }
        if done.returncode:
            return f"the loop ended with exit code {done.returncode}; see {self._log}"
        return f"{counted(len(self.pictures), 'picture')} by a plain loop"


def _last(ended: Ended) -> Mapping[str, Any]:
    """Return the last JSON line of a command; empty without one."""
    return ended.lines[-1] if ended.lines else {}
