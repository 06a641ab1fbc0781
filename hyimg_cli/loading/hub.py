"""Checkpoints of the hub: its cache on this machine, and how files come into it; no torch.

    refs/REVISION            the commit of a branch or tag
    snapshots/COMMIT/NAME    a link to a blob
    blobs/ETAG               a whole file; blobs/ETAG.incomplete: what has come of it

The hub's client makes all of this. Weights come into `blobs` here, because the client begins a file
anew after a kill: here it goes on where it ended. Their digest is compared before they are used.
"""

import fcntl
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

from hyimg_cli.errors import CheckpointError, HyimgError
from hyimg_cli.files import is_of_the_disk, nearest_existing, storage_error
from hyimg_cli.loading.checkpoint import fault
from hyimg_cli.spec import digest
from hyimg_cli.spec.model_name import names_file

BRANCH = "main"
# Larger files come only by the client's own way, which is not HTTP.
_MOST_BYTES = 50_000_000_000
_LARGE_BYTES = 1_000_000
# Enough for the header of most files; of a GGUF file, whose header does not say its length, of all.
_HEADER_BYTES = {".safetensors": 1 << 17, ".gguf": 1 << 23}
_SHA256 = re.compile(r"[0-9a-f]{64}")
# Code is not among them: a checkpoint's code is never executed.
_SMALL = re.compile(
    r"(README\.md|LICENSE(\.txt|\.md)?|system_prompt\.py|.*\.(json|jinja|txt|model))"
)
# The index of weights of another precision, which are not read.
_VARIANT = re.compile(r".*\.index\..+\.json")
_STAYS_LOCAL: ContextVar[bool] = ContextVar("stays_local", default=False)


def is_id(model: str) -> bool:
    """Return True for a name that can be a hub's, OWNER/NAME, and is not a folder's here."""
    is_path = model.startswith((".", "/", "~")) or os.path.exists(model) or names_file(model)
    return not is_path and model.count("/") == 1


@contextmanager
def stays_local() -> Iterator[None]:
    """Fetch nothing in this block: a checkpoint that is not on this machine is refused."""
    before = _STAYS_LOCAL.set(True)
    try:
        yield
    finally:
        _STAYS_LOCAL.reset(before)


def may_fetch() -> bool:
    """Return False where nothing is fetched, as with HF_HUB_OFFLINE."""
    from huggingface_hub import constants

    return not (_STAYS_LOCAL.get() or constants.HF_HUB_OFFLINE)


def cached(model: str, revision: str | None = None) -> Path | None:
    """Return a hub id's folder in the cache, which may lack files, or None. Asks nobody."""
    known = _repository(model)
    if not os.path.isdir(known):  # unlike its method, never raises, not for long names
        return None
    name = revision or BRANCH
    with suppress(OSError, ValueError):
        name = (known / "refs" / name).read_text().strip()
    folder = known / "snapshots" / name
    return folder if folder.is_dir() else None


def cached_file(name: str) -> Path | None:
    """Return the path of OWNER/REPOSITORY/FILE in the cache, of the branch `main`, or None.

    Asks nobody.
    """
    from huggingface_hub import try_to_load_from_cache

    owner, repository, file = name.split("/", 2)
    if ".." in file.split("/"):  # the client would look outside the cache
        return None
    try:
        found = try_to_load_from_cache(f"{owner}/{repository}", file)
    except ValueError:  # not a valid repository name
        return None
    return Path(found) if isinstance(found, str) else None


def not_here(model: str, revision: str | None = None) -> CheckpointError:
    """Return the error of a hub id that is not in the cache, where nothing is fetched."""
    from huggingface_hub import constants

    of = f" at revision {revision}" if revision else ""
    more = f" --revision {revision}" if revision else ""
    what = f"{model} is not here: neither a folder nor in the hub's cache{of}"
    hint = f"fetch it with: hyimg pull {model}{more}"
    if constants.HF_HUB_OFFLINE:
        what = f"{what}, and HF_HUB_OFFLINE is set"
        hint = f"unset it, then {hint}; or copy the checkpoint to this machine"
    return fault("missing", what, hint=hint)


@dataclass(frozen=True)
class Listing:
    """The files of a hub id at one commit, with their bytes. `is_gated`: its terms are accepted
    on the hub first.
    """

    model: str
    revision: str | None
    commit: str
    files: Mapping[str, int]
    is_gated: bool

    def small(self, folders: Collection[str] | None = None) -> list[str]:
        """Return the names of files without weights: at the top, or in these `folders`."""
        return [
            name
            for name in self.files
            if ("" if "/" not in name else name.rpartition("/")[0]) in (folders or ("",))
            and _SMALL.fullmatch(name.rpartition("/")[2])
            and not _VARIANT.fullmatch(name)
        ]


