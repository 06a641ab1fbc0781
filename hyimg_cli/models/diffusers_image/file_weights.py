"""A transformer in a file of its own, with the other parts of a checkpoint; no torch."""

import re
from collections import Counter
from functools import lru_cache
from pathlib import Path

from hyimg_cli.loading.checkpoint import fault
from hyimg_cli.loading.single_file import SingleFile, read_single_file
from hyimg_cli.manifest.resolved import public_model
from hyimg_cli.models.architectures import architecture_of
from hyimg_cli.models.diffusers_video.layout import CheckpointLayout, Component
from hyimg_cli.spec.units import names_text

TRANSFORMER = "transformer"
# Words that distinguish releases of an architecture. Pipelines have some of them in their names.
_OF_PIPELINES = ("edit", "layered", "kontext", "kv")
_OF_RELEASES = (("2509", "2511", "2512"), ("4b", "9b"), ("turbo",), ("base",), ("schnell",))
_NAMES = {"gguf": "GGUF", "safetensors": "safetensors"}


def fitting_file(path: Path, transformer: Component) -> SingleFile:
    """Return a file's header. Raises CheckpointError if it is not one of this transformer."""
    stat = path.stat()
    return _fitting_file(path, transformer, (stat.st_mtime_ns, stat.st_size))


@lru_cache(maxsize=8)
def _fitting_file(path: Path, transformer: Component, _version: tuple[int, int]) -> SingleFile:
    file = read_single_file(path)
    found = architecture_of(file)
    if found.class_name != transformer.class_name:
        what = f"{path.name} is a transformer of {found.name} ({found.class_name}), and the "
        what += f"components are for a {transformer.class_name}"
        hint = f"name components of {found.name} with --components"
        raise fault("components", what, transformer.folder.parent, hint)
    return file


def made_as(layout: CheckpointLayout) -> str:
    """Return of which file a checkpoint's transformer is, and as what it draws; else ""."""
    if (file := layout.components[TRANSFORMER].weights) is None:
        return ""
    counts = Counter(one.dtype for one in file.tensors.values()).most_common()
    types = names_text([f"{name} {count}" for name, count in counts])
    kind = f"{file.path.name} ({_NAMES[file.format]}: {types})"
    return f"the transformer is {kind}, drawn as {_title(layout)} ({layout.family}) by --components"


def doubts(layout: CheckpointLayout) -> tuple[str, ...]:
    """Return a warning if a file's name says another release than its components are of."""
    if (file := layout.components[TRANSFORMER].weights) is None:
        return ()
    title, own = _title(layout), _words(file.path.stem)
    pipeline, theirs = _words(layout.family), _words(title)
    said = [word for word in _OF_PIPELINES if word in own - pipeline]
    # A folder's name may say nothing.
    if theirs & own - {"image", "model"}:
        said += [
            word
            for group in _OF_RELEASES
            if not theirs.intersection(group) & own
            for word in group
            if word in own
        ]
    if not said:
        return ()
    return (f"the file's name says {names_text(said)}; it is drawn as {title}, by --components",)


def _title(layout: CheckpointLayout) -> str:
    """Return the name of the components: a hub id, or a folder's."""
    return public_model(str(layout.folder.absolute()))


def _words(name: str) -> set[str]:
    """Return a name's words in lower case, those of a class included: qwen, image, edit, 2511."""
    found = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+[bB]?(?![a-zA-Z])|[0-9]+", name)
    return {word.lower() for word in found}
