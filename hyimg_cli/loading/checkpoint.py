"""Read a safetensors checkpoint's headers: names, shapes, dtypes, digests of its tensors.

Faults of the files are found here, before any weight is read; no torch. The caller knows which
tensors a model expects.
"""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter
from safetensors import SafetensorError, safe_open

from hyimg_cli.errors import CheckpointError
from hyimg_cli.files import TABLE_BYTES, json_of, opened, refuse_unfit, text_of
from hyimg_cli.spec import digest
from hyimg_cli.spec.units import listed, names_text

STEM = "model"  # the name of the weights in transformers; diffusers uses diffusion_pytorch_model
INDEX_FILE = f"{STEM}.safetensors.index.json"
# Of a checkpoint whose parts have folders: diffusers' classic pipelines, and its modular ones.
PARTS_INDEXES = ("model_index.json", "modular_model_index.json")
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# Ends of names of tables of whole numbers.
_OF_POSITIONS = ("position_ids", "num_batches_tracked", "position_index")
FLOATS = ("F16", "BF16", "F32", "F64")
# Files that transformers, diffusers and safetensors open without being asked.
_OPENED_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".safetensors")
MAX_SMALL_BYTES = 1_000_000_000  # for a file without weights
MAX_HEADER_BYTES = 100_000_000
FULL_DIGEST_BELOW_BYTES = 1_000_000_000
SAMPLE_BYTES = 1 << 20
# safetensors' messages for a file that was cut short, or has bytes after its data.
_OF_A_CUT_FILE = ("header too small", "invalid header length", "not fully covered")
_POINTER, _MOST_POINTER_BYTES = b"version https://git-lfs.github.com/spec/", 1024
_COPY_MISSING = "download the checkpoint again, or copy the missing files"
_COPY_AGAIN = "the file was cut short or overwritten: download or copy it again"
_WEIGHT_MAP = TypeAdapter(Annotated[dict[str, str], Field(min_length=1)])


@dataclass(frozen=True)
class TensorInfo:
    """One stored tensor: its shape, its dtype as safetensors spells it, its file's name.

    `start`: the byte of the file at which it begins. `bytes`: as stored. `parts`: by name the
    tensors that a packed matrix is made of (see `packed`), whose bytes are the sum of theirs.
    """

    shape: tuple[int, ...]
    dtype: str
    file: str
    start: int = field(default=0, compare=False)
    bytes: int = field(default=0, compare=False)
    parts: "Tensors | None" = None


Tensors = Mapping[str, TensorInfo]
Shapes = Mapping[str, tuple[int, ...]]


def fault(name: str, what: str, where: Path | str = "", hint: str = "") -> CheckpointError:
    """Return the error of a file or folder, with the code `checkpoint.name`."""
    return CheckpointError(what, where=where, hint=hint, code=f"checkpoint.{name}")


def parts_index(folder: Path) -> Path:
    """Return the file in which a folder lists a checkpoint's parts; it may be missing."""
    found = (folder / name for name in PARTS_INDEXES if (folder / name).exists())
    return next(found, folder / PARTS_INDEXES[0])


def weight_files(folder: Path, stem: str = STEM) -> tuple[Path, ...]:
    """Return a checkpoint's safetensors files: one file, or the shards of its index.

    `stem`: the part of their names before `.safetensors`. If there are both, transformers reads
    the one file, and diffusers the shards. Pickle files are ignored. Raises CheckpointError if the
    folder, the safetensors or a shard is missing.
    """
    if not folder.is_dir():
        hint = "give the path of a folder with config.json and safetensors weights"
        raise fault("missing", "checkpoint folder not found", folder, hint)
    there = {path.name for path in folder.iterdir() if path.exists()}
    names = weight_names(folder, stem, there)
    if not names:
        raise _no_weights(folder, stem)
    if missing := [name for name in names if not (folder / name).exists()]:
        refuse_dead_link(folder / missing[0])
        what = f"{len(missing)} of {len(names)} shards missing: {names_text(missing)}"
        raise fault("missing-shard", what, folder, _COPY_MISSING)
    return tuple(folder / name for name in names)


