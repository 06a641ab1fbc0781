"""Draw the loss curves of a run, if matplotlib is installed."""

import importlib.util
import json
from pathlib import Path

_PANELS = {
    "vae_log.jsonl": ("l1", "kl"),
    "joint_log.jsonl": ("new_flow", "edit_flow", "new_text", "edit_text"),
}


def write_curves(folder: Path) -> None:
    """Write `curves.png` from the logs in `folder`; nothing without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4))
    for axes, (name, keys) in zip(figure.subplots(1, 2), _PANELS.items(), strict=True):
        lines = _lines(folder / name)
        for key in keys:
            points = [(line["elapsed_s"] / 60, line[key]) for line in lines if key in line]
            if points:
                axes.plot(*zip(*points, strict=True), label=key)
        axes.set(title=name.removesuffix("_log.jsonl"), xlabel="minutes", yscale="log")
        axes.legend()
    figure.tight_layout()
    figure.savefig(folder / "curves.png")


def _lines(log: Path) -> list[dict[str, float]]:
    if not log.exists():
        return []
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
