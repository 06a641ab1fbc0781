"""The resume key of each job: whether an earlier result counts, and if not, what differs."""

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from hyimg_cli import __version__
from hyimg_cli.errors import MachineError
from hyimg_cli.journal.past_run import object_in, read_run_info, readable_jobs
from hyimg_cli.journal.provenance import portable, versions
from hyimg_cli.manifest.fields import PATH_FIELDS
from hyimg_cli.manifest.resolved import job_to_json
from hyimg_cli.media.images import Digests, digests_of
from hyimg_cli.media.metadata import Provenance
from hyimg_cli.media.source_files import MAX_SOURCE_BYTES
from hyimg_cli.models import lora_files, registry
from hyimg_cli.settings.config import in_config, in_key
from hyimg_cli.settings.run import InKey, MachineInfo, ModelChoice, OutputConfig, RunConfig
from hyimg_cli.settings.table import SETTINGS
from hyimg_cli.spec import digest
from hyimg_cli.spec.compilers import triton_lacks
from hyimg_cli.spec.job import LINEAGE, ImageJob, Job, VideoJob
from hyimg_cli.spec.options import FINISHING, KeepOutside

UNREADABLE = "unreadable"
NOT_FOUND = "source image not found"
# The setting for clips that are denoised together; only for models that support it.
CLIPS = "clips"
_DEVICES = Path("/dev")
# Fields of a resolved job that never change its file.
_NOT_IN_KEY = (
    "custom_id",
    "metadata",
    "name",
    "written",
    "links",
    *LINEAGE,
    *PATH_FIELDS,
    *FINISHING,
)
# Increase it if the same image, weights and packages would give other rows, or notes on them.
_SOURCE_FORMAT = 5
# Increase it if the same redraw would be put back in another way.
_FINISHING_FORMAT = 5
# The fields of `KeepOutside` that this format has.
_IN_FORMAT = {"region", "region_mode", "on_global"}
_IN_FORMAT |= {"max_outside_change", "max_edited_area", "max_spill"}


def key_of(job: Job, source_digests: Sequence[str], config: RunConfig) -> str:
    """Return the job's key, from its source images as they are read, and from its checkpoint.

    Of a source that another job of the run makes, the key of that job counts instead of its file.
    The key includes settings that `settings.table` declares to change pixels, even if only by
    rounding, which may change a text. It does not include the device, the batch size, or whether
    the capture of a graph succeeded, because that does not change the numbers.
    """
    if job.links:
        both = zip(source_digests, job.links, strict=False)
        source_digests = [digest if link is None else link.key for digest, link in both]
    return job_key(job, source_digests, model_print(job, config), pixel_settings(job, config))


def result_key(job: Job, config: RunConfig) -> str:
    """Return the key of the pixels of a job's file: of its drawing, and how it is put back."""
    facts = {"drawn": key_of(job, [*map(source_digest, job.images)], config)}
    outside = job.outside if isinstance(job, ImageJob) else None
    if outside is not None:
        # Whether a result is accepted does not change its pixels.
        given = {one.name: getattr(outside, one.name) for one in fields(outside)}
        unsaid = {one.name: one.default for one in fields(outside)}
        shaping = [name for name in FINISHING if not name.startswith(("max_", "on_global"))]
        facts |= {name: given[name] for name in shaping if given[name] != unsaid[name]}
        facts |= mask_print(job) | {"format": str(_FINISHING_FORMAT)}
    return digest.of_json(facts)


def job_key(
    job: Job,
    source_digests: Sequence[str],
    model_fingerprint: str,
    pixel_settings: Mapping[str, str],
) -> str:
    """Return the hex sha256 of all that changes pixels: not id, paths, batch or metadata.

    `source_digests`: of each source image as it is read, in order. `pixel_settings`: settings of
    the run that change pixels, such as the dtype.
    """
    fields = shaping_fields(job_to_json(job))
    facts = {"job": fields, "model": model_fingerprint, "settings": dict(pixel_settings)}
    if isinstance(job, ImageJob):
        if job.outside is not None and job.inpaints:
            # The region shapes the drawing, too.
            keeps = {"keeps": job.outside.region_keeps, "edits_where": job.outside.edits_where}
            facts["inpaint"] = {"region": job.outside.region} | mask_print(job) | keeps
        if fields.keys() & {"cot_text", "cot_token_ids"}:
            # Some lines with a given text also set bot_task; only a dynamic system prompt reads it.
            fields.pop("bot_task", None)
        # A line with a given text has no bot_task, but a dynamic system prompt depends on it.
        facts["bot_task"] = job.bot_task
    if source_digests or isinstance(job, ImageJob):
        facts["sources"] = list(source_digests)
    return digest.of_json(facts)


