"""Collect every error code of the package from its source, for the page that explains them."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import hyimg_cli

PACKAGE = Path(hyimg_cli.__file__).parent
# What a code begins with.
_CLASSES = (
    "checkpoint interrupted job machine manifest output output-image rank recipe replica reuse"
)
_ROOMS = (
    "batch eval export file lora lpips metadata output-video outside replay request result route "
    "run"
)
ROOTS = {*_CLASSES.split(), *_ROOMS.split(), "server", "source", "storage", "uploads", "usage"}
# Texts that look like codes: files, a field, and the default that every class replaces.
NO_CODES = {
    "manifest.jsonl",
    "metadata.jsonl",
    "batch.json",
    "run.json",
    "job.text",
    "source.png",
    "error",
}
_CODE = re.compile(rf"(?:{'|'.join(ROOTS)})\.[a-z0-9]+(?:-[a-z0-9]+)*")


class Parameter(NamedTuple):
    """A parameter of a function, by which its caller names the end of a code."""

    module: str
    function: str
    name: str
    position: int
    is_method: bool
    required: int


def error_codes() -> tuple[set[str], list[set[str]]]:
    """Return each code that an error can have; and for each way in which a value can be wrong, the
    codes of a manifest, a recipe and a flag, of which some may be impossible.
    """
    modules = {
        path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in PACKAGE.rglob("*.py")
    }
    found = {
        text
        for tree in modules.values()
        for node in _nodes(tree)
        if _CODE.fullmatch(text := _text(node)) or (_is_code(node) and (text := _value(node)))
    }
    ends = defaultdict[Parameter, set[str]](set)
    templates = defaultdict[Parameter | None, set[str]](set)
    # What is passed on from a parameter to another: a helper's helper.
    passed = list[tuple[Parameter, Parameter]]()
    functions = list(_functions(modules))
    by_name = defaultdict[str, list[Parameter]](list)
    for module, function in functions:
        parameters = _parameters(module, function)
        for parameter in parameters:
            by_name[parameter.function].append(parameter)
        only = function.args.kw_defaults
        for parameter, default in zip(parameters[len(parameters) - len(only) :], only, strict=True):
            ends[parameter] |= {_text(default)} - {""} if default else set()
    for module, function in functions:
        own = {one.name: one for one in _parameters(module, function)}
        for node in _nodes(function):
            for root, part in _templates(node):
                of = own.get(re.split(r"\W", part)[0])
                if of or part.endswith(".slug"):
                    templates[of].add(root)
                    continue
                texts = {_text(one) for one in _assigned(function, part)} - {""}
                assert texts, f"{module}: nothing is known of {root}.{part}"
                found |= {f"{root}.{text}" for text in texts}
    for module, tree in modules.items():
        imported = {
            (node.module or "").removeprefix("hyimg_cli.").replace(".", "/") + ".py:" + one.name
            for node in _nodes(tree)
            if isinstance(node, ast.ImportFrom)
            for one in node.names
        }
        for function in [None, *(one for name, one in functions if name == module)]:
            own = {one.name: one for one in _parameters(module, function)} if function else {}
            for call in _nodes(function or tree):
                if not isinstance(call, ast.Call):
                    continue
                if _source(call.func) == "partial":
                    call = ast.Call(call.args[0], call.args[1:], call.keywords)
                for to in by_name[_source(call.func).split(".")[-1]]:
                    if not _may_call(call, to, module, imported):
                        continue
                    for value in _given(call, to):
                        if isinstance(value, ast.Name) and value.id in own:
                            passed.append((own[value.id], to))
                        elif isinstance(value, ast.Name) and function:
                            for one in _assigned(function, value.id):
                                ends[to] |= {_text(one)} - {""}
                                if isinstance(one, ast.Name) and one.id in own:
                                    passed.append((own[one.id], to))
                        ends[to] |= {text for one in _nodes(value) if (text := _text(one))}
    for _ in range(3):
        for from_, to in passed:
            templates[from_] |= templates[to]
            if to.function == "BadValue":
                ends[to] |= ends[from_]
    bad = next(one for one in by_name["BadValue"] if one.name == "slug")
    for parameter, roots in templates.items():
        if parameter is not None and parameter != bad:
            slugs = {slug.replace("_", "-") for slug in ends[parameter]}
            found |= {f"{root}.{slug}" for root in roots for slug in slugs}
    by_value = {
        slug: {f"{root}.{slug}" for root in templates[None]} for slug in {*ends[bad], "bad-value"}
    }
    found = {code for code in found if re.fullmatch(r"[a-z]+([._-][a-z0-9]+)*", code)}
    return found - NO_CODES, list(by_value.values())


_source = cache(ast.unparse)


@cache
def _nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """A node with all below it; most are asked for several times."""
    return tuple(ast.walk(tree))


def _assigned(function: ast.FunctionDef, name: str) -> Iterator[ast.AST]:
    """Every part of what a function assigns to a name."""
    for node in _nodes(function):
        if isinstance(node, ast.Assign) and _source(node.targets[0]) == name:
            yield from _nodes(node.value)


def _text(node: ast.AST) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _is_code(node: ast.AST) -> bool:
    """Whether a node says a whole code: the default of a class, or a keyword of a call."""
    if isinstance(node, ast.Assign):
        return _source(node.targets[0]) == "default_code"
    return isinstance(node, ast.keyword) and node.arg == "code"


def _value(node: ast.AST) -> str:
    return _text(node.value) if isinstance(node, ast.Assign | ast.keyword) else ""


def _functions(modules: dict[str, ast.Module]) -> Iterator[tuple[str, ast.FunctionDef]]:
    for module, tree in modules.items():
        for node in _nodes(tree):
            if isinstance(node, ast.FunctionDef):
                yield module, node
            if isinstance(node, ast.ClassDef):  # called by the name of its class
                for one in node.body:
                    if isinstance(one, ast.FunctionDef) and one.name == "__init__":
                        yield module, ast.FunctionDef(node.name, one.args, one.body, [])


def _parameters(module: str, function: ast.FunctionDef) -> list[Parameter]:
    names = [one.arg for one in function.args.args]
    is_method = names[:1] == ["self"] and not function.name[0].isupper()
    names = names[1:] if names[:1] == ["self"] else names
    own = module, function.name
    rest = is_method, len(names) - len(function.args.defaults)
    found = [Parameter(*own, name, at, *rest) for at, name in enumerate(names)]
    return found + [Parameter(*own, one.arg, 99, *rest) for one in function.args.kwonlyargs]


def _may_call(call: ast.Call, to: Parameter, module: str, imported: set[str]) -> bool:
    """Whether a call in a module may be one of the parameter's function."""
    if _source(call.func) == f"{to.module[:-3].rpartition('/')[2]}.{to.function}":
        return not to.is_method
    if isinstance(call.func, ast.Attribute):
        is_whole = len(call.args) + len(call.keywords) >= to.required
        return is_whole and to.is_method and module.split("/")[0] == to.module.split("/")[0]
    return not to.is_method and (module == to.module or f"{to.module}:{to.function}" in imported)


def _templates(node: ast.AST) -> Iterator[tuple[str, str]]:
    """The root and the variable part of a code such as `f"manifest.{slug}"`."""
    if isinstance(node, ast.JoinedStr) and len(node.values) == 2:
        root, part = node.values
        is_root = _text(root).endswith(".") and _text(root)[:-1] in ROOTS
        if is_root and isinstance(part, ast.FormattedValue):
            yield _text(root)[:-1], ast.unparse(part.value)


def _given(call: ast.Call, parameter: Parameter) -> list[ast.expr]:
    named = [one.value for one in call.keywords if one.arg == parameter.name]
    return call.args[parameter.position : parameter.position + 1] + named
