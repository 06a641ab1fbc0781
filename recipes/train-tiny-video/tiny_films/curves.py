"""Draw the loss curves of a run, if matplotlib is installed."""

import importlib.util
import json
from pathlib import Path

_PANELS = {
    "vae_log.jsonl": ("l1", "square"),
    "decoder_log.jsonl": ("l1", "square"),
    "flow_log.jsonl": ("flow",),
}


def write_curves(folder: Path, file: Path) -> None:
    """Draw the logs in `folder` into `file`; nothing without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.2))
    for axes, (name, keys) in zip(figure.subplots(1, 3), _PANELS.items(), strict=True):
        text = (folder / name).read_text(encoding="utf-8")
        lines = [json.loads(line) for line in text.splitlines()]
        for key in keys:
            points = [(line["elapsed_s"] / 60, line[key]) for line in lines if key in line]
            axes.plot(*zip(*points, strict=True), label=key)
        axes.set(title=name.removesuffix("_log.jsonl"), xlabel="minutes", yscale="log")
        axes.legend()
    figure.tight_layout()
    figure.savefig(file)
