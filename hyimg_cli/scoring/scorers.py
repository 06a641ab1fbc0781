"""Find a scorer by its name on the command line, without running its code.

    [NAME=]TARGET       TARGET: confidence, outside, text, ask[:QUESTION], ask2:QUESTION,
                        judge:MODEL; an entry point of the group hyimg.scorers;
                        MODULE:FUNCTION; or FILE.py:FUNCTION

A module declares its scorers in a literal, which is read from its source:

    SCORERS = {"clip": {"version": "1", "range": [0, 1], "needs": ["prompt", "result"]}}
"""

import ast
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hyimg_cli.errors import UsageError
from hyimg_cli.files import SETTINGS_BYTES, bytes_of, text_of
from hyimg_cli.journal.keys import precision
from hyimg_cli.scoring.ask_target import KINDS, needs_of, questions_in
from hyimg_cli.scoring.options import (
    FLAG,
    declared_options,
    judge_fields,
    options_by_scorer,
    options_of,
)
from hyimg_cli.settings.run import CandidatesConfig, ModelChoice
from hyimg_cli.settings.values import nearest, shown
from hyimg_cli.spec import digest

ENTRY_POINTS = "hyimg.scorers"
RUBRIC = Path(__file__).with_name("rubric.txt")
# The inputs that a scorer may need: it is not shown a case without one of them.
NEEDS = frozenset({"prompt", "source", "result", "mask", "text", "confidence", "model", "expect"})
# The declarations that a scorer may make, with their defaults.
_DECLARED: dict[str, Any] = {
    "version": "",
    "weights": "",
    "licence": "",
    "needs": ["result"],
    "range": None,
    "higher_is_better": True,
    "options": {},
}
# A rubric must ask for these marks; an edit's source is a mark of its own, which may be left out.
JUDGE_KEYS = ("follows", "quality")
_BUILT_IN = {
    "confidence": "hyimg_cli.measure.confidence",
    "outside": "hyimg_cli.measure.scorers",
    "text": "hyimg_cli.measure.scorers",
    "judge": "hyimg_cli.scoring.judge",
}
_ASK = "hyimg_cli.scoring.ask"
# A question may contain a sign that looks like a name's.
_NAMED = re.compile(r"[^:]+=")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,40}")
_SHAPE = "SCORERS must be a literal such as {'NAME': {'version': '1', 'range': [0, 1]}}"


@dataclass(frozen=True)
class Scorer:
    """A scorer to be run: `function` of `module`, by the interpreter `python`.

    `module`: a dotted name or a file. `declared`: its declaration, as JSON. `source`: digest of the
    module's own file; empty for scorers that ship with hyimg.
    """

    name: str
    module: str
    function: str
    python: str
    declared: Mapping[str, Any]
    source: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def recorded(self) -> dict[str, Any]:
        """Its line in scores.jsonl."""
        return {"scorer": self.name, "identity": self.identity, "declared": self.declared}

    @property
    def asks(self) -> bool:
        """True if it asks the model that drew, in this process."""
        return self.module == _ASK

    @property
    def is_computed(self) -> bool:
        """True for hyimg's own computations, whose scores are the same each time."""
        return self.asks or self.module in {*_BUILT_IN.values()} - {_BUILT_IN["judge"]}

    @cached_property
    def identity(self) -> str:
        """A digest of everything known before it runs that decides its scores."""
        return digest.of_json([self.declared, self.function, self.source])


def scorers_of(config: CandidatesConfig, choice: ModelChoice | None = None) -> list[Scorer]:
    """Return the scorers that a run's settings name, in order. Raises UsageError.

    `choice`: how the model that drew is loaded to be asked.
    """
    pythons = dict(_pair(text, "--score-python") for text in config.score_python)
    options = options_by_scorer(config.score_option)
    found = [
        _scorer(spec, pythons, options, config, choice or ModelChoice()) for spec in config.score
    ]
    names = [one.name for one in found]
    if twice := {name for name in names if names.count(name) > 1}:
        what, hint = f"two scorers are called {shown(min(twice))}", "name one: --score NAME=TARGET"
        raise _fault(what, hint)
    for flag, named in (("--score-python", pythons), (FLAG, options)):
        if unused := named.keys() - set(names):
            what = f"{flag} names {shown(min(unused))}, and --score does not"
            raise _fault(what, f"scorers: {', '.join(names) or 'none'}")
    return found