def weight_names(folder: Path, stem: str, there: Collection[str]) -> list[str]:
    """Return the names of the files of weights that are read, of the files that are `there`.

    The index of shards, if any, is in `folder`. Empty without files and an index. Raises
    CheckpointError for a wrong index.
    """
    single, index = f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
    if (single in there and stem == STEM) or not index.exists():
        return [single] if single in there else []
    shards = sorted(set(_weight_map(index).values()))
    if strays := [name for name in shards if Path(name).name != name]:
        raise fault("index", f"the index names a file outside the folder: {strays[0]!r}", index)
    return [single] if single in there and {*shards}.isdisjoint(there) else shards


def tensor_index(folder: Path, stem: str = STEM) -> dict[str, TensorInfo]:
    """Return every tensor of the checkpoint by name; headers are checked against the files."""
    files = weight_files(folder, stem)
    found = [pair for file in files for pair in file_tensors(file).items()]
    if files == (folder / f"{stem}.safetensors",):
        return dict(found)
    # The index and the shards must agree: some loaders use one, some the other.
    index = folder / f"{stem}.safetensors.index.json"
    named = {f"{name} ({file})" for name, file in _weight_map(index).items()}
    stored = {f"{name} ({info.file})" for name, info in found}
    absent, unnamed = sorted(named - stored), sorted(stored - named)
    if parts := listed({"named but absent": absent, "stored but not named": unnamed}):
        raise fault("index", f"the index and the shards disagree: {parts}", index)
    return dict(found)


def metadata_of(data: bytes) -> dict[str, str]:
    """Return the metadata in a safetensors file's bytes, which the library's `load` omits.

    Layout: u64 length, JSON header, tensors. Raises ValueError, KeyError or TypeError for other
    bytes.
    """
    length = int.from_bytes(data[:8], "little")
    return dict(json_of(data[8 : 8 + length])["__metadata__"])


@contextmanager
def open_tensors(path: Path, framework: str = "pt") -> Iterator[Any]:
    """Open a safetensors file with the library. Raises CheckpointError for other files."""
    with readable(path):
        refuse_pointer(path)
        try:
            file = safe_open(path, framework=framework)
        except SafetensorError as error:
            said = str(error).removeprefix("Error while deserializing header: ")
            is_cut = any(text in said for text in _OF_A_CUT_FILE)
            what = f"{path.name} is damaged: {said}"
            raise fault("truncated" if is_cut else "header", what, path, _COPY_AGAIN) from None
        with file:
            yield file


def file_metadata(path: Path) -> dict[str, str]:
    """Return the metadata in a safetensors file's header. Raises CheckpointError."""
    with open_tensors(path, "np") as file:
        return dict(file.metadata() or {})


def refuse_pointer(path: Path) -> None:
    """Raise CheckpointError for a pointer of Git LFS in a file's place."""
    if path.stat().st_size <= _MOST_POINTER_BYTES:
        with opened(path) as file:
            if file.read(len(_POINTER)) == _POINTER:
                what = f"{path.name} is a Git LFS pointer, not the file itself"
                hint = "run git lfs pull in the folder, or download the file from the hub"
                raise fault("pointer", what, path, hint)


def without_few_eights(found: Tensors) -> dict[str, TensorInfo]:
    """Return tensors without a few that are stored as numbers of 8 bits, as tiny-video's are.

    Of a part that was cast to 8 bits as a whole, nothing is left out.
    """
    few = [name for name, info in found.items() if info.dtype.startswith("F8_")]
    few = few if len(few) <= len(found) // 20 else []
    return {name: info for name, info in found.items() if name not in few}


def refuse_packed(found: Tensors, where: Path | str, part: str = "") -> None:
    """Raise CheckpointError for weights that are not 16, 32 or 64-bit floats.

    Tables of positions, which are whole numbers, pass by their names.
    """
    title = f"{part}: " if part else ""
    others = {
        name: info.dtype
        for name, info in found.items()
        if info.dtype not in FLOATS and not (info.dtype == "I64" and name.endswith(_OF_POSITIONS))
    }
    if others:
        kinds = ", ".join(sorted(set(others.values())))
        hint = "use the original checkpoint (--quantization fp8 or nf4 makes it smaller), or one "
        hint += "saved by transformers with bitsandbytes (NF4, INT8)"
        what = f"{title}{len(others)} tensors are stored as {kinds}: {names_text([*others])}"
        raise fault("quantized", what, where, hint)


