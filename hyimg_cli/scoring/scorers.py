"""What a scorer is, by its name on the command line; all of it is known without running any code.

    [NAME=]TARGET       TARGET: outside, text, judge:MODEL; an entry point of the group
                        hyimg.scorers; MODULE:FUNCTION; or FILE.py:FUNCTION

A module declares its scorers in a literal, which is read from its source:

    SCORERS = {"clip": {"version": "1", "range": [0, 1], "needs": ["prompt", "result"]}}
"""

import ast
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hyimg_cli.errors import UsageError
from hyimg_cli.files import SETTINGS_BYTES, bytes_of, text_of
from hyimg_cli.settings.run import CandidatesConfig
from hyimg_cli.settings.values import nearest, shown
from hyimg_cli.spec import digest

ENTRY_POINTS = "hyimg.scorers"
RUBRIC = Path(__file__).with_name("rubric.txt")
# What a scorer may ask for: a case without it is not shown to it.
NEEDS = frozenset({"prompt", "source", "result", "mask", "text"})
_BUILT_IN = {
    "outside": ("hyimg_cli.measure.scorers", "outside"),
    "text": ("hyimg_cli.measure.scorers", "text"),
    "judge": ("hyimg_cli.scoring.judge", "judge"),
}
_NAME = re.compile(r"[A-Za-z0-9_-]{1,40}")
_SHAPE = "SCORERS must be a literal such as {'NAME': {'version': '1', 'range': [0, 1]}}"


@dataclass(frozen=True)
class Declaration:
    """What a scorer says of itself. `range`: bounds of its values, None where there are none;
    `needs`: of `NEEDS`, what a case must have.
    """

    version: str = ""
    weights: str = ""
    licence: str = ""
    needs: tuple[str, ...] = ("result",)
    range: tuple[float, float] | None = None
    higher_is_better: bool = True

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> "Declaration":
        """A declaration of anybody's. Raises ValueError."""
        if unknown := given.keys() - {*cls.__dataclass_fields__, "name"}:
            raise ValueError(f"{sorted(unknown)[0]} is not known")
        bounds, needs = given.get("range"), tuple(given.get("needs", cls.needs))
        if bounds is not None and not (len(bounds) == 2 and float(bounds[0]) < float(bounds[1])):
            raise ValueError(f"range is {shown(bounds)}")
        if not needs or not NEEDS.issuperset(needs):
            raise ValueError(f"needs is {shown(list(needs))}; known: {', '.join(sorted(NEEDS))}")
        return cls(
            str(given.get("version", "")),
            str(given.get("weights", "")),
            str(given.get("licence", "")),
            needs=needs,
            range=None if bounds is None else (float(bounds[0]), float(bounds[1])),
            higher_is_better=bool(given.get("higher_is_better", True)),
        )


@dataclass(frozen=True)
class Scorer:
    """A scorer to be run: `function` of `module`, a dotted name or a file, by the interpreter
    `python`. `source`: digest of the module's own file, empty for those that ship with hyimg.
    `facts`: options that decide its scores, as far as they are no secret nor a place.
    """

    name: str
    module: str
    function: str
    python: str
    declaration: Declaration
    source: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def declared(self) -> dict[str, Any]:
        """What it says of itself, as JSON."""
        said = asdict(self.declaration) | {"needs": list(self.declaration.needs)}
        bounds = self.declaration.range
        return {"name": self.name} | said | {"range": bounds and list(bounds)} | dict(self.facts)

    @property
    def recorded(self) -> dict[str, Any]:
        """Its line in scores.jsonl."""
        return {"scorer": self.name, "identity": self.identity, "declared": self.declared}

    @cached_property
    def identity(self) -> str:
        """A digest of all that decides its scores and is known before it runs."""
        return digest.of_json([self.declared, self.function, self.source])


def scorers_of(config: CandidatesConfig) -> list[Scorer]:
    """The scorers that a run's settings name, in order. Raises UsageError."""
    pythons = dict(_pair(text, "--score-python") for text in config.score_python)
    found = [_scorer(spec, pythons, config) for spec in config.score]
    names = [one.name for one in found]
    if twice := {name for name in names if names.count(name) > 1}:
        what = f"two scorers are called {shown(min(twice))}"
        raise UsageError(what, hint="name one: --score NAME=TARGET", code="usage.scorer")
    if unused := pythons.keys() - set(names):
        what = f"--score-python names {shown(min(unused))}, and --score does not"
        raise UsageError(what, hint=f"scorers: {', '.join(names) or 'none'}", code="usage.scorer")
    return found


