"""Shell completion for values of options and arguments. Nothing here imports torch.

An empty answer means that the shell completes file names, as it does by default.
"""

from collections.abc import Callable, Iterable, MutableMapping
from pathlib import Path

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