def shaping_fields(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a resolved line that change pixels."""
    return {k: v for k, v in line.items() if k not in _NOT_IN_KEY and not k.startswith("x_")}


def model_print(job: Job, config: RunConfig) -> str:
    """Return the fingerprint of all of a job's weights."""
    components = config.model.video_components if isinstance(job, VideoJob) else None
    return registry.fingerprint(job.model, config.model.revision, components)


def finishing_key(job: Job, output: OutputConfig) -> str:
    """Return the key of putting a job's drawing back on its source; empty if that is not done."""
    outside = job.outside if isinstance(job, ImageJob) else None
    if outside is None:
        return ""
    # Fields that are newer than the format count only if they are set.
    defaults = KeepOutside()
    facts = {
        name: value
        for name in FINISHING
        if (value := getattr(outside, name)) != getattr(defaults, name) or name in _IN_FORMAT
    }
    facts |= {"metadata": output.metadata, "keep_gps": output.keep_gps and output.metadata}
    return digest.of_json(facts | mask_print(job) | {"format": _FINISHING_FORMAT})


def mask_print(job: Job) -> dict[str, str]:
    """Return the digest of the mask of a job's region as `region`; empty without a mask."""
    outside = job.outside if isinstance(job, ImageJob) else None
    return {"region": file_digest(outside.mask)} if outside and outside.mask else {}


def pixel_settings(job: Job, config: RunConfig) -> dict[str, str]:
    """Return the settings that are declared to change the job's pixels, by name."""
    choice = config.model
    decided: dict[str, Any] = {"dtype": precision(choice)[1]}
    beside = {"lora": lora_files.in_key(job.lora)} if job.lora else {}
    if isinstance(job, ImageJob) and job.outside:
        # Before this, such sources were shown in another size than the one that is drawn.
        is_fitted = registry.model_card(job.model, choice.revision).fits_kept
        beside |= {"kept_source": "fitted"} if is_fitted else {}
    if not isinstance(job, ImageJob):
        if job.camera:
            beside["camera"] = ",".join(map(file_digest, job.camera_files)) or job.camera
        decided["vae_use_tiling"] = None if choice.tiles_videos else False
        words = in_key(config, "videos", decided) | beside
        if CLIPS in words and registry.video_card(job.model, choice.revision).chunks is None:
            del words[CLIPS]
        return words
    graphs = by_graphs(replace(choice, model=job.model), config.parallel.picture_ranks)
    decided |= {"vae_use_tiling": choice.vae_use_tiling or None}
    decided |= {"decode_graphs": "on" if graphs else "off"}
    words = in_key(config, "pictures", decided)
    of_latents = in_key(config, "pictures", decided, denoises_latents=True)
    # Read the model's card only if it would change the settings.
    if words != of_latents and registry.model_card(job.model, choice.revision).denoises_latents:
        words = of_latents
    return words | beside


def file_provenance(job: Job, config: RunConfig) -> Provenance:
    """Return all known facts that decide the bits of the job's file.

    A replay can set some of them again, but not all.
    """
    import torch

    kind = precision(config.model)[0]
    processor = {"device": kind, "capability": torch.backends.cpu.get_cpu_capability()}
    if kind == "cuda":
        major, minor = torch.cuda.get_device_capability()
        processor["capability"] = f"{major}.{minor}"
    else:
        processor["threads"] = str(torch.get_num_threads())
    return Provenance(
        version=__version__,
        model_fingerprint=model_print(job, config),
        settings=pixel_settings(job, config) | mask_print(job) | processor,
        packages={name: found for name, found in versions().items() if name != "hyimg"},
    )


def job_keys(jobs: Sequence[Job], config: RunConfig) -> dict[str, str]:
    """Return the key of each job by custom id. Each source image is digested once."""
    digest_of = cache(source_digest)
    return {job.custom_id: key_of(job, [*map(digest_of, job.images)], config) for job in jobs}


def precision(choice: ModelChoice) -> tuple[str, str]:
    """Return the device kind and dtype that a run will choose, from the driver's files.

    Does not import torch.
    """
    kind = choice.kind(has_gpu=(choice.machine or here()).has_gpu)
    return kind, choice.dtype_on(kind)


def here() -> MachineInfo:
    """Return the machine facts that keys depend on.

    A GPU counts if the driver shows one and CUDA_VISIBLE_DEVICES does not hide them all.
    """
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    is_shown = first not in ("", "-1") and _DEVICES.exists()
    has_gpu = is_shown and _has_gpu_files(_DEVICES, _DEVICES.stat().st_mtime_ns)
    return MachineInfo(has_gpu, not triton_lacks())


def confirm_dtype(choice: ModelChoice, dtype: str) -> None:
    """Raise MachineError if a model's dtype differs from the one in its jobs' keys.

    Otherwise a folder would mix two precisions.
    """
    expected = precision(choice)[1]
    if dtype != expected:
        raise MachineError(
            f"the model is in {dtype}, but the GPU driver's files imply {expected}",
            hint=f"give both --device and --dtype {dtype}",
            code="machine.dtype",
        )


def by_graphs(choice: ModelChoice, ranks: int) -> bool:
    """Return True if a model on `ranks` ranks will decode text by CUDA graphs; no torch."""
    is_on_gpu = precision(choice)[0] == "cuda" and choice.device != "balanced"
    if is_on_gpu and not registry.model_card(choice.model, choice.revision).has_graphs:
        return False
    return choice.wants_graphs(
        on_one_gpu=is_on_gpu and ranks == 1, has_triton=(choice.machine or here()).has_triton
    )


def confirm_graphs(choice: ModelChoice, ranks: int, has_graphs: bool) -> None:
    """Raise MachineError if a model decodes text in another way than its jobs' keys say."""
    if has_graphs != by_graphs(choice, ranks):
        found, expected = ("with", "without") if has_graphs else ("without", "with")
        raise MachineError(
            f"text is decoded {found} CUDA graphs, but the GPU driver's files imply "
            f"decoding {expected} them",
            hint=f"give both --device, and [model] decode_graphs = {str(has_graphs).lower()} in a "
            "recipe",
            code="machine.graphs",
        )


def device_name(choice: ModelChoice) -> str:
    """Return `cpu`, or the name of the run's GPU; for a GPU, imports torch."""
    kind = precision(choice)[0]
    if kind == "cpu" or choice.machine is not None:
        return kind
    import torch

    name = choice.device if choice.device.startswith("cuda") else None
    return torch.cuda.get_device_name(name) if torch.cuda.is_available() else kind


@cache
def _has_gpu_files(devices: Path, changed_ns: int) -> bool:
    """Return True if the driver shows a GPU; cached, because each job asks several times.

    `changed_ns`: the time of the last change in `devices`, so that a change is noticed.
    """
    return any(devices.glob("nvidia[0-9]*"))


def source_digests(path: str) -> Digests:
    """Return the digests of a source image; an unreadable file fails its job later."""
    try:
        return digests_of(Path(path))
    except OSError:
        return Digests(UNREADABLE, UNREADABLE)


def source_digest(path: str) -> str:
    """Return the digest of a source image as it is read."""
    return source_digests(path).picture


def file_digest(path: str) -> str:
    """Return the digest of a file's bytes; an unreadable file fails its job later."""
    try:
        return digest.of_file(Path(path), MAX_SOURCE_BYTES)
    except OSError:
        return UNREADABLE


def source_key(image_digest: str, model_print: str, *, device: str, dtype: str) -> str:
    """Return the key of an encoded source image: everything that decides its bits.

    `device` is `cpu` or `cuda`. Package versions count too, because another version may round
    differently.
    """
    facts = {
        "format": _SOURCE_FORMAT,
        "image": image_digest,
        "model": model_print,
        "device": device,
        "dtype": dtype,
        "versions": versions(),
    }
    return digest.of_json(facts)


def count_differences(folder: Path, jobs: Iterable[Job], config: RunConfig) -> Counter[str]:
    """Return how jobs differ from the recorded ones with their ids, with the number of jobs.

    The keys are fields, `model`, settings, `source image`, the text `NOT_FOUND` for a missing
    source, or a text that says that the folder does not record the difference.

    A result's key shows that its job differs. `manifest.resolved.jsonl` and `run.json` show how,
    if they are from the run that made the result.
    """
    lines, info = readable_jobs(folder), read_run_info(folder)
    models, flags = object_in(info, "models").values(), object_in(info, "flags")
    fingerprint = cache(lambda model: registry.fingerprint(model, config.model.revision))
    settings = [
        name
        for name, row in SETTINGS.items()
        if isinstance(row.pixels, InKey)
        and (flag := object_in(flags, name))
        and flag.get("value") != portable(in_config(name, config))
    ]
    counts = Counter[str]()
    for job in jobs:
        if any(file_digest(one) == UNREADABLE and not os.path.exists(one) for one in job.files):
            counts[NOT_FOUND] += 1
            continue
        old, new = shaping_fields(lines.get(job.custom_id, {})), shaping_fields(job_to_json(job))
        fields = old.keys() | new.keys() if old else set[str]()
        names = {name for name in fields if old.get(name) != new.get(name)}.union(settings)
        if models and fingerprint(job.model) not in models:
            names.add("model")
        if not names and job.images:
            names.add("source image")
        counts.update(sorted(names) or ["something this folder does not record"])
    return counts