def listed(model: str, revision: str | None = None) -> Listing:
    """Ask the hub for a model's files. Raises CheckpointError."""
    from huggingface_hub import HfApi

    with answered(model, revision):
        found = HfApi().model_info(model, revision=revision, files_metadata=True)
    files = {one.rfilename: one.size or 0 for one in found.siblings or ()}
    return Listing(model, revision, str(found.sha), files, bool(found.gated))


def fetch_small(listing: Listing, names: Collection[str], folder: Path | None = None) -> Path:
    """Fetch files of these names into the cache, or to another `folder`; return where they are."""
    from huggingface_hub import snapshot_download

    if not names:
        return folder or place_of(listing, "")
    # A branch's name, where it is known, so that the cache has it.
    at = listing.commit if folder else listing.revision
    at_work = answered(listing.model, listing.revision)
    with _of_the_disk(folder or cache_folder()), at_work, bars(shown=False):
        found = snapshot_download(
            listing.model, revision=at, allow_patterns=[*map(_literal, names)], local_dir=folder
        )
    return Path(found)


def fetch(listing: Listing, names: Collection[str]) -> Path:
    """Fetch files of these names into the cache; large ones go on where an earlier try ended.

    Returns the snapshot's folder. Raises CheckpointError, or StorageError for a full disk.
    """
    for name in names:
        if listing.files[name] > _LARGE_BYTES:
            _fetch_blob(listing, name)
    return fetch_small(listing, names)


def place_of(listing: Listing, name: str) -> Path:
    """Return the path of a file in the cache, which may not be there yet."""
    return _repository(listing.model) / "snapshots" / listing.commit / name


def missing(listing: Listing, names: Collection[str]) -> dict[str, int]:
    """Return those of the files that are not in the cache, with the bytes that must come."""
    there = {name for name in names if place_of(listing, name).exists()}
    return {name: listing.files[name] for name in names if name not in there}


def free_bytes() -> int:
    """Return the free bytes on the disk of the hub's cache."""
    return shutil.disk_usage(nearest_existing(cache_folder())).free


def partial_bytes(model: str) -> int:
    """Return the bytes that came of files of a model that are not whole yet."""
    partials = (_repository(model) / "blobs").glob("*.incomplete")
    return sum(one.stat().st_size for one in partials)


def cache_folder() -> Path:
    """Return the folder of the hub's cache."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def copy_header(listing: Listing, name: str, to: Path) -> None:
    """Write a file of weights with its header and a hole for its numbers.

    Whatever reads headers then reads it like the file itself.
    """
    from huggingface_hub import hf_hub_url

    client = _client()
    url, size = hf_hub_url(listing.model, name, revision=listing.commit), listing.files[name]

    def bytes_of(start: int, stop: int) -> bytes:
        ranged = {"Range": f"bytes={start}-{min(stop, size) - 1}", "Accept-Encoding": "identity"}
        headers, found = client.build_hf_headers() | ranged, bytearray()
        at_work = answered(listing.model, listing.revision)
        with at_work, client.get_session().stream("GET", url, headers=headers) as answer:
            client.hf_raise_for_status(answer)
            # A server without ranges sends the file from its beginning.
            before = 0 if answer.status_code == 206 else start
            for piece in answer.iter_bytes():
                found += piece
                if len(found) >= before + stop - start:
                    break
        return bytes(found[before : before + stop - start])

    head = bytes_of(0, _HEADER_BYTES.get(to.suffix.lower(), 1 << 17)) if size else b""
    whole = 8 + int.from_bytes(head[:8], "little")
    if to.suffix == ".safetensors" and len(head) < whole <= size:
        head += bytes_of(len(head), whole)
    to.parent.mkdir(parents=True, exist_ok=True)
    with to.open("wb") as file:
        file.write(head)
        file.truncate(size)


def _fetch_blob(listing: Listing, name: str) -> None:
    """Fetch one file into the cache's blobs unless it is there."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(listing.model, name, revision=listing.commit)
    with answered(listing.model, listing.revision):
        known = get_hf_file_metadata(url)
    size, blobs = known.size or 0, _repository(listing.model) / "blobs"
    if not known.etag or not 0 < size <= _MOST_BYTES:
        return  # the client fetches it
    blob = blobs / known.etag
    partial = blob.with_name(f"{blob.name}.incomplete")
    with _of_the_disk(blobs):
        blobs.mkdir(parents=True, exist_ok=True)
        while not blob.exists():
            file = partial.open("ab")
            try:
                # Another process may be at the same file.
                fcntl.flock(file, fcntl.LOCK_EX)
                if not _is_still(file, partial):
                    continue
                _append(listing, url, file, size)
                if _SHA256.fullmatch(blob.name) and digest.of_file(partial) != blob.name:
                    partial.unlink()
                    what = f"{name} came damaged: its digest is not the one that the hub gives"
                    raise fault("damaged", what, hint="run the same command again")
                os.replace(partial, blob)
            finally:
                with suppress(OSError):  # what cannot be written was reported
                    file.close()