def check_tensors(
    found: Tensors,
    expected: Shapes,
    where: Path | str,
    part: str = "",
    *,
    any_dtype: Collection[str] = (),
    hint: str = "use config.json and weights of the same checkpoint",
) -> None:
    """Check that headers have exactly the `expected` tensors, in 16, 32 or 64-bit floats.

    `any_dtype`: names of the ones that may have another dtype. `hint`: for tensors that do not
    match. Raises one CheckpointError that names tensors that are missing, unexpected, of another
    shape, or not floats.
    """
    title = f"{part}: " if part else ""
    refuse_packed({name: one for name, one in found.items() if name not in any_dtype}, where, part)
    shapes = [
        f"{name} is {list(found[name].shape)}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name].shape != tuple(shape)
    ]
    missing = [name for name in expected if name not in found]
    unexpected = [name for name in found if name not in expected]
    faults = {"missing": missing, "unexpected": unexpected, "with another shape": shapes}
    if parts := listed(faults):
        what = f"{title}the weights do not match the configuration: {parts}"
        if prefix := _prefix_of(unexpected, missing):
            what = f"{title}the names of its {len(unexpected)} tensors begin with {prefix}"
            hint = "use the checkpoint's folder in diffusers' layout, or save them without it"
        raise fault("mismatch", what, where, hint)


def _prefix_of(names: Sequence[str], expected: Sequence[str]) -> str:
    """Return what `names` have before the expected names; empty if they differ in more."""
    least = min(expected, default="")
    prefix = next((name.removesuffix(least) for name in names if name.endswith(least)), "")
    return prefix if {f"{prefix}{name}" for name in expected} == set(names) else ""


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises CheckpointError if the file is missing or holds something else."""
    try:
        if path.is_file():
            refuse_pointer(path)
        value = json_of(text_of(path, TABLE_BYTES))
    except FileNotFoundError:
        refuse_dead_link(path)
        what = f"{path.parent.name}/{path.name} is missing"
        raise fault("missing", what, path.parent, _COPY_MISSING) from None
    except (OSError, ValueError) as error:
        raise fault("json", f"{path.name} cannot be read: {error}", path) from None
    if not isinstance(value, dict):
        raise fault("json", f"{path.name} is not a JSON object", path)
    return value


def refuse_dead_link(path: Path) -> None:
    """Raise CheckpointError for a link to what is gone, as in a hub's cache that was cleaned."""
    if path.is_symlink() and not path.exists():
        what = f"{path.name} is a link to a file or folder that is gone: {path.readlink()}"
        hint = "download the checkpoint again, or copy its files and not the links to them"
        raise fault("missing", what, path.parent, hint)


def promised_bytes(folder: Path, stem: str = STEM) -> int | None:
    """Return the bytes of all weights as the index counts them, or None without an index."""
    index = folder / f"{stem}.safetensors.index.json"
    metadata = read_json(index).get("metadata") if index.exists() else None
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return total if type(total) is int and total >= 0 else None


def weight_bytes(found: Tensors) -> int:
    """Return the bytes of the tensors as stored."""
    return sum(info.bytes for info in found.values())


def fingerprint(folder: Path, stem: str = STEM) -> str:
    """Return a hex sha256 of the checkpoint: all its JSON files, and its weights.

    Weights under 1 GB count in full, larger ones by size, header, and first and last MiB of each
    shard.
    """
    files = weight_files(folder, stem)
    in_full = sum(file.stat().st_size for file in files) < FULL_DIGEST_BELOW_BYTES
    texts = [[file.name, file_digest(file)] for file in sorted(folder.glob("*.json"))]
    weights = [[file.name, _weights_digest(file, in_full=in_full)] for file in files]
    return digest.of_json([texts, weights])


