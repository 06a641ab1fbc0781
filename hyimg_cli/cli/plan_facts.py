"""What a plan says: each fact with its name and value in JSON, and its lines of text."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from hyimg_cli.engine.eta import Eta
from hyimg_cli.engine.forecast import LatentCost, PlanForecast, VideoForecast
from hyimg_cli.journal.keys import precision
from hyimg_cli.manifest.cost import Cost
from hyimg_cli.manifest.planner import TEXT_CLASS, Shard
from hyimg_cli.memory.available import available_memory, configured_memory
from hyimg_cli.memory.fit import cards_text
from hyimg_cli.memory.footprint import Footprint, footprints
from hyimg_cli.memory.offload import STATED_BYTES_S, measured_link, traffic
from hyimg_cli.memory.videos import networks_need
from hyimg_cli.models import registry
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.spec.card import Networks
from hyimg_cli.spec.job import ImageJob
from hyimg_cli.spec.plan import Group, Plan, VideoGroup
from hyimg_cli.spec.units import bytes_text, counted, time_text

# Dense bfloat16, from NVIDIA's data sheets for the H100 SXM and H200.
_H100_FLOPS = 989e12
# If a job's text takes longer than this, the plan advises to write it elsewhere.
_HOPELESS_TEXT_S = 60.0
# The stages of a run in words.
_STAGES = {"load": "start and load", "decode": "decode and write"}


class Fact(NamedTuple):
    """One thing that a plan says: `name` and `value` in JSON, `lines` in text.

    Without a name it is in the text only.
    """

    name: str
    value: Any = None
    lines: Sequence[str] = ()


def shard_fact(shard: Shard) -> Fact:
    """Return the part of all jobs that a shard has."""
    line = (
        f"shard {shard.index} of {shard.count}: {len(shard.jobs):,} of "
        f"{counted(shard.of_jobs, 'job')}, {shard.part:.1%} of the planned work; the largest "
        f"shard has {shard.largest:.2f} times the mean"
    )
    return Fact("shard", vars(shard) | {"jobs": len(shard.jobs)}, [line])


def work_facts(order: Plan, costs: PlanForecast, *, think: int) -> Iterator[Fact]:
    """Yield the work of each group, and of all if there are several."""
    groups, lines = list[dict[str, Any]](), list[str]()
    for number, (group, cost) in enumerate(zip(order.groups, costs.groups, strict=True), 1):
        facts: dict[str, Any] = {"model": group.model, "size_class": group.size_class}
        facts |= {"custom_ids": [job.custom_id for job in group.jobs]} | asdict(cost)
        size = group.size_class
        kind = "answers" if size == TEXT_CLASS else f"size {size}"
        lines.append(f"group {number}: {group.model}, {kind}")
        if isinstance(cost, VideoForecast):
            facts["decode"]["received_bytes"] = cost.decode.received_bytes
            facts["tiles"] = cost.decode.down, cost.decode.across
            del facts["tokens"], facts["heads"]
            lines += _video_lines(cost)
        else:
            lines += _picture_lines(cost, has_text=not isinstance(cost, LatentCost))
            lines += _joined_lines(cost) if isinstance(cost, LatentCost) else []
        groups.append(facts)
    yield Fact("groups", groups, lines)
    videos = [cost for cost in costs.groups if isinstance(cost, VideoForecast)]
    if len(videos) > 1:
        every, flops = sum(one.jobs for one in videos), sum(one.denoise_flops for one in videos)
        said = [f"all videos: {counted(every, 'job')}", f"  denoise: {_floor_text(flops)}"]
        yield Fact("", lines=said)
    pictures = [cost for cost in costs.groups if isinstance(cost, Cost)]
    has_text = any(not isinstance(cost, LatentCost) for cost in pictures)
    lines = ["all pictures:"] if len(pictures) > 1 else []
    lines += _picture_lines(costs.total, has_text=has_text) if lines else []
    if costs.total.texts:
        lines.append(f"  estimates assume {think:,} tokens of text per job, or its max_new_tokens")
    yield Fact("total", asdict(costs.total), lines)


def time_fact(eta: Eta) -> Fact:
    """Return the estimated time of a plan that has jobs, or how to get an estimate."""
    if eta.unknown:
        models = ", ".join(eta.unknown)
        return Fact(
            "time",
            None,
            [
                f"time: unknown, no earlier run of {models} had these settings and kinds of jobs",
                "  to measure it, run a few jobs with --limit 4, then plan again",
            ],
        )
    stages = eta.stages_s
    seconds = sum(stages.values())
    parts = ((_STAGES.get(name, name), s) for name, s in stages.items())
    lines = [
        f"time: about {time_text(seconds)}, from {counted(eta.runs, 'earlier run')}",
        "  " + ", ".join(f"{name} {time_text(s)}" for name, s in parts if s >= 0.05),
    ]
    return Fact("time", {"seconds": seconds, "runs": eta.runs, "stages": stages}, lines)


def memory_facts(order: Plan, config: RunConfig) -> Iterator[Fact]:
    """Yield the memory of each model's weights, and of the jobs that work together."""
    dtype, form = precision(config.model)[1], config.model.quantization
    form_text = f"in {dtype}" if form == "none" else f"in {form} and {dtype}"
    memory, networks = footprints(order, config), _networks(order, config)
    components = {model: one.loaded_bytes(dtype, form) for model, one in networks.items()}
    weights: dict[str, Any] = {model: one.weights for model, one in memory.items()}
    lines = list[str]()
    for model, one in memory.items():
        lines.append(f"  weights of {model}: {bytes_text(one.weights)}, {form_text}")
        lines += _footprint_lines(one)
    for model, sizes in components.items():
        parts = ", ".join(f"{name} {bytes_text(size)}" for name, size in sizes.items())
        packed = networks[model].packed
        as_stored = ", the transformer as stored" * bool(packed and packed.nbytes)
        lines.append(f"  weights of {model}: {parts}, {form_text}{as_stored}")
    yield Fact("weight_bytes", weights | components, lines)
    held = {model: asdict(one) | {"total": one.total} for model, one in memory.items()}
    # If layers are split over ranks, also by rank.
    by_rank = {model: ranks for model, one in held.items() if (ranks := one.pop("ranks"))}
    yield Fact("memory", held)
    if by_rank:
        yield Fact("memory_by_rank", by_rank)
    if config.model.cpu_offload != "none":
        is_by_block = config.model.cpu_offload == "group"
        what = "one network" + ", or one block of one," * is_by_block
        on_gpu = {model: networks_need(one, config).weights for model, one in networks.items()}
        said = [
            f"  {model}: {what} at a time is on the GPU, at most {bytes_text(on_gpu[model])}; main "
            f"memory holds up to {bytes_text(sum(sizes.values()))}"
            for model, sizes in components.items()
        ]
        yield Fact("on_gpu_bytes", on_gpu, said)
    part = config.batch.gpu_memory_utilization
    if part is not None:
        said = [
            f"  the limit of {part:g} of the GPU's memory is not checked here, because its size is "
            "not known; the run refuses a model that needs more"
        ]
        if memory:
            said.append(
                "  and makes batches smaller; [batch] memory_gb in a recipe plans for a size"
            )
        yield Fact("", lines=said)


