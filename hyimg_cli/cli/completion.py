"""What a shell completes where an option or an argument takes a value. Nothing here imports torch.

No words means that the shell completes names of files, as it would without us.
"""

from collections.abc import Callable, Iterable, MutableMapping
from pathlib import Path

import typer

from hyimg_cli.errors import HyimgError

# A folder is one too: of pictures.
_MANIFESTS = (".jsonl", ".txt", ".csv", ".tsv")


def joined_values(environ: MutableMapping[str, str]) -> None:
    """Take out the "=" that bash makes a word of its own in `--flag=value`."""
    words = environ.get("COMP_WORDS", "").split("\n")
    if "=" in words and (here := int(environ["COMP_CWORD"])) and words[here] != "=":
        environ["COMP_WORDS"] = "\n".join(word for word in words if word != "=")
        environ["COMP_CWORD"] = str(here - words[:here].count("="))


def among(words: Iterable[str]) -> Callable[[], list[str]]:
    """One of these."""
    return lambda: list(words)


def manifests(incomplete: str) -> list[str]:
    """Packaged manifests by name, and with them what lies here under such a name."""
    from hyimg_cli.cli import packaged

    names = [name for name in packaged.names() if name.startswith(incomplete)]
    if not names:
        return []
    here = sorted(path for path in Path().glob(f"{incomplete}*") if path.name[0] != ".")
    folders = [f"{path}/" for path in here if path.is_dir()]
    return names + folders + [str(path) for path in here if path.suffix in _MANIFESTS]


def ids(ctx: typer.Context) -> list[str]:
    """The ids of the manifest that stands on the command line, those of its good lines."""
    from hyimg_cli.cli import packaged
    from hyimg_cli.cli.inputs import manifest_of
    from hyimg_cli.manifest.line import child_ids

    # NOTE: behind an option that lacks its value the parser leaves arguments unread.
    inputs = ctx.params.get("inputs") or ctx.args[:1]
    given = {"prompt": None, "recursive": False, **ctx.params, "inputs": inputs, "quiet": True}
    # NOTE: a pipe would be read empty, and standard input is the shell's.
    if not given["prompt"] and not all(Path(n).is_file() or n in packaged.names() for n in inputs):
        return []
    try:
        return [name for line in manifest_of(given).lines for name in child_ids(line.fields)]
    except HyimgError:
        return []


def scenarios() -> list[str]:
    """The packaged comparisons of `hyimg bench`."""
    from hyimg_cli.measure.bench.scenario import names

    return list(names())