def file_fingerprint(path: Path) -> str:
    """Return a hex sha256 of one file of weights, under 1 GB in full, whatever its name."""
    with readable(path):
        in_full = path.stat().st_size < FULL_DIGEST_BELOW_BYTES
    return _weights_digest(path, in_full=in_full)


def _weights_digest(path: Path, *, in_full: bool) -> str:
    with readable(path):
        return digest.of_file(path) if in_full else _sampled(path)


def file_digest(path: Path) -> str:
    """Return the hex sha256 of one of a checkpoint's small files. Raises CheckpointError."""
    with readable(path):
        return digest.of_file(path, MAX_SMALL_BYTES)


def refuse_special(folder: Path) -> None:
    """Raise CheckpointError for special files in a folder in which a library opens files."""
    for path in sorted(folder.rglob("*")):
        if path.suffix in _OPENED_SUFFIXES and path.exists() and not path.is_dir():
            most = None if path.suffix == ".safetensors" else MAX_SMALL_BYTES
            with readable(path):
                refuse_unfit(path, os.stat(path), most)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Raise CheckpointError if `path`, a checkpoint's file, cannot be opened and read."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        refuse_dead_link(path)
        what = f"{path.name} cannot be read: {getattr(error, 'strerror', None) or error}"
        hint = "download or copy the checkpoint again"
        raise fault("unreadable", what, path.parent, hint) from None


def _weight_map(path: Path) -> dict[str, str]:
    """Return each tensor's shard name, from the index file."""
    try:
        with readable(path):
            table = json_of(text_of(path, TABLE_BYTES))["weight_map"]
            return _WEIGHT_MAP.validate_python(table)
    except (ValueError, KeyError, TypeError) as error:
        what = "the index is not JSON with a weight_map from tensors to files"
        raise fault("index", what, path) from error


def _no_weights(folder: Path, stem: str) -> CheckpointError:
    """Return the error for a folder without a complete set of safetensors files."""
    for suffix in (".safetensors", ".safetensors.index.json"):
        refuse_dead_link(folder / f"{stem}{suffix}")
    names = sorted(path.name for path in folder.iterdir())
    if ggufs := [name for name in names if name.endswith(".gguf")]:
        what = f"the weights are GGUF ({names_text(ggufs)}), which is not supported"
        hint = "use the original checkpoint; --quantization fp8 or nf4 makes it smaller"
        return fault("quantized", what, folder, hint)
    if pickles := [name for name in names if name.endswith(PICKLE_SUFFIXES)]:
        only = f"the weights are only available as pickle ({names_text(pickles)})"
        hint = "convert them to safetensors, or use a copy of the checkpoint that has them"
        return fault("pickle", f"{only}, which can run code when opened", folder, hint)
    variants = [name for name in names if name.endswith(".safetensors")]
    if variants:
        what = f"{stem}.safetensors is missing; the folder has {names_text(variants)}"
        hint = f"download {stem}.safetensors; if the file is a variant of it (fp16), rename it; "
        hint += "single-file checkpoints are not read"
        return fault("no-weights", what, folder, hint)
    what = f"the folder has neither {stem}.safetensors nor {stem}.safetensors.index.json"
    hint = "download the checkpoint again, with its safetensors files"
    return fault("no-weights", what, folder, hint)


def file_tensors(path: Path) -> dict[str, TensorInfo]:
    """Return the tensors of one safetensors file. Raises CheckpointError.

    The header is checked by the library. Layout: u64 length, JSON header, data.
    """
    with readable(path), opened(path) as file, open_tensors(path, "np"):
        length = int.from_bytes(file.read(8), "little")
        header = json_of(file.read(length))
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        (start, stop), shape = entry["data_offsets"], tuple(entry["shape"])
        found[name] = TensorInfo(shape, entry["dtype"], path.name, 8 + length + start, stop - start)
    return found


def _sampled(path: Path) -> str:
    """Return the digest of a file's size, its header, and its first and last MiB."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        length = min(int.from_bytes(start, "little"), MAX_HEADER_BYTES)
        head = start + file.read(length + SAMPLE_BYTES)
        file.seek(max(0, size - SAMPLE_BYTES))
        return digest.of_bytes(b"%d:" % size + head + file.read(SAMPLE_BYTES))
