"""The system prompts that ship with a checkpoint: read as data from `system_prompt.py`, never
run.
"""

import ast
import hashlib
from pathlib import Path

from hyimg_cli.errors import CheckpointError, UsageError

# First 16 hex digits of sha256 over the stripped text.
DIGESTS = {
    "en_vanilla": "f6f74a5d675fddb9",
    "en_recaption": "c011b3181d46cfcd",
    "en_think_recaption": "f65b7b2bbf09494b",
    "en_unified": "78b97adc8e7c851e",
}
KINDS = ("None", "dynamic", "custom", *DIGESTS)
_DYNAMIC = {
    "think": "en_think_recaption",
    "think_recaption": "en_think_recaption",
    "recaption": "en_recaption",
    "none": "en_vanilla",
}


def system_prompt(kind: str, *, custom: str | None, bot_task: str, folder: Path) -> str | None:
    """The text to put before the user's, stripped, or None.

    `custom` text wins over `kind`. `kind` "custom" without a text means none. Raises UsageError for
    an unknown kind, CheckpointError where the checkpoint does not carry the text.
    """
    if custom is not None:
        return custom.strip() or None
    if kind not in KINDS:
        raise UsageError(
            f'use_system_prompt "{kind}" is unknown',
            hint=f"allowed: {', '.join(KINDS)}",
            code="usage.system-prompt",
        )
    if kind in ("None", "custom"):
        return None
    if kind == "dynamic":
        name = _DYNAMIC[bot_task]
        text = shipped_text(folder, name)
        return text.replace("\n", "") if name == "en_vanilla" else text
    return shipped_text(folder, kind)


def shipped_text(folder: Path, name: str) -> str:
    """The stripped text whose digest belongs to `name`, found among the file's string literals."""
    path = folder / "system_prompt.py"
    if not path.is_file():
        raise CheckpointError(
            f'system prompt "{name}" needs system_prompt.py from the model repository',
            where=str(folder),
            hint='put the file into the checkpoint folder, or set use_system_prompt to "None"',
            code="checkpoint.system-prompt",
        )
    for text in _string_literals(path):
        if hashlib.sha256(text.encode()).hexdigest().startswith(DIGESTS[name]):
            return text
    raise CheckpointError(
        f'system_prompt.py holds no text with the digest of "{name}"',
        where=str(folder),
        hint='use the file of the released repository, or set use_system_prompt to "None"',
        code="checkpoint.system-prompt",
    )


def _string_literals(path: Path) -> list[str]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError) as error:
        raise CheckpointError(
            f"system_prompt.py cannot be parsed: {error}", code="checkpoint.system-prompt"
        ) from None
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return [node.value.strip() for node in nodes if isinstance(node.value, str)]
