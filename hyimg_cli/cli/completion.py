"""Shell completion for values of options and arguments. Nothing here imports torch.

An empty answer means that the shell completes file names, as it does by default.
"""

from collections.abc import Callable, Iterable, MutableMapping
from pathlib import Path

import typer

from hyimg_cli.errors import HyimgError

# Folders of pictures are completed, too.
MANIFESTS = (".jsonl", ".txt", ".csv", ".tsv")


def joined_values(environ: MutableMapping[str, str]) -> None:
    """Remove the "=" that bash treats as a separate word in `--flag=value`."""
    words = environ.get("COMP_WORDS", "").split("\n")
    if "=" in words and (here := int(environ["COMP_CWORD"])) and words[here] != "=":
        environ["COMP_WORDS"] = "\n".join(word for word in words if word != "=")
        environ["COMP_CWORD"] = str(here - words[:here].count("="))


def among(words: Iterable[str]) -> Callable[[], list[str]]:
    """Complete with these words."""
    return lambda: list(words)


def manifests(incomplete: str) -> list[str]:
    """Return packaged manifests with this prefix, and folders and manifests that match it here."""
    from hyimg_cli.cli import packaged

    names = [name for name in packaged.names() if name.startswith(incomplete)]
    if not names:
        return []
    found = Path().glob(f"{incomplete}*")
    # A shell does not escape names that it shows.
    here = sorted(path for path in found if path.name[0] != "." and path.name.isprintable())
    folders = [f"{path}/" for path in here if path.is_dir()]
    return names + folders + [str(path) for path in here if path.suffix in MANIFESTS]


def ids(ctx: typer.Context) -> list[str]:
    """Return the job ids of the manifest or the pictures named on the command line."""
    from hyimg_cli.cli import packaged
    from hyimg_cli.manifest.ids import child_ids

    # NOTE: after an option whose value is missing, the parser leaves arguments unread.
    names = ctx.params.get("inputs") or ctx.args
    # Do not read a stream: nothing would be left for the command itself.
    files = [Path(name) for name in names if name != "-"]
    is_stream = any(one.exists() and not (one.is_file() or one.is_dir()) for one in files)
    if not names or "-" in names or is_stream:
        return []
    try:
        if not ctx.params.get("prompt"):
            manifest = packaged.read(names[0])
        else:
            # Pictures need numpy, which takes as long to import as everything else.
            from hyimg_cli.cli.inputs import manifest_of

            manifest = manifest_of(dict(ctx.params) | {"inputs": names, "quiet": True})
    except HyimgError:
        return []
    return [name for line in manifest.lines for name in child_ids(line.fields)]
