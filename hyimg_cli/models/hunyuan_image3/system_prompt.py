"""Read a checkpoint's system prompts as data from `system_prompt.py`, never executed."""

import ast
import hashlib
from functools import lru_cache
from pathlib import Path

from hyimg_cli.errors import JobError
from hyimg_cli.files import SETTINGS_BYTES, text_of
from hyimg_cli.spec.job import ImageJob

# First 16 hex digits of sha256 over the stripped text.
DIGESTS = {
    "en_vanilla": "f6f74a5d675fddb9",
    "en_recaption": "c011b3181d46cfcd",
    "en_think_recaption": "f65b7b2bbf09494b",
    "en_unified": "78b97adc8e7c851e",
}
# NOTE: upstream has no such text for think_recaption: "dynamic" then means the user's own system
# prompt, which is none.
_DYNAMIC = {"think": "en_think_recaption", "recaption": "en_recaption", "none": "en_vanilla"}
# What to set if the text is not available, by the field that asked for it.
_INSTEAD = {
    "use_system_prompt": 'set use_system_prompt to "None"',
    "drop_think": "set drop_think to false",
}


def system_prompt(job: ImageJob, folder: Path) -> str | None:
    """Return the text before the user's, stripped, or None.

    A job's own text wins over a kind of prompt; "custom" without a text means none. Raises JobError
    if the checkpoint lacks the text.
    """
    kind = job.use_system_prompt
    if job.system_prompt is not None:
        return job.system_prompt.strip() or None
    if kind in ("None", "custom"):
        return None
    name = _DYNAMIC.get(job.bot_task) if kind == "dynamic" else kind
    return None if name is None else shipped_text(folder, name).strip()


def shipped_text(folder: Path, name: str, *, field: str = "use_system_prompt") -> str:
    """Return the text whose digest, stripped, belongs to `name`, from the file's literals.

    Raises JobError if it is missing; `field`: the job's field that needs it.
    """
    path = folder / "system_prompt.py"
    if not path.exists():
        what = f'system prompt "{name}" needs system_prompt.py, which is missing in {folder.name}'
        raise _unavailable(what, field, "copy it there from the model repository")
    for digest, text in _texts(path, path.stat().st_mtime_ns, field).items():
        if digest.startswith(DIGESTS[name]):
            return text
    what = f'system_prompt.py of {folder.name} does not have the text "{name}" (by digest)'
    raise _unavailable(what, field, "use the file of the released repository")


@lru_cache(maxsize=8)
def _texts(path: Path, modified_ns: int, field: str) -> dict[str, str]:
    """Return the file's string literals by the sha256 of their stripped text.

    `modified_ns` is part of the cache key.
    """
    try:
        tree = ast.parse(text_of(path, SETTINGS_BYTES))
    except (OSError, SyntaxError, ValueError) as error:
        what = f"system_prompt.py of {path.parent.name} cannot be read: {error}"
        raise _unavailable(what, field, "use the file of the released repository") from None
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Constant))
    texts = (node.value for node in nodes if isinstance(node.value, str))
    return {hashlib.sha256(text.strip().encode()).hexdigest(): text for text in texts}


def _unavailable(what: str, field: str, hint: str) -> JobError:
    return JobError(
        what, where=field, hint=f"{hint}, or {_INSTEAD[field]}", code="job.system-prompt"
    )
