"""Shell completion for values of options and arguments. Nothing here imports torch.

An empty answer means that the shell completes file names, as it does by default.
"""

from collections.abc import Callable, Iterable, MutableMapping
from pathlib import Path

import typer

from hyimg_cli.errors import HyimgError

# A folder is one too: of pictures.
MANIFESTS = (".jsonl", ".txt", ".csv", ".tsv")


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
    found = Path().glob(f"{incomplete}*")
    # A shell shows names as they are.
    here = sorted(path for path in found if path.name[0] != "." and path.name.isprintable())
    folders = [f"{path}/" for path in here if path.is_dir()]
    return names + folders + [str(path) for path in here if path.suffix in MANIFESTS]


def ids(ctx: typer.Context) -> list[str]:
    """The ids of what stands on the command line: a manifest's good lines, or pictures' names."""
    from hyimg_cli.cli import packaged
    from hyimg_cli.manifest.line import child_ids

    # NOTE: behind an option that lacks its value the parser leaves arguments unread.
    names = ctx.params.get("inputs") or ctx.args
    # What is read as it comes would be empty for the command itself.
    files = [Path(name) for name in names if name != "-"]
    is_stream = any(one.exists() and not (one.is_file() or one.is_dir()) for one in files)
    if not names or "-" in names or is_stream:
        return []
    try:
        if not ctx.params.get("prompt"):
            manifest = packaged.read(names[0])
        else:
            # Pictures need numpy, which takes as long to import as all the rest.
            from hyimg_cli.cli.inputs import manifest_of

            manifest = manifest_of(dict(ctx.params) | {"inputs": names, "quiet": True})
    except HyimgError:
        return []
    return [name for line in manifest.lines for name in child_ids(line.fields)]