def replicas_fact(replicas: int, config: RunConfig) -> Fact:
    """Return the number of replicas."""
    place = "a GPU each" if precision(config.model)[0] == "cuda" else "in one memory"
    said = [
        f"  {replicas} replicas, {place}: each needs this memory",
        "  counts are for one process; each replica encodes shared inputs once",
    ]
    return Fact("replicas", replicas, said if replicas > 1 else ())


def expert_fact(order: Plan, config: RunConfig, *, think: int) -> Fact:
    """Return the time to fetch experts from main memory, and how to avoid it."""
    link, lines = measured_link(config), list[str]()
    there = configured_memory(config) or (available_memory(config) if link else None)
    for model in dict.fromkeys(group.model for group in order.groups if isinstance(group, Group)):
        jobs = [job for job in order.jobs_of_model(model) if isinstance(job, ImageJob)]
        found = traffic(jobs, config, there, link or STATED_BYTES_S)
        rate = f"{(link or STATED_BYTES_S) / 1e9:.1f} GB/s, {'measured' if link else 'assumed'}"
        lines.append(
            f"  experts of {model}: {bytes_text(found.waiting)} in main memory, "
            f"{bytes_text(found.resident)} of them stay on the GPU; link speed: {rate}"
        )
        tokens = ", ".join(f"{s:.2g} s with {n} at once" for n, s in found.token_s.items())
        lines.append(
            f"    fetching takes {found.step_s:.2g} s per denoise step; per token {tokens}"
        )
        text_s = found.text_s(think)
        if any(job.writes_text for job in jobs) and text_s > _HOPELESS_TEXT_S:
            lines.append(
                f"    each text takes {time_text(text_s)}: skip texts with --bot-task none, or "
                "write them with `hyimg think` on a larger machine"
            )
    return Fact("", lines=lines)


def _networks(order: Plan, config: RunConfig) -> dict[str, Networks]:
    """Return the networks of each model that denoises latents."""
    choice, found = config.model, dict[str, Networks]()
    for group in order.groups:
        if isinstance(group, VideoGroup):
            card = registry.video_card(group.model, choice.revision, choice.video_components)
            found[group.model] = card
        elif own := registry.model_card(group.model, choice.revision).networks:
            found[group.model] = own
    return found


def _footprint_lines(memory: Footprint) -> Iterator[str]:
    texts, drawn = counted(memory.thinking, "text"), counted(memory.drawing, "picture")
    counts = f"memory for {texts} and {drawn} at once"
    if memory.ranks:
        yield f"  {counts}, by rank:"
        for own in memory.ranks:
            parts = f"{bytes_text(own['weights'])} of weights, {bytes_text(own['kv'])} of K/V"
            at_most = f"at most {bytes_text(own['activations'])} of activations"
            total = f"{bytes_text(own['total'])} in total"
            yield f"    rank {own['rank']}: {parts}, {at_most}; {total}"
        return
    kv = f"{bytes_text(memory.kv)} of K/V, " if memory.kv else ""
    parts = f"{kv}about {bytes_text(memory.activations)} of activations"
    yield f"  {counts}: {parts}; {bytes_text(memory.total)} in total"
    if memory.least < memory.total:
        yield f"  with less memory, fewer pictures at once: {bytes_text(memory.least)} for one"


