"""Find LoRA files: by path, or in a hub repository; no torch."""

from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from hyimg_cli.errors import CheckpointError
from hyimg_cli.loading.checkpoint import file_metadata, file_tensors
from hyimg_cli.loading.hub import cached_file
from hyimg_cli.settings.paths import is_hub_file
from hyimg_cli.spec import digest
from hyimg_cli.spec.options import Lora

# PEFT's configuration of a LoRA.
CONFIG = "adapter_config.json"
_MAX_BYTES = 100_000_000_000


def lora_file(name: str) -> Path:
    """Return the file's path; OWNER/REPOSITORY/FILE.safetensors is fetched into the hub's cache.

    Raises CheckpointError if there is neither.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return path
    if not is_hub_file(name):
        raise CheckpointError(
            "LoRA file not found",
            where=name,
            hint="give the path of a .safetensors file, or OWNER/REPOSITORY/FILE of the hub",
            code="lora.missing",
        )
    owner, repository, file = name.split("/", 2)
    try:
        return _fetched(f"{owner}/{repository}", file)
    except Exception as error:  # the hub client raises a family of its own, OSError and ValueError
        raise CheckpointError(
            f"the LoRA is neither a file nor in the hub's cache: {type(error).__name__}",
            where=name,
            hint="check the name and the connection, or give the path of a downloaded file",
            code="lora.missing",
            retryable=True,
        ) from None


@lru_cache(maxsize=64)
def _fetched(repository: str, file: str) -> Path:
    """Fetch a LoRA, and the configuration beside it, which may give it another strength."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    found = Path(hf_hub_download(repository, file))
    with suppress(EntryNotFoundError):  # most have none
        hf_hub_download(repository, f"{file.rpartition('/')[0]}/{CONFIG}".lstrip("/"))
    return found


def is_awaited(name: str) -> bool:
    """Return True for a file of the hub that is not on this machine yet."""
    is_here = not name or Path(name).expanduser().is_file()
    return not is_here and is_hub_file(name) and cached_file(name) is None


def in_key(loras: tuple[Lora, ...]) -> str:
    """Return everything about LoRAs that decides pixels, for a key.

    Each file's bytes (not its name), the network it changes, its weight, and that LoRAs are not
    merged into the weights.
    """
    parts = [f"{lora.on or 'on'}={file_digest(lora.file)}@{lora.weight:g}" for lora in loras]
    return ";".join(("beside 1", *parts))


def file_digest(name: str) -> str:
    """Return the digest of a file's bytes: `none` without a file, `unreadable` without access."""
    if not name:
        return "none"
    try:
        path = lora_file(name)
        stat = path.stat()
    except (CheckpointError, OSError):
        # Only the jobs that use it fail, later.
        return "unreadable"
    return _digest_of(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=64)
def _digest_of(path: Path, _changed: int, _size: int) -> str:
    found = digest.of_file(path, _MAX_BYTES)
    return f"{found}+metadata" if _has_metadata_for_other_names(path) else found


def _has_metadata_for_other_names(path: Path) -> bool:
    """Return True for a file whose header gives the alpha of layers in other than diffusers' names.

    Before 0.2, it was not applied to these.
    """
    try:
        is_said = "lora_adapter_metadata" in file_metadata(path)
        return is_said and not all(name.startswith("transformer.") for name in file_tensors(path))
    except CheckpointError:
        return False