def _fault(what: str, hint: str = _SHAPE, where: Path | str = "--score") -> UsageError:
    return UsageError(what, where=where, hint=hint, code="usage.scorer")


def _scorer(
    spec: str,
    pythons: Mapping[str, str],
    given_options: Mapping[str, Mapping[str, str]],
    config: CandidatesConfig,
    choice: ModelChoice,
) -> Scorer:
    given, target = _pair(spec, "--score") if _NAMED.match(spec) else ("", spec)
    kind, _, text = target.partition(":")
    if kind in KINDS:
        name = given or kind
        options_of(name, {}, given_options.get(name, {}))  # it has none
        return _asking(name, kind, text, choice)
    module, _, function = target.rpartition(":")
    options, facts = dict[str, Any](), dict[str, Any]()
    if target in _BUILT_IN or target.startswith("judge:"):
        kind, _, model = target.partition(":")
        given = given or kind
        if kind == "judge":
            fields = judge_fields(given, given_options.get(given, {}))
            options, facts = _judge(spec, model, config, fields)
        module, function = _BUILT_IN[kind], kind
        python, places = sys.executable, [str(Path(__file__).parents[2])]
    else:
        python = pythons.get(given or function, sys.executable)
        venv = Path(python).absolute().parents[1]
        own = sys.path[1:] if python == sys.executable else venv.glob("lib/python3*/site-packages")
        places = [os.getcwd(), *map(str, own)]
    if not module:
        known = {
            point.name: point.value
            for found in metadata.distributions(path=places)
            for point in found.entry_points
            if point.group == ENTRY_POINTS
        }
        if target not in known:
            close = nearest(target, [*_BUILT_IN, *known])
            hint = f"did you mean {close}?" if close else "write MODULE:FUNCTION or FILE.py:NAME"
            raise _fault(f"{shown(target)} is not a scorer", hint)
        given, (module, _, function) = given or target, known[target].rpartition(":")
    if not _NAME.fullmatch(given or function):
        hint = "use 1 to 40 of A-Z a-z 0-9 _ -: --score NAME=TARGET"
        raise _fault(f"{shown(given or function)} cannot name a scorer", hint)
    file = _file_of(module, places)
    if file is None:
        hint = "install it, run from its folder, or write the path of its file: FILE.py:FUNCTION"
        raise _fault(f"the module of {shown(spec)} was not found", hint)
    name, declared = given or function, _declaration(file, function) | facts
    if not facts:
        given_own = given_options.get(name, {})
        options, declared["options"] = options_of(name, declared["options"], given_own)
    # Identities from before there were options stay valid.
    if not declared["options"]:
        del declared["options"]
    if module == _BUILT_IN.get(function):
        return Scorer(name, module, function, python, {"name": name} | declared, "", options)
    source = digest.of_bytes(bytes_of(file, SETTINGS_BYTES))
    module = str(file) if module.endswith(".py") else module
    return Scorer(name, module, function, python, {"name": name} | declared, source, options)


def _asking(name: str, kind: str, text: str, choice: ModelChoice) -> Scorer:
    """Return a scorer that asks the drawing model. Raises UsageError."""
    if not _NAME.fullmatch(name):
        hint = "use 1 to 40 of A-Z a-z 0-9 _ -: --score NAME=TARGET"
        raise _fault(f"{shown(name)} cannot name a scorer", hint)
    questions = questions_in(kind, text)
    declared = {"name": name, "version": "1", "range": [0.0, 1.0], "higher_is_better": True}
    declared |= {"needs": needs_of(kind, questions), "questions": [*questions]}
    # The model itself is in the key of each score.
    declared |= {"dtype": precision(choice)[1], "quantization": choice.quantization}
    return Scorer(name, _ASK, kind, sys.executable, declared, "", {"questions": questions})


