"""An earlier `bench.json` as a gate: no slower than it was, and no worse a verdict."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hyimg_cli.bench.record import FORMAT
from hyimg_cli.errors import UsageError

_ORDER = ("identical", "equal", "within floor", "not explained", "differs")


def read_share(text: str) -> float:
    """`5%` or `0.05` as 0.05. Raises UsageError."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(%?)\s*", text)
    if match is None:
        what = f"--max-regress {text!r} is no share"
        raise UsageError(what, hint="for example --max-regress 5%", code="bench.share")
    return float(match[1]) / (100 if match[2] else 1)


def read_baseline(path: Path) -> dict[str, Any]:
    """An earlier bench.json. Raises UsageError where it is none."""
    try:
        entry = json.loads(path.read_text(encoding="utf-8"))
        if entry["format"] == FORMAT and entry["timings"] and entry["verdict"]["name"] in _ORDER:
            return dict(entry)
        what = "its format is another"
    except OSError as error:
        what = f"it cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError):
        what = "it is no bench.json"
    hint = "give the bench.json of an earlier run"
    raise UsageError(what, where=str(path), hint=hint, code="bench.baseline")


def regressions(now: Mapping[str, Any], before: Mapping[str, Any], most: float) -> Iterator[str]:
    """What has become worse by more than the share `most`, as sentences.

    Seconds are compared on the same hardware only; the speed-up of A over B, which was measured in
    turns, always. An interval that reaches the limit is no regression.
    """
    if now["name"] != before["name"]:
        yield f"the baseline is of {before['name']}, this is {now['name']}"
        return
    verdicts = now["verdict"]["name"], before["verdict"]["name"]
    if _ORDER.index(verdicts[0]) > _ORDER.index(verdicts[1]):
        yield f"the verdict was {verdicts[1]}, now it is {verdicts[0]}"
    is_same_machine = now["environment"]["hardware"] == before["environment"]["hardware"]
    earlier = {one["steps"]: one for one in before["timings"]}
    for one in now["timings"]:
        then = earlier.get(one["steps"])
        if then is None:
            yield f"the baseline has no run of {one['steps']} steps"
            continue
        limit = then["speedup"]["low"] * (1 - most)
        if one["speedup"]["high"] < limit:
            yield _sentence(one["steps"], "speed-up", then["speedup"], one["speedup"], most)
        # The fastest run is the one that other programs disturbed least.
        walls = then["a"]["wall_s"], one["a"]["wall_s"]
        if is_same_machine and walls[1]["min"] > walls[0]["median"] * (1 + most):
            yield _sentence(one["steps"], "seconds a run", *walls, most)


def _sentence(
    steps: int, what: str, then: Mapping[str, float], now: Mapping[str, float], most: float
) -> str:
    change = f"from {then['median']:.3f} to {now['median']:.3f}"
    return f"{steps} steps: {what} went {change}, more than {most:.0%}"