def _scorer(spec: str, pythons: Mapping[str, str], config: CandidatesConfig) -> Scorer:
    given, target = _pair(spec, "--score") if "=" in spec else ("", spec)
    head, _, tail = target.rpartition(":")
    if target in ("outside", "text") or head == "judge":
        return _built_in(given, target, config)
    if target == "judge":
        hint = "for example --score judge:qwen3-vl --judge-url http://localhost:8000/v1"
        raise UsageError("judge needs the name of its model", where=spec, hint=hint)
    python = pythons.get(given or tail or target, sys.executable)
    places = [os.getcwd(), *(sys.path[1:] if python == sys.executable else _site_packages(python))]
    if not head:
        points = metadata.distributions(path=places)
        every = (one for found in points for one in found.entry_points)
        known = {one.name: one.value for one in every if one.group == ENTRY_POINTS}
        if target not in known:
            close = nearest(target, [*_BUILT_IN, *known])
            hint = f"did you mean {close}?" if close else "write MODULE:FUNCTION or FILE.py:NAME"
            what = f"{shown(target)} is not a scorer"
            raise UsageError(what, where="--score", hint=hint, code="usage.scorer")
        given, (head, _, tail) = given or target, known[target].rpartition(":")
    file = _file_of(head, places)
    if file is None:
        what = f"the module of {shown(spec)} was not found"
        hint = "install it, run from its folder, or write the path of its file: FILE.py:FUNCTION"
        raise UsageError(what, where="--score", hint=hint, code="usage.scorer")
    module = str(file) if head.endswith(".py") else head
    declaration = _declaration(file, tail)
    source = digest.of_bytes(bytes_of(file, SETTINGS_BYTES))
    return Scorer(_name(given or tail), module, tail, python, declaration, source)


def _built_in(given: str, target: str, config: CandidatesConfig) -> Scorer:
    kind, _, model = target.partition(":")
    module, function = _BUILT_IN[kind]
    place = Path(__file__).parents[2].joinpath(*module.split(".")).with_suffix(".py")
    declaration, facts = _declaration(place, function), dict[str, str]()
    options: dict[str, Any] = {}
    if kind == "judge":
        if config.judge_url is None:
            hint = "--judge-url http://localhost:8000/v1: an OpenAI-compatible endpoint"
            raise UsageError("the judge has no address", hint=hint, code="usage.judge")
        address = urlsplit(config.judge_url)
        if address.scheme not in ("http", "https") or not address.hostname or address.username:
            what = f"{shown(config.judge_url)} is not the address of an endpoint"
            hint = "write http:// or https://, host and path; the key is a variable's"
            raise UsageError(what, where="--judge-url", hint=hint, code="usage.judge")
        try:
            rubric = text_of(Path(config.rubric or RUBRIC), SETTINGS_BYTES)
        except OSError as error:
            what = f"the rubric cannot be read: {error.strerror}"
            raise UsageError(what, where="--rubric", code="usage.rubric") from None
        facts = {"weights": model, "rubric_sha256": digest.of_bytes(rubric.encode())}
        options = {"url": config.judge_url, "model": model, "rubric": rubric}
        options |= {"limit_s": config.score_timeout}
    own = _name(given or kind)
    return Scorer(own, module, function, sys.executable, declaration, "", facts, options)


def _declaration(file: Path, name: str) -> Declaration:
    """A scorer's declaration in the source of its module. Raises UsageError."""
    try:
        tree = ast.parse(text_of(file, SETTINGS_BYTES))
        named = (one for one in tree.body if isinstance(one, ast.Assign))
        values = [one.value for one in named if ast.unparse(one.targets[0]) == "SCORERS"]
        given = ast.literal_eval(values[-1])[name]
        return Declaration.read(given)
    except (IndexError, KeyError):
        what = f"it declares no scorer {name}"
    except (ValueError, TypeError, AttributeError, SyntaxError) as error:
        what = f"the declaration of {name} cannot be read: {error}"
    raise UsageError(what, where=file, hint=_SHAPE, code="usage.scorer") from None


def _file_of(module: str, places: list[str]) -> Path | None:
    """The source of a module, found without importing anything; None where there is none."""
    if module.endswith(".py"):
        return file if (file := Path(module).absolute()).is_file() else None
    origin, search = "", [*places]
    for part in module.split("."):
        if (spec := PathFinder.find_spec(part, search)) is None:
            return None
        origin, search = spec.origin or "", [*(spec.submodule_search_locations or ())]
    return Path(origin) if origin.endswith(".py") else None


def _site_packages(python: str) -> Iterator[str]:
    """Where an environment's interpreter finds modules, as far as its folders tell."""
    for place in sorted(Path(python).absolute().parents[1].glob("lib/python3*/site-packages")):
        yield str(place)
        for link in sorted(place.glob("*.pth")):
            lines = link.read_text(errors="replace").splitlines()
            yield from (line for line in lines if os.path.isabs(line) and os.path.isdir(line))


def _pair(text: str, flag: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or not value:
        raise UsageError(f"{shown(text)} is not NAME=VALUE", where=flag, code="usage.scorer")
    return name, value


def _name(name: str) -> str:
    if not _NAME.fullmatch(name):
        what = f"{shown(name)} cannot name a scorer"
        hint = "use 1 to 40 of A-Z a-z 0-9 _ -: --score NAME=TARGET"
        raise UsageError(what, where="--score", hint=hint, code="usage.scorer")
    return name
