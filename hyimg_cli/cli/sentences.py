"""Sentences about a run: its events, its finished jobs, its end."""

import logging

from hyimg_cli.engine.run import RunPlanned
from hyimg_cli.engine.runner import Summary
from hyimg_cli.settings.values import shown
from hyimg_cli.spec.events import (
    ModelLoaded,
    ModelLoading,
    ModelReleased,
    Outcome,
    Prewarmed,
    PromptsReady,
    Readiness,
    ReplicaDied,
    VideoFile,
)
from hyimg_cli.spec.units import bytes_text, counted, time_text

logger = logging.getLogger(__name__)


def status(run: RunPlanned, doing: str) -> str:
    """Return a run's status: what it is doing, the time so far, and the time left."""
    parts = [doing, f"{time_text(run.eta.elapsed_s)} so far"]
    rate, seconds = run.summary.seconds_per_picture, run.eta.left_s
    parts += [] if rate is None else [f"{time_text(rate)} a job"]
    parts.append("time left: unknown" if seconds is None else f"about {time_text(seconds)} left")
    return ", ".join(parts)


def read_text(read: int, nbytes: int) -> str:
    """Return how many bytes of weights are read; empty if unknown."""
    if not (read and nbytes):
        return ""
    size, unit = (1e9, "GB") if nbytes >= 1e9 else (1e6, "MB")
    return f"{min(read, nbytes) / size:.1f} of {nbytes / size:.1f} {unit}"


def summary(counts: Summary, place: str) -> str:
    """Return a sentence with the counts, the times, and the folder of the results."""
    parts = [f"{counts.done:,} done", f"{counts.failed:,} failed", f"{counts.skipped:,} skipped"]
    parts += [f"{counts.invalid:,} invalid"] if counts.invalid else []
    parts += [f"{counts.left:,} left"] if counts.left else []
    parts += counts.remarks
    parts += [f"{counts.lossy:,} lossy (step cache)"] if counts.lossy else []
    tokens = counts.prompt_tokens_computed + counts.prompt_tokens_reused
    if tokens and logger.isEnabledFor(logging.INFO):
        parts.append(f"{counts.prompt_tokens_reused:,} of {tokens:,} prompt tokens reused")
    parts += [f"model loaded in {time_text(counts.load_s)}"] if counts.load_s else []
    parts += [f"prewarmed in {time_text(counts.prewarm_s)}"] if counts.prewarm_s else []
    parts += [f"prompts embedded in {time_text(counts.encode_s)}"] if counts.encode_s else []
    parts += [f"blocks compiled in {time_text(counts.compile_s)}"] if counts.compile_s else []
    rate = counts.seconds_per_picture
    parts += [f"{time_text(rate)} per {counts.noun}"] if rate is not None else []
    return f"{', '.join(parts)}; results in {place}"


def describe_readiness(event: Readiness) -> str:
    """Return a sentence on an event of a session, or of one of several replicas."""
    who = "" if event.replica is None else f"replica {event.replica}: "
    match event:
        case ModelLoading():
            return f"{who}loading {event.model}"
        case ReplicaDied():
            again = "starting a new one" if event.starts_again else "it is not started again"
            return f"{who}died ({event.why}) while running {counted(event.jobs, 'job')}; {again}"
        case Prewarmed():
            graphs = f" and {event.graphs} CUDA graphs" if event.graphs else ""
            shapes = counted(event.shapes, "shape")
            told = ", ".join(f"{count:,}" for count in event.tokens)
            texts = f" with texts of up to {told} tokens" if told else ""
            return f"{who}prewarmed {shapes}{texts}{graphs} in {time_text(event.prewarm_s)}"
        case PromptsReady():
            made = f"{event.encoded:,} of {event.strings:,} distinct {event.what} embedded"
            kept = ", the others came from the cache" if event.encoded < event.strings else ""
            return f"{who}{made} in {time_text(event.encode_s)}{kept}"
        case ModelReleased():
            needed, free = bytes_text(event.needed_bytes), bytes_text(event.free_bytes)
            return f"{who}{event.model} unloaded: the next needs {needed}, {free} were free"
    assert isinstance(event, ModelLoaded), "every other one has its sentence above"
    size = f"{event.parameters / 1e6:.1f} M parameters, {event.dtype} on {event.device}"
    ranks = f", {event.ranks} ranks" if event.ranks > 1 else ""
    beside = f", in addition to {', '.join(event.beside)}" if event.beside else ""
    took = f"loaded in {time_text(event.load_s)}{beside}"
    offload = f"; {event.offload}" if event.offload else ""
    return f"{who}{event.model}: {size}{ranks}, {took}{offload}"


def describe_outcome(outcome: Outcome) -> str:
    """Return one line on a finished job."""
    if outcome.error is not None:
        hint = f" ({outcome.error.hint})" if outcome.error.hint else ""
        text = f"{outcome.custom_id}: failed[{outcome.error.code}]: {outcome.error.message}{hint}"
    else:
        text = f"{outcome.custom_id}: {_describe_results(outcome)}"
    return "; ".join((text, *outcome.warnings, *outcome.notes))


def _describe_results(outcome: Outcome) -> str:
    """Return the result files of a job, how long it took, and how it was made."""
    # Includes only the job's share of the time in which jobs ran together.
    seconds = time_text(outcome.share_s.get("total", 0.0))
    if not (outcome.outputs or outcome.denoise_steps):
        # A rewritten prompt has a number of tokens, not the tokens.
        count = len(outcome.cot_token_ids or ()) or (outcome.written or {}).get("tokens", 0)
        return f"{count} tokens in {seconds}"
    if outcome.finish is not None or outcome.mass is not None:
        answer = "no answer" if outcome.answer is None else shown(outcome.answer)
        return f"{answer} in {seconds}"
    paths = ", ".join(file.path for file in outcome.outputs)
    is_video = any(isinstance(file, VideoFile) for file in outcome.outputs)
    status = outcome.kv_reuse.status if outcome.kv_reuse and not is_video else ""
    # A hit is expected, so only -v shows it.
    is_told = status and (status != "hit" or logger.isEnabledFor(logging.INFO))
    reuse = f", KV reuse {status}" if is_told else ""
    cache = outcome.step_cache
    lossy = "" if cache is None else f", {cache.estimated} of them estimated (lossy)"
    return f"{paths} in {seconds}, {outcome.denoise_steps} steps{lossy}{reuse}"