def _append(listing: Listing, url: str, file: BinaryIO, size: int) -> None:
    """Append the rest of a file to what is there of it."""
    from huggingface_hub.file_download import http_get

    if file.tell() > size:
        file.truncate(0)
        file.seek(0)
    name, client = url.rpartition("/")[2], _client()
    with answered(listing.model, listing.revision):
        http_get(
            url,
            file,
            resume_size=file.tell(),
            headers=client.build_hf_headers() | {"Accept-Encoding": "identity"},
            expected_size=size,
            displayed_filename=name,
        )
    file.flush()
    os.fsync(file.fileno())


def _is_still(file: BinaryIO, path: Path) -> bool:
    """Return False if another process renamed or removed the file that was opened."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


@contextmanager
def answered(model: str, revision: str | None = None) -> Iterator[None]:
    """Raise CheckpointError for what the hub refuses or does not answer; no text of its own.

    An address or a header could contain a token.
    """
    from huggingface_hub import constants, errors

    where = constants.ENDPOINT
    try:
        yield
    except HyimgError:
        raise
    except errors.GatedRepoError:
        what = f"{model} is gated: its authors give it to people who accepted its terms"
        hint = f"accept them at {where}/{model}, then log in (hf auth login, or HF_TOKEN)"
        raise fault("gated", what, hint=hint) from None
    except errors.RevisionNotFoundError:
        what = f"{model} has no revision {revision or BRANCH!r}"
        raise fault("missing", what, hint="give a branch, a tag or a commit of it") from None
    except errors.RepositoryNotFoundError:
        what = f"the hub has no model {model}, or it is private and you are not logged in"
        hint = "check the name; for a private one, log in (hf auth login, or HF_TOKEN)"
        raise fault("missing", what, hint=hint) from None
    except errors.OfflineModeIsEnabled:
        what = f"HF_HUB_OFFLINE is set, so {model} cannot be fetched"
        raise fault("missing", what, hint="unset it, or copy the checkpoint here") from None
    except Exception as error:  # the client raises families of its own, OSError and ValueError
        if isinstance(error, OSError) and is_of_the_disk(error.errno):
            raise
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(error, errors.HFValidationError):
            what, hint = f"{model!r} is not a name on the hub", "give OWNER/NAME"
            raise fault("missing", what, hint=hint) from None
        if status in (401, 403):
            what = f"the hub refuses {model} ({status})"
            hint = "log in with a token that may read it (hf auth login, or HF_TOKEN)"
            raise fault("gated", what, hint=hint) from None
        said = f"answered {status}" if status else f"does not answer: {type(error).__name__}"
        raise CheckpointError(
            f"{model} could not be fetched: the hub ({where}) {said}",
            hint="check the connection, then run the same command again to go on",
            code="checkpoint.missing",
            retryable=True,
        ) from None


@contextmanager
def _of_the_disk(folder: Path) -> Iterator[None]:
    try:
        yield
    except HyimgError:
        raise
    except OSError as error:
        raise storage_error(error, folder) from None


@contextmanager
def bars(*, shown: bool) -> Iterator[None]:
    """Show the client's bars of progress in this block, or not."""
    client = _client()
    was_off = client.are_progress_bars_disabled()
    if not shown:
        client.disable_progress_bars()
    try:
        yield
    finally:
        if not was_off:
            client.enable_progress_bars()


def _literal(name: str) -> str:
    """Return a pattern for exactly this name."""
    return re.sub(r"([*?[])", r"[\1]", name)


def _repository(model: str) -> Path:
    return cache_folder() / f"models--{model.replace('/', '--')}"


def _client() -> Any:
    """Return the client's tools, which its types do not name as exported."""
    return import_module("huggingface_hub.utils")