def _picture_lines(cost: Cost, *, has_text: bool) -> Iterator[str]:
    """Yield lines on the work of pictures; `has_text`: some of their models have a text stage."""
    forwards = "" if has_text else f", {counted(cost.forwards, 'forward')}"
    steps = f", {_steps_text(cost)}" if cost.denoise_steps or not cost.prompt_rows else ""
    yield f"  {counted(cost.jobs, 'job')}{steps}{forwards}"
    if cost.prompt_rows:
        left = cost.prompt_rows - cost.shared_rows
        yield (
            f"  to read: {left:,} of {cost.prompt_rows:,} tokens of questions (jobs share the "
            f"others); answered by a choice: {cost.chosen:,}"
        )
    if not has_text:
        texts = counted(cost.prompt_encodes, "prompt")
        images = counted(cost.image_encodes, "source image")
        yield f"  to encode: {texts}, {images}; found in the disk cache: {cost.kept_encodes:,}"
        return
    if cost.texts:
        shared = f", for {cost.texts + cost.shared_texts:,} jobs" if cost.shared_texts else ""
        yield f"  to write: {counted(cost.texts, 'text')}, about {cost.think_rows:,} tokens{shared}"
    if cost.image_encodes or cost.kept_encodes:
        images, kept = counted(cost.image_encodes, "source image"), cost.kept_encodes
        yield f"  to encode: {images}; found in the disk cache: {kept:,}"


def _video_lines(video: VideoForecast) -> Iterator[str]:
    frames, rows, columns = video.latent_grid
    steps, calls = _steps_text(video), video.denoise_forwards
    forwards = f"{steps}, {counted(calls, 'forward')}"
    yield f"  {counted(video.jobs, 'job')}, {forwards} over {frames} x {rows} x {columns} latents"
    yield f"  denoise: {_floor_text(video.denoise_flops)}"
    yield f"  to encode: {counted(video.prompts, 'distinct prompt')}"
    yield from _rank_lines(video)
    latents = f"up to {bytes_text(video.latents_bytes)} of latents until each video is written"
    yield from _card_lines(video)
    if video.without_negative:
        yield (
            f"  {counted(video.without_negative, 'job')} with guidance but no negative prompt; the "
            "model's authors use a long one (--negative-prompt)"
        )
    yield f"  files: about {bytes_text(video.disk_bytes)}, plus {latents}"


def _card_lines(cost: VideoForecast | LatentCost) -> Iterator[str]:
    """Yield lines with a job's memory without weights, and the flags with which each GPU fits."""
    denoise, decode = (bytes_text(cost.memory[moment].work) for moment in ("denoise", "decode"))
    yield f"  memory besides weights: about {denoise} to denoise, {decode} to decode"
    yield f"  by GPU memory: {cards_text(cost.cards)}"


def _joined_lines(cost: LatentCost) -> Iterator[str]:
    """Yield lines on pictures that are denoised together, and on their memory."""
    if cost.joined > 1:
        yield (
            f"  denoised together: up to {cost.joined} jobs, at least "
            f"{counted(cost.joined_forwards, 'forward')} in all"
        )
    yield from _card_lines(cost)


def _steps_text(cost: Cost | VideoForecast) -> str:
    steps, left_out = counted(cost.denoise_steps, "denoise step"), cost.denoise_steps
    left_out -= cost.full_steps
    return f"{steps} ({left_out:,} of them estimated by a lossy step cache)" if left_out else steps


def _floor_text(flops: int) -> str:
    """Return the floating-point operations and the minimum time for them on a fast GPU."""
    units = (("PFLOP", 1e15), ("TFLOP", 1e12))
    unit, size = next((one for one in units if flops >= one[1]), ("GFLOP", 1e9))
    least = time_text(flops / _H100_FLOPS)
    return f"{flops / size:,.1f} {unit}; at least {least} on one H100 or H200"


def _rank_lines(video: VideoForecast) -> Iterator[str]:
    """Yield lines on how ranks share a video, and the maximum speed-up."""
    decode, each = video.decode, video.context_ranks
    if (count := len(decode.shares)) > 1:
        areas = " + ".join(f"{share.area:,}" for share in decode.shares)
        limit = f"speed-up limit {decode.speed_up_limit:.2f}"
        arriving = f"rank 0 receives {bytes_text(decode.received_bytes)}"
        yield f"  decode on {count} ranks: {areas} latent cells per frame, {arriving}; {limit}"
    branches, busy = counted(video.branches, "branch"), counted(video.branch_ranks, "rank")
    yield f"  guidance: {branches} on {busy}"
    if each > 1:
        yield (
            f"  tokens: {video.tokens:,} per forward on {each} ranks, {video.tokens // each:,} and "
            f"{video.heads // each} of {video.heads} attention heads each"
        )
