"""Compare with an earlier `bench.json`: no slower, and no worse a verdict."""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hyimg_cli.errors import UsageError
from hyimg_cli.files import TABLE_BYTES, json_of, text_of
from hyimg_cli.measure.bench.record import FORMAT

_RANK = {"identical": 0, "equal": 1, "within floor": 2, "as declared": 3}
_RANK |= {"not explained": 4, "differs": 4}


def read_share(text: str) -> float:
    """Return `5%` or `0.05` as 0.05. Raises UsageError."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(%?)\s*", text)
    if match is None:
        what = f"--max-regress {text!r} is not a share"
        raise UsageError(what, hint="for example --max-regress 5%", code="bench.share")
    return float(match[1]) / (100 if match[2] else 1)


def read_baseline(path: Path) -> dict[str, Any]:
    """Read an earlier bench.json. Raises UsageError if it is not one."""
    try:
        entry = json_of(text_of(path, TABLE_BYTES, or_stream=True))
        if entry["format"] == FORMAT and entry["timings"] and entry["verdict"]["name"] in _RANK:
            return dict(entry)
        what = "its format is not supported"
    except OSError as error:
        what = f"it cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError):
        what = "not a bench.json"
    hint = "give the bench.json of an earlier run"
    raise UsageError(what, where=path, hint=hint, code="bench.baseline")


def regressions(now: Mapping[str, Any], before: Mapping[str, Any], most: float) -> Iterator[str]:
    """Yield a sentence for everything that has become worse by more than the share `most`.

    A baseline of other jobs, another model or other settings is a regression too. Seconds are
    compared on the same hardware only, the speed-up of A over B always, because both ran in turn.
    Differences within the spread of the new runs do not count.
    """
    other = [what for what, of in _COMPARED.items() if of(now) != of(before)]
    if other:
        yield f"cannot compare: the baseline has another {' and another '.join(other)}"
        return
    verdicts = now["verdict"]["name"], before["verdict"]["name"]
    if _RANK[verdicts[0]] > _RANK[verdicts[1]]:
        yield f"the verdict was {verdicts[1]}, now it is {verdicts[0]}"
    earlier, newer = ({_timed(one): one for one in of["timings"]} for of in (before, now))
    for what in earlier.keys() ^ newer.keys():
        yield f"{what}: timed in only one of the two"
    for what in earlier.keys() & newer.keys():
        own, then = newer[what], earlier[what]
        up = own["speedup"], then["speedup"]
        if up[0]["median"] < up[1]["median"] * (1 - most) and up[0]["high"] < up[1]["median"]:
            yield _sentence(what, "speed-up", up[1], up[0], most)
        walls = own["a"]["wall_s"], then["a"]["wall_s"]
        is_longer = walls[0]["median"] > walls[1]["median"] * (1 + most)
        if is_same_machine(now, before) and is_longer and walls[0]["min"] > walls[1]["median"]:
            yield _sentence(what, "seconds a run", walls[1], walls[0], most)


def is_same_machine(now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Return whether the seconds of both can be compared."""
    return bool(now["environment"]["hardware"] == before["environment"]["hardware"])


_COMPARED: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "comparison": lambda entry: entry["name"],
    "model": lambda entry: entry["environment"]["model_fingerprint"],
    "set of jobs": lambda entry: entry["jobs"],
    "setting": lambda entry: entry["common"],
}


def _timed(one: Mapping[str, Any]) -> str:
    """Name a timing."""
    return f"{' vs '.join(one['pair'])}, {one['steps']} steps"


def _sentence(
    timed: str, what: str, then: Mapping[str, float], now: Mapping[str, float], most: float
) -> str:
    change = f"from {then['median']:.3f} to {now['median']:.3f}"
    return f"{timed}: {what} went {change}, more than {most:.0%}"