def _judge(
    spec: str, model: str, config: CandidatesConfig, fields: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the judge's options, and the ones on which its scores depend. Raises UsageError."""
    if not model:
        hint = "for example --score judge:qwen3-vl --judge-url http://localhost:8000/v1"
        raise UsageError("judge needs the name of its model", where=spec, hint=hint)
    if config.judge_url is None:
        hint = "--judge-url http://localhost:8000/v1: an OpenAI-compatible endpoint"
        raise UsageError("the judge has no address", hint=hint, code="usage.judge")
    address = urlsplit(config.judge_url)
    if address.scheme not in ("http", "https") or not address.hostname or address.username:
        what = f"{shown(config.judge_url)} is not the address of an endpoint"
        hint = "write http:// or https://, host and path; HYIMG_JUDGE_KEY holds the key"
        raise UsageError(what, where="--judge-url", hint=hint, code="usage.judge")
    try:
        rubric = text_of(Path(config.rubric or RUBRIC), SETTINGS_BYTES)
    except OSError as error:
        what = f"the rubric cannot be read: {error.strerror}"
        raise UsageError(what, where="--rubric", code="usage.rubric") from None
    if lacking := [key for key in JUDGE_KEYS if key not in rubric]:
        what = f"the rubric does not ask for {' and '.join(lacking)}"
        hint = (
            "its answer must be a JSON object with the keys follows, quality and, for edits, "
            "preserves: numbers from 0 to 10. reason is recorded too"
        )
        raise UsageError(what, where=f"--rubric {config.rubric}", hint=hint, code="usage.rubric")
    template = digest.of_bytes(rubric.encode())
    options: dict[str, Any] = {"url": config.judge_url, "model": model, "rubric": rubric}
    options |= {"fields": {**fields}, "limit_s": config.score_timeout, "template_sha256": template}
    return options, {"weights": model, "rubric_sha256": template, "options": {**fields}}


def _declaration(file: Path, name: str) -> dict[str, Any]:
    """Return a scorer's declaration in the source of its module. Raises UsageError."""
    try:
        tree = ast.parse(text_of(file, SETTINGS_BYTES))
        named = (one for one in tree.body if isinstance(one, ast.Assign))
        values = [one.value for one in named if ast.unparse(one.targets[0]) == "SCORERS"]
        given = {**ast.literal_eval(values[-1])[name]}
        given.pop("name", None)
        if unknown := given.keys() - _DECLARED.keys():
            raise ValueError(f"{sorted(unknown)[0]} is not known")
        declared = _DECLARED | given
        for plain in ("version", "weights", "licence"):
            declared[plain] = str(declared[plain])
        if (bounds := declared["range"]) is not None:
            declared["range"] = low, high = [*map(float, bounds)]
            if not low < high:
                raise ValueError(f"range is {shown(bounds)}")
        declared["options"] = declared_options(declared["options"])
        declared["needs"] = [*declared["needs"]]
        if not declared["needs"] or not NEEDS.issuperset(declared["needs"]):
            known = ", ".join(sorted(NEEDS))
            raise ValueError(f"needs is {shown(declared['needs'])}; known: {known}")
        return declared
    except (IndexError, KeyError):
        what = f"it declares no scorer {name}"
    except (ValueError, TypeError, AttributeError, SyntaxError) as error:
        what = f"the declaration of {name} cannot be read: {error}"
    raise _fault(what, where=file) from None


def _file_of(module: str, places: Sequence[str]) -> Path | None:
    """Return a module's source file, found without importing anything; None if there is none."""
    if module.endswith(".py"):
        return file if (file := Path(module).absolute()).is_file() else None
    origin, search = "", [*places]
    for part in module.split("."):
        if (spec := PathFinder.find_spec(part, search)) is None:
            return None
        origin, search = spec.origin or "", [*(spec.submodule_search_locations or ())]
    return Path(origin) if origin.endswith(".py") else None


def _pair(text: str, flag: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or not value:
        raise _fault(f"{shown(text)} is not NAME=VALUE", "", flag)
    return name, value
