"""A progress bar over a training stage, read from the log that the workers write."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def waiting(
    console: Console, stage: str, log: Path, minutes: float
) -> Iterator[Callable[[], None]]:
    """Show a bar during a stage; call the yielded function now and then."""
    columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(stage, total=minutes * 60)

        def tick() -> None:
            line = _last_line(log)
            losses = " ".join(f"{k} {v:.3f}" for k, v in line.items() if _is_loss(k))
            progress.update(
                bar,
                completed=line.get("elapsed_s", 0.0),
                description=f"{stage} step {line.get('step', 0):.0f} {losses}",
            )

        yield tick
        tick()


def _last_line(log: Path) -> dict[str, float]:
    """Return the newest line with a time; empty if there is none yet."""
    if not log.exists():
        return {}
    lines = (json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()[-3:])
    timed: list[dict[str, float]] = [line for line in lines if "elapsed_s" in line]
    return timed[-1] if timed else {}


def _is_loss(name: str) -> bool:
    return name == "l1" or name.endswith(("_flow", "_text"))
