"""Options of a scorer, `--score-option NAME.KEY=VALUE`, typed by what the scorer declares.

A scorer of the user's own declares its options with their defaults; @FILE is a file's text. The
options of `judge` are fields of its request. All are part of the scorer's identity.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hyimg_cli.errors import UsageError
from hyimg_cli.files import SETTINGS_BYTES, json_of, refuse_constant, text_of
from hyimg_cli.settings.values import nearest, shown
from hyimg_cli.spec import digest

FLAG = "--score-option"
_OPTION = re.compile(r"([A-Za-z0-9_-]{1,40})\.([A-Za-z0-9_]{1,40})=(.*)", re.DOTALL)
_KEY = re.compile(r"[A-Za-z0-9_]{1,40}")
# Fields of a judge's request with a value of their own: the model has another flag, and one reply
# is read as a whole.
_NOT_OF_A_JUDGE = frozenset({"model", "messages", "n", "stream", "stream_options"})
# Other fields are passed on too; these are only compared with, to find a typing error.
_OF_A_JUDGE = (
    *("temperature", "max_tokens", "max_completion_tokens", "top_p", "top_k", "min_p", "seed"),
    *("reasoning_effort", "frequency_penalty", "presence_penalty", "repetition_penalty"),
    *("response_format", "service_tier", "chat_template_kwargs", "provider"),
)


def options_by_scorer(texts: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the texts of options by scorer and key. Raises UsageError."""
    found: dict[str, dict[str, str]] = {}
    for text in texts:
        if (option := _OPTION.fullmatch(text)) is None:
            raise _fault(f"{shown(text)} is not NAME.KEY=VALUE", "for example judge.temperature=1")
        name, key, value = option.groups()
        if found.setdefault(name, {}).setdefault(key, value) != value:
            raise _fault(f"{name}.{key} is given twice", "give each option once")
    return found


def declared_options(given: Any) -> dict[str, Any]:
    """Return the options in a scorer's declaration, by key with their defaults.

    Raises ValueError for anything but names with texts, numbers, booleans or null.
    """
    for key, value in {**given}.items():
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            raise ValueError(f"{shown(key)} cannot name an option")
        if not isinstance(value, str | int | float | None):
            raise ValueError(f"option {key} is {shown(value)}; use a text, a number or null")
    return {**given}


def options_of(
    name: str, declared: Mapping[str, Any], given: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return every declared option of scorer `name` with its value, and as it is recorded.

    The value @FILE is the text of a file, which is recorded as its digest. Raises UsageError for an
    option that the scorer does not declare, a value of another type, or a file that cannot be read.
    """
    options, recorded = dict(declared), dict(declared)
    for key, text in given.items():
        if key not in declared:
            close = nearest(key, declared)
            hint = f"options of {name}: {', '.join(declared)}"
            if not declared:
                hint = "declare it with its default: SCORERS = {'NAME': {'options': {'KEY': 0}}}"
            raise _fault(
                f"{name} has no option {shown(key)}", f"did you mean {close}?" if close else hint
            )
        if text.startswith("@"):
            options[key] = _text_in(Path(text[1:]), f"{name}.{key}")
            recorded[key] = f"sha256:{digest.of_bytes(options[key].encode())}"
            continue
        default, value = declared[key], text if isinstance(declared[key], str) else _json_or(text)
        is_number = isinstance(default, int | float) and not isinstance(default, bool)
        if (isinstance(default, bool) and not isinstance(value, bool)) or (
            is_number and (isinstance(value, bool) or not isinstance(value, int | float))
        ):
            kind = "true or false" if isinstance(default, bool) else "a number"
            raise _fault(f"{name}.{key} is {shown(text)}, not {kind}", "")
        options[key] = recorded[key] = value
    return options, recorded


def _text_in(path: Path, option: str) -> str:
    try:
        return text_of(path, SETTINGS_BYTES)
    except OSError as error:
        raise _fault(f"the file of {option} cannot be read: {error.strerror}", "") from None


def judge_fields(name: str, given: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields that options add to a judge's request; None removes one.

    Raises UsageError for a field that is not the user's, or that looks like a typing error.
    """
    for key in given:
        if key in _NOT_OF_A_JUDGE:
            hint = "--score judge:MODEL names the model" if key == "model" else "remove it"
            raise _fault(f"{name}.{key} cannot be chosen", hint)
        if key not in _OF_A_JUDGE and (close := nearest(key, _OF_A_JUDGE, cutoff=0.8)):
            raise _fault(f"{name} has no option {shown(key)}", f"did you mean {close}?")
    return {key: _json_or(text) for key, text in given.items()}


def _json_or(text: str) -> Any:
    try:
        return json_of(text, parse_constant=refuse_constant)
    except ValueError:
        return text


def _fault(what: str, hint: str) -> UsageError:
    return UsageError(what, where=FLAG, hint=hint, code="usage.scorer")
