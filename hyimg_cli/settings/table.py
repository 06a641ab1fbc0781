"""What may be set outside the manifest: one table, and the recipe files that hold such settings."""

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hyimg_cli.errors import RecipeError
from hyimg_cli.files import SETTINGS_BYTES, text_of
from hyimg_cli.manifest.fields import (
    AR_FIELDS,
    BY_NAME,
    NOT_IN_PICTURES,
    NOT_IN_VIDEOS,
    VIDEO_FIELDS,
)
from hyimg_cli.settings.kinds import (
    BadValue,
    Choice,
    Integer,
    Kind,
    Number,
    Switch,
    Text,
    Truth,
    nearest,
    shown,
)
from hyimg_cli.spec.job import SizeRequest
from hyimg_cli.spec.run import DTYPES, FRAMES, GRAPHS, QUANTIZATIONS

_DEVICE = re.compile(r"auto|cpu|cuda(:(0|[1-9][0-9]?))?|balanced")
JobKind = Literal["pictures", "videos"]


@dataclass(frozen=True)
class DeviceName:
    """Where a model lives: auto, cpu, cuda, cuda:N, or balanced."""

    def read(self, value: Any) -> str:
        if not isinstance(value, str) or not _DEVICE.fullmatch(value):
            hint = "allowed: auto, cpu, cuda, cuda:N, balanced"
            raise BadValue(f"{shown(value)} is not a device", hint)
        return value

    def parse(self, text: str) -> str:
        return self.read(text)


@dataclass(frozen=True)
class Knob:
    """What may be set outside the manifest, and the recipe table that holds it.

    `only`: the kind of job that reads it, where not both do.
    """

    table: str
    name: str
    kind: Kind
    default: Any = None
    only: JobKind | None = None


def _sampling(name: str, default: Any = None) -> Knob:
    """A manifest field's setting: for the jobs whose lines may hold it."""
    only: JobKind | None = None
    if name in NOT_IN_VIDEOS or name in NOT_IN_PICTURES:
        only = "pictures" if name in NOT_IN_VIDEOS else "videos"
    return Knob("sampling", name, BY_NAME[name].kind, default, only)


SAMPLING = (
    *("num_inference_steps", "guidance_scale", "flow_shift", "seed"),
    *("bot_task", "drop_think", "use_system_prompt", "system_prompt"),
    *AR_FIELDS,
)
# Unset, these follow from the job itself; the rest of the sampling comes from the checkpoint.
OF_THE_JOB = ("seed", "ar_seed", "system_prompt")
KNOBS = (
    Knob("model", "model", Text("model"), "tiny-image", only="pictures"),
    Knob("model", "video_model", Text("model"), "tiny-video", only="videos"),
    Knob("model", "revision", Text("revision")),
    Knob("model", "dtype", Choice(DTYPES), "auto"),
    Knob("model", "device", DeviceName(), "auto"),
    Knob("model", "vae_use_tiling", Truth(), False, only="pictures"),
    Knob("model", "quantization", Choice(QUANTIZATIONS), "none", only="pictures"),
    Knob("model", "enable_cpu_offload", Truth(), False, only="videos"),
    # A recipe's alone: nobody varies it from run to run.
    Knob("model", "decode_graphs", Switch(GRAPHS), "auto", only="pictures"),
    Knob("sampling", "size", BY_NAME["size"].kind, SizeRequest()),
    *(_sampling(name) for name in SAMPLING),
    Knob("sampling", "infer_align_image_size", Truth(), False, only="pictures"),
    *(_sampling(name, "" if name == "negative_prompt" else None) for name in VIDEO_FIELDS),
    Knob("reuse", "kv_reuse", Truth(), True, only="pictures"),
    Knob("reuse", "require_kv_reuse", Truth(), False, only="pictures"),
    Knob("reuse", "prompt_cache", Truth(), True, only="videos"),
    Knob("batch", "batching_max_size", Integer(1, 1024), 16, only="pictures"),
    Knob("batch", "batch_invariant", Truth(), True, only="pictures"),
    Knob("batch", "prefix_cache_mb", Integer(0, 10**7), 4096, only="pictures"),
    Knob("batch", "prefix_cache_host_mb", Integer(0, 10**7), 0, only="pictures"),
    Knob("batch", "prewarm", Truth(), True),
    # A recipe's, and for `plan` on a machine that is not the run's.
    Knob("batch", "memory_gb", Integer(1, 10**5), only="pictures"),
    Knob("batch", "gpu_memory_utilization", Number(0, 1, above_low=True)),
    Knob("cache", "cache_dir", Text("folder")),
    Knob("cache", "disk_cache", Truth(), True),
    Knob("cache", "disk_cache_mb", Integer(0, 10**9), 10240),
    Knob("parallel", "vae_patch_parallel_size", Integer(1, 64), 1, only="videos"),
    Knob("parallel", "cfg_parallel_size", Integer(1, 2), 1, only="videos"),
    Knob("parallel", "tensor_parallel_size", Integer(1, 64), 1, only="pictures"),
    Knob("parallel", "replicas", Integer(1, 64), 1),
    Knob("output", "output_dir", Text("folder")),
    Knob("output", "metadata", Truth(), True),
    Knob("output", "frames", Choice(FRAMES), "none", only="videos"),
    Knob("output", "checkpoint_every", Integer(0, 1000), 0, only="videos"),
    Knob("output", "report", Truth(), True),
    Knob("failure", "fail_fast", Truth(), False),
    Knob("failure", "max_retries", Integer(0, 100), 0),
    Knob("failure", "skip_invalid", Truth(), False),
)
_TABLES = tuple(dict.fromkeys(knob.table for knob in KNOBS))


def read_recipe(path: Path) -> dict[str, Any]:
    """The settings of a recipe file by name, typed. Raises RecipeError at the first fault."""
    try:
        text = text_of(path, SETTINGS_BYTES, encoding="utf-8-sig", or_stream=True)
        tables = tomllib.loads(text)
    except OSError as error:
        what = f"the recipe cannot be read: {error.strerror}"
        raise RecipeError(what, where=str(path), code="recipe.unreadable") from None
    except UnicodeDecodeError:
        raise RecipeError("not UTF-8", where=path.name, code="recipe.not-toml") from None
    except tomllib.TOMLDecodeError as error:
        what = f"not valid TOML: {error}"
        raise RecipeError(what, where=path.name, code="recipe.not-toml") from None
    return dict(_recipe_settings(tables, path.name))


def _recipe_settings(tables: Mapping[str, Any], title: str) -> Iterator[tuple[str, Any]]:
    for table, entries in tables.items():
        if table not in _TABLES or not isinstance(entries, dict):
            raise _unknown(f"[{table}]", table, _TABLES, where=title)
        known = {knob.name: knob for knob in KNOBS if knob.table == table}
        for name, value in entries.items():
            where = f"{title}: {table}.{name}"
            if name not in known:
                raise _unknown(name, name, tuple(known), where=where)
            try:
                yield name, known[name].kind.read(value)
            except BadValue as bad:
                code = f"recipe.{bad.slug}"
                raise RecipeError(bad.what, where=where, hint=bad.hint, code=code) from None


def _unknown(shown_name: str, name: str, known: tuple[str, ...], *, where: str) -> RecipeError:
    close = nearest(name, known)
    hint = f"did you mean {close}?" if close else f"known here: {', '.join(known)}"
    return RecipeError(f"{shown_name} is not known", where=where, hint=hint, code="recipe.unknown")
