"""`hyimg plan`: count what `generate` would do: groups, tokens, steps, tiles, bytes; no torch."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

import typer

from hyimg_cli.cli import render
from hyimg_cli.cli.progress import show_remark
from hyimg_cli.cli.request import request_of
from hyimg_cli.cli.shard import remark_unsplit
from hyimg_cli.engine import runner
from hyimg_cli.engine.eta import Eta, KeptRates
from hyimg_cli.engine.forecast import LatentCost, PlanForecast, VideoForecast, forecast
from hyimg_cli.engine.sources import inspect_sources
from hyimg_cli.errors import MachineError
from hyimg_cli.journal.bucket import run_folder
from hyimg_cli.journal.keys import precision
from hyimg_cli.journal.resume import resume
from hyimg_cli.manifest.cost import Cost
from hyimg_cli.manifest.planner import make_plan
from hyimg_cli.memory.available import available_memory, configured_memory
from hyimg_cli.memory.fit import cards_text, check_fit
from hyimg_cli.memory.footprint import Footprint, footprints
from hyimg_cli.memory.offload import STATED_BYTES_S, measured_link, traffic
from hyimg_cli.memory.videos import networks_need
from hyimg_cli.models import registry
from hyimg_cli.scoring.best_of import drafts_of
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


def plan(ctx: typer.Context) -> None:
    """Show what generate would do, without loading a model or writing files. Exit code 3: a model
    does not fit into the memory that memory_gb sets.
    """
    render.log_to_stderr(ctx.params["verbose"])
    raise typer.Exit(show_plan(ctx.params))


def show_plan(given: Mapping[str, Any]) -> int:
    """Print the plan for the remaining jobs and return the exit code; writes no files."""
    style = render.style_of(given)
    render.remarks(remark_unsplit(given["shard"]), style)
    request = drafts_of(request_of(given))
    config = request.config
    if config.candidates.draft_steps:
        picked = config.candidates.keep
        said = f"the plan is of the drafts; then {picked} of each line will be drawn in full"
        render.remarks([said], style)
    every, invalid = runner.accept(request.manifest, request.settings)
    every, cards = tuple(request.change(every)), runner.cards(config.model.revision)
    if not invalid:  # a faulty line may be of the kind that the setting affects
        render.remarks(runner.remarks(request.settings, every), style)
    jobs, shard = request.selection.of(every, config.model.revision)
    found = inspect_sources(jobs, config, lambda it: show_remark(it, style), fetches=True)
    rest = resume(run_folder(config.output.folder), jobs, config, request.policy)
    to_run = [job for job in rest.to_run if not found.error_of(job)]
    order = replace(make_plan(to_run, cards), begun=rest.begun)
    costs = forecast(order, config, assumed_think=given["assume_think"])
    networks = _networks(order, config)
    held_as = precision(config.model)[1], config.model.quantization
    components = {model: one.loaded_bytes(*held_as) for model, one in networks.items()}
    on_gpu = {model: networks_need(one, config).weights for model, one in networks.items()}
    memory = footprints(order, config, shared_kv_bytes=costs.shared_kv_bytes)
    replicas = runner.replicas_of(order, config)
    too_large = dict(_too_large(order, config, replicas))
    code = MachineError.exit_code if too_large else 0
    rates = KeptRates(config)
    eta = Eta(order, config, rates.read(order))
    render.remarks(rates.take_notes(), style)
    if given["as_json"]:
        stages = eta.stages_s
        time = {"seconds": sum(stages.values()), "runs": eta.runs, "stages": stages}
        held = {model: asdict(one) | {"total": one.total} for model, one in memory.items()}
        # If layers are split over ranks, also by rank.
        by_rank = {model: ranks for model, one in held.items() if (ranks := one.pop("ranks"))}
        weights: dict[str, Any] = {model: one.weights for model, one in memory.items()}
        facts = _as_json(order, costs) | {"weight_bytes": weights | components, "memory": held}
        facts |= {"memory_by_rank": by_rank} if by_rank else {}
        facts |= {"replicas": replicas, "time": None if eta.unknown else time}
        facts |= {"too_large": too_large}
        facts |= {"on_gpu_bytes": on_gpu} if config.model.cpu_offload != "none" else {}
        facts |= {"shard": vars(shard) | {"jobs": len(shard.jobs)}} if shard else {}
        facts |= {"skipped": rest.done}
        facts |= {"untried": [job.custom_id for job in rest.to_run if found.error_of(job)]}
        facts |= {"finished_again": [job.custom_id for job in rest.to_finish]}
        render.json_line(facts)
        return code
    if shard:
        render.line(
            f"shard {shard.index} of {shard.count}: {len(shard.jobs):,} of "
            f"{counted(shard.of_jobs, 'job')}, {shard.part:.1%} of the planned work; the largest "
            f"shard has {shard.largest:.2f} times the mean"
        )
    before = f", {len(rest.done):,} already done" if rest.done else ""
    before += f", {len(rest.to_finish):,} to finish again without a model" if rest.to_finish else ""
    for text in (
        *_lines(order, costs, think=given["assume_think"]),
        f"total: {counted(len(order.groups), 'group')}{before}",
        *(_time_lines(eta) if to_run else ["time: nothing left to run"]),
        *_memory_lines(memory, components, _form_text(*held_as)),
        *(f"  {model} does not fit into {why}" for model, why in too_large.items()),
        *_limit_lines(components, on_gpu, config, replicas, has_pictures=bool(memory)),
        *_expert_lines(order, config, think=given["assume_think"]),
    ):
        render.line(text)
    return code


def _time_lines(eta: Eta) -> Iterator[str]:
    """Yield lines with the estimated time, or with how to get an estimate."""
    if eta.unknown:
        models = ", ".join(eta.unknown)
        yield f"time: unknown, no earlier run of {models} had these settings and kinds of jobs"
        yield "  to measure it, run a few jobs with --limit 4, then plan again"
        return
    stages = eta.stages_s
    seconds = time_text(sum(stages.values()))
    yield f"time: about {seconds}, from {counted(eta.runs, 'earlier run')}"
    parts = ((_STAGES.get(name, name), seconds) for name, seconds in stages.items())
    yield "  " + ", ".join(f"{name} {time_text(s)}" for name, s in parts if s >= 0.05)


def _networks(order: Plan, config: RunConfig) -> dict[str, Networks]:
    """Return the networks of each model that denoises latents."""
    choice, found = config.model, dict[str, Networks]()
    for group in order.groups:
        if isinstance(group, VideoGroup):
            card = registry.video_card(group.model, choice.revision, choice.components)
            found[group.model] = card
        elif own := registry.model_card(group.model, choice.revision).networks:
            found[group.model] = own
    return found


def _form_text(dtype: str, quantization: str) -> str:
    """Return the precision of weights, as `in bfloat16` or `in fp8 and bfloat16`."""
    return f"in {dtype}" if quantization == "none" else f"in {quantization} and {dtype}"


def _memory_lines(
    memory: Mapping[str, Footprint], components: Mapping[str, dict[str, int]], form: str
) -> Iterator[str]:
    for model, one in memory.items():
        yield f"  weights of {model}: {bytes_text(one.weights)}, {form}"
        texts, drawn = counted(one.thinking, "text"), counted(one.drawing, "picture")
        counts = f"memory for {texts} and {drawn} at once"
        if one.ranks:
            yield f"  {counts}, by rank:"
            for own in one.ranks:
                parts = f"{bytes_text(own['weights'])} of weights, {bytes_text(own['kv'])} of K/V"
                at_most = f"at most {bytes_text(own['activations'])} of activations"
                total = f"{bytes_text(own['total'])} in total"
                yield f"    rank {own['rank']}: {parts}, {at_most}; {total}"
            continue
        parts = f"{bytes_text(one.kv)} of K/V, about {bytes_text(one.activations)} of activations"
        yield f"  {counts}: {parts}; {bytes_text(one.total)} in total"
        if one.least < one.total:
            yield f"  with less memory, fewer pictures at once: {bytes_text(one.least)} for one"
    for model, sizes in components.items():
        parts = ", ".join(f"{name} {bytes_text(size)}" for name, size in sizes.items())
        yield f"  weights of {model}: {parts}, {form}"


def _too_large(order: Plan, config: RunConfig, replicas: int) -> Iterator[tuple[str, str]]:
    """Yield each model that does not fit into `memory_gb`, with that limit and a remedy."""
    there = configured_memory(config, replicas=replicas)
    if there is None:
        return
    for model in dict.fromkeys(group.model for group in order.groups):
        jobs = order.jobs_of_model(model)
        found = check_fit(model, jobs, config, there)
        if not found.is_enough:
            yield model, f"{bytes_text(there.free)}: {found.remedy}"


def _limit_lines(
    components: Mapping[str, dict[str, int]],
    on_gpu: Mapping[str, int],
    config: RunConfig,
    replicas: int,
    *,
    has_pictures: bool,
) -> Iterator[str]:
    """Yield lines on replicas, offload and the share of GPU memory, below the memory figures."""
    if replicas > 1:
        place = "a GPU each" if precision(config.model)[0] == "cuda" else "in one memory"
        yield f"  {replicas} replicas, {place}: each needs this memory"
        yield "  token counts are for one process; each replica computes shared parts once"
    if config.model.cpu_offload != "none":
        is_by_block = config.model.cpu_offload == "group"
        what = "one network" + ", or one block of one," * is_by_block
        for model, sizes in components.items():
            most, every = bytes_text(on_gpu[model]), bytes_text(sum(sizes.values()))
            yield (
                f"  {model}: {what} at a time is on the GPU, at most {most}; main memory holds "
                f"up to {every}"
            )
    part = config.batch.gpu_memory_utilization
    if part is not None:
        yield (
            f"  the limit of {part:g} of the GPU's memory is not checked here, because its size is "
            "not known; the run refuses a model that needs more"
        )
        if has_pictures:
            yield "  and makes batches smaller; [batch] memory_gb in a recipe plans for a size"


def _expert_lines(order: Plan, config: RunConfig, *, think: int) -> Iterator[str]:
    """Yield lines on experts in main memory: the time to fetch them, and how to avoid it."""
    if not config.model.offloads_experts:
        return
    link = measured_link(config)
    there = configured_memory(config) or (available_memory(config) if link else None)
    for model in dict.fromkeys(group.model for group in order.groups if isinstance(group, Group)):
        jobs = [job for job in order.jobs_of_model(model) if isinstance(job, ImageJob)]
        found = traffic(jobs, config, there, link or STATED_BYTES_S)
        rate = f"{(link or STATED_BYTES_S) / 1e9:.1f} GB/s, {'measured' if link else 'assumed'}"
        yield (
            f"  experts of {model}: {bytes_text(found.waiting)} in main memory, "
            f"{bytes_text(found.resident)} of them stay on the GPU; link speed: {rate}"
        )
        tokens = ", ".join(f"{s:.2g} s with {n} at once" for n, s in found.token_s.items())
        yield f"    fetching takes {found.step_s:.2g} s per denoise step; per token {tokens}"
        text_s = found.text_s(think)
        if any(job.writes_text for job in jobs) and text_s > _HOPELESS_TEXT_S:
            yield (
                f"    each text takes {time_text(text_s)}: skip texts with --bot-task none, or "
                "write them with `hyimg think` on a larger machine"
            )


def _as_json(order: Plan, costs: PlanForecast) -> dict[str, Any]:
    groups: list[dict[str, Any]] = []
    for group, cost in zip(order.groups, costs.groups, strict=True):
        facts: dict[str, Any] = {"model": group.model, "size_class": group.size_class}
        facts |= {"custom_ids": [job.custom_id for job in group.jobs]} | asdict(cost)
        if isinstance(cost, VideoForecast):
            facts["decode"]["received_bytes"] = cost.decode.received_bytes
            facts["tiles"] = cost.decode.down, cost.decode.across
            del facts["tokens"], facts["heads"]
        groups.append(facts)
    shared = {"shared_kv_bytes": costs.shared_kv_bytes}
    return {"groups": groups, "total": asdict(costs.total)} | shared


def _lines(order: Plan, costs: PlanForecast, *, think: int) -> Iterator[str]:
    """Yield the plan as text: a block for each group, then totals if there are several."""
    videos = list[VideoForecast]()
    for number, (group, cost) in enumerate(zip(order.groups, costs.groups, strict=True), 1):
        yield f"group {number}: {group.model}, size {group.size_class}"
        if isinstance(cost, VideoForecast):
            videos.append(cost)
            yield from _video_lines(cost)
        else:
            yield from _cost_lines(cost, has_text=not isinstance(cost, LatentCost))
            if isinstance(cost, LatentCost):
                yield from _card_lines(cost)
    if len(videos) > 1:
        flops = sum(video.denoise_flops for video in videos)
        yield f"all videos: {counted(sum(video.jobs for video in videos), 'job')}"
        yield f"  denoise: {_floor_text(flops)}"
    pictures = [cost for cost in costs.groups if isinstance(cost, Cost)]
    has_text = any(not isinstance(cost, LatentCost) for cost in pictures)
    if len(pictures) > 1:
        yield "all pictures:"
        yield from _cost_lines(costs.total, has_text=has_text)
    if has_text or costs.shared_kv_bytes:
        yield f"  K/V that jobs share: {bytes_text(costs.shared_kv_bytes)}"
    if has_text:
        yield f"  estimates assume {think:,} tokens of text per job, or its max_new_tokens"


def _video_lines(video: VideoForecast) -> Iterator[str]:
    frames, rows, columns = video.latent_grid
    steps, calls = _steps_text(video), video.denoise_forwards
    forwards = f"{steps}, {counted(calls, 'forward')}"
    yield f"  {counted(video.jobs, 'job')}, {forwards} over {frames} x {rows} x {columns} latents"
    yield f"  denoise: {_floor_text(video.denoise_flops)}"
    yield f"  to encode: {counted(video.prompts, 'distinct prompt')}"
    shapes = " ".join(f"{height}x{width}" for height, width in video.tile_shapes)
    tiles = f"{video.decode.down} x {video.decode.across}"
    yield f"  decode: {tiles} tiles per video, of {shapes} latents"
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
    """Yield lines on how much of a video each rank decodes, and the maximum speed-up."""
    decode = video.decode
    areas = " + ".join(f"{share.area:,}" for share in decode.shares)
    ranks = counted(len(decode.shares), "rank")
    limit = f"speed-up limit {decode.speed_up_limit:.2f}"
    received = decode.received_bytes
    arriving = f", rank 0 receives {bytes_text(received)}" if received else ""
    yield f"  decode on {ranks}: {areas} latent cells per frame{arriving}; {limit}"
    branches, busy = counted(video.branches, "branch"), counted(video.branch_ranks, "rank")
    yield f"  guidance: {branches} on {busy}"
    each = video.context_ranks
    if each > 1:
        yield (
            f"  tokens: {video.tokens:,} per forward on {each} ranks, {video.tokens // each:,} and "
            f"{video.heads // each} of {video.heads} attention heads each"
        )


def _cost_lines(cost: Cost, *, has_text: bool) -> Iterator[str]:
    """Yield lines on the cost of pictures; `has_text`: some of their models have a text stage."""
    jobs, steps, kv = counted(cost.jobs, "job"), _steps_text(cost), bytes_text(cost.kv_bytes_peak)
    saved = cost.prefix_rows_unshared - cost.prefix_rows
    reused = f"denoising: reuses {saved:,} of {cost.prefix_rows_unshared:,} prompt tokens"
    forwards = "" if has_text else f", {counted(cost.forwards, 'forward')}"
    about = "" if has_text or cost.kv_bytes_peak else "about "
    yield f"  {jobs}, {steps}{forwards} over {about}{cost.denoise_rows:,} tokens"
    if not has_text:
        texts = counted(cost.prompt_encodes, "prompt")
        images = counted(cost.image_encodes, "source image")
        yield f"  to encode: {texts}, {images}; found in the disk cache: {cost.kept_encodes:,}"
        if cost.kv_bytes_peak:
            yield f"  {reused}; K/V at most {kv}"
        return
    every = cost.ar_prefill_rows + cost.ar_shared_rows
    read = f"computes {cost.ar_prefill_rows:,} of {every:,} prompt tokens"
    yield f"  text stage: {read} (jobs share the others), writes about {cost.think_rows:,} tokens"
    if cost.shared_texts:
        texts = f"{counted(cost.texts, 'text')} for {cost.texts + cost.shared_texts:,} pictures"
        yield f"  shared texts: {texts}, which saves about {cost.spared_think_rows:,} tokens"
    yield f"  {reused}"
    yield f"  source images to encode: {cost.image_encodes:,}; K/V at most {kv}"
