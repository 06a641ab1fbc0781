"""The licence gate: whether other models may be trained on these checkpoints' outputs.

Only licences known to permit it pass; `--allow-licence` lets others through, and is recorded. This
is not legal advice.
"""

import shlex
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from hyimg_cli.errors import UsageError
from hyimg_cli.export.finished import Finished
from hyimg_cli.manifest.resolved import public_model
from hyimg_cli.models import registry
from hyimg_cli.models.licences import AND, TENCENT, UNKNOWN, is_non_commercial, licence_in
from hyimg_cli.settings.paths import LORAS, is_hub_file

PERMISSIVE = {
    *("apache-2.0", "mit", "isc", "bsd-2-clause", "bsd-3-clause", "unlicense"),
    *("cc0-1.0", "cc-by-4.0"),
}
_OF_TENCENT = (
    "its outputs must not be used to improve other models, and it does not apply in the EU, the "
    "UK and South Korea"
)


def find_reason(licence: str) -> str:
    """Return why outputs under a licence may not train other models; empty if they may."""
    words = licence.split(AND)
    if any(word.startswith(("tencent-hunyuan", TENCENT)) for word in words):
        return _OF_TENCENT
    if any(map(is_non_commercial, words)):
        return "it is for non-commercial use only"
    if licence == UNKNOWN:
        return "no model card or LICENSE file on this machine names one"
    if not PERMISSIVE.issuperset(words):
        return "hyimg does not know whether it permits training on outputs"
    return ""


def licences_of(finished: Iterable[Finished]) -> dict[str, str]:
    """Return the licence of each checkpoint and LoRA that was used, by its public name."""
    parts = {(name, one.revision) for one in finished for name in parts_of(one.line)}
    return {
        public_part(name): _licence(name, revision) for name, revision in sorted(parts, key=str)
    }


def parts_of(line: Mapping[str, Any]) -> list[str]:
    """Return the checkpoint of a resolved line, and its LoRA files."""
    return [str(line["model"]), *LORAS.names(LORAS.read(line.get("lora", "")))]


def public_part(name: str) -> str:
    """Return a checkpoint's or a LoRA's name without its parent folders."""
    return name if is_hub_file(name) else public_model(name)


def _licence(name: str, revision: str | None) -> str:
    if not name.endswith(".safetensors"):
        return registry.licence(name, revision)
    if is_hub_file(name):
        return registry.licence("/".join(name.split("/")[:2]))
    return licence_in(Path(name).parent)


def refuse_forbidden(licences: Mapping[str, str], allowed: Collection[str]) -> dict[str, str]:
    """Pass licences that permit training on outputs, or are allowed by name.

    Returns the ones that had to be allowed, with the reason for which they would be refused. Raises
    UsageError.
    """
    reasons = {word: why for word in licences.values() if (why := find_reason(word))}
    names = {word.lower() for word in allowed}
    refused = {name: word for name, word in licences.items() if word in reasons.keys() - names}
    if refused:
        told = [f"{name}: {word}: {reasons[word]}" for name, word in refused.items()]
        flags = " ".join(f"--allow-licence {shlex.quote(w)}" for w in sorted({*refused.values()}))
        raise UsageError(
            f"the licence does not permit a training set of these pictures: {'; '.join(told)}",
            hint=f"read the licence; if your use is permitted, add {flags}, which the dataset's "
            "card records",
            code="export.licence",
        )
    return reasons


def source_licence(result: Mapping[str, Any], default: str | None) -> str | None:
    """Return the licence of a job's sources: from its metadata (`licence`), else `default`."""
    metadata = result.get("metadata")
    own = metadata if isinstance(metadata, dict) else {}
    named = own.get("licence", own.get("license", default))
    return str(named) if named else None
