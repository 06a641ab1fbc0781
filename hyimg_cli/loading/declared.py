"""Which options the installed libraries know, read from their source; nothing is imported.

A configuration may name options of a newer version. The libraries drop them or leave them unread,
so a picture may be another one without any error.
"""

import ast
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hyimg_cli.errors import installed_version

_FOLDERS = ("models", "schedulers", "guiders")
# What the libraries write into every configuration.
_ALWAYS = frozenset({"quantization_config", "auto_map", "dtype", "torch_dtype"})
# In released checkpoints, without effect in the versions that wrote them.
_LEFTOVERS = frozenset(
    {"clip_output", "in_chans", "spatial_patch_size", "vision_token_id", "output_past"}
)


def unknown_options(values: Mapping[str, Any], library: str, class_name: str) -> list[str]:
    """Return the keys of a configuration that the installed library does not know.

    Empty if the library, or the class in it, is not found.
    """
    keys = {key for key in values if not key.startswith("_")} - _ALWAYS - _LEFTOVERS
    if library == "transformers":
        return sorted(keys - _known_words(values)) if _is_as_new(values) else []
    own = class_options(class_name)
    if own is None or not (unknown := keys - own.keys()):
        return []
    # A configuration that another class wrote, or that is for all classes of a kind.
    saved_by = values.get("_class_name")
    if isinstance(saved_by, str) and saved_by != class_name:
        unknown -= (class_options(saved_by) or {}).keys()
    if unknown and class_name.endswith("Scheduler"):
        unknown -= _options_of_compatible(class_name)
    return sorted(unknown)


@lru_cache(maxsize=64)
def class_options(class_name: str) -> Mapping[str, Any] | None:
    """Return the options of one of diffusers' classes, with their defaults; None if not found.

    A default that is not a plain value is None.
    """
    found = _class_named(class_name)
    for one in found.body if found else ():
        if isinstance(one, ast.FunctionDef) and one.name == "__init__":
            names = [arg.arg for arg in (*one.args.args, *one.args.kwonlyargs)][1:]
            given = [*one.args.defaults, *one.args.kw_defaults]
            values = [_value_of(node) for node in given]
            return dict(zip(names, [*[None] * (len(names) - len(values)), *values], strict=True))
    return None


def _value_of(node: ast.expr | None) -> Any:
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return None


def _class_named(class_name: str) -> ast.ClassDef | None:
    mark = f"\nclass {class_name}("
    for path in _sources("diffusers"):
        text = _text_of(path)
        if mark in text:
            every = ast.walk(ast.parse(text))
            return next(
                one for one in every if isinstance(one, ast.ClassDef) and one.name == class_name
            )
    return None


def _options_of_compatible(class_name: str) -> set[str]:
    """Return the options of the schedulers whose configurations a scheduler reads."""
    own = _class_named(class_name)
    is_alone = own is None or any(
        isinstance(one, ast.Assign)
        and ast.unparse(one.targets[0]) == "_compatibles"
        and ast.unparse(one.value) == "[]"
        for one in own.body
    )
    if is_alone:
        return set()
    texts = (_text_of(path) for path in _sources("diffusers") if path.parent.name == "schedulers")
    names = {name for text in texts for name in re.findall(r"\nclass (\w+Scheduler)\(", text)}
    return set[str]().union(*(class_options(name) or {} for name in names))


def _is_as_new(values: Mapping[str, Any]) -> bool:
    """Return True for a configuration that an older transformers did not write.

    Options that an older version wrote and this one does not know are no longer needed.
    """
    said = values.get("transformers_version")
    wrote, here = (
        [int(number) for number in re.findall(r"\d+", str(one))[:3]]
        for one in (said, installed_version("transformers"))
    )
    return said is None or wrote >= here


def _known_words(values: Mapping[str, Any]) -> set[str]:
    """Return every word in the source of a model_type's configuration and network."""
    kind = values.get("model_type")
    own = [path for path in _sources("transformers") if path.name.startswith("configuration_")]
    mark = f'model_type = "{kind}"'
    folders = {path.parent for path in own if mark in _text_of(path)}
    if not folders:
        return set(values)
    root = own[0].parent.parent.parent
    texts = [path for folder in folders for path in sorted(folder.glob("*.py"))]
    return _words([*texts, *root.glob("*_utils.py"), *root.glob("generation/configuration*.py")])


def _words(paths: Iterable[Path]) -> set[str]:
    return {word for path in paths for word in re.findall(r"\w+", _text_of(path))}


@lru_cache(maxsize=2)
def _sources(library: str) -> tuple[Path, ...]:
    """Return the source files of the library's networks, schedulers and guiders."""
    spec = find_spec(library)  # does not import a package of its own
    if spec is None or not spec.submodule_search_locations:
        return ()
    root = Path(spec.submodule_search_locations[0])
    return tuple(path for name in _FOLDERS for path in sorted((root / name).rglob("*.py")))


@lru_cache(maxsize=4096)
def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
