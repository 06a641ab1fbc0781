"""Whole requests through the engine's loop: read, encode, prefill, think, denoise, decode.

Sources are pictures of noise in memory; no file is read or written. Requests share nothing. With
random weights no text ends early: each thinks to its limit.
"""

import math
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from random_network import quantization_of
from workload import Scale, Workload, source

from hyimg_cli.kernels.devices import synchronize
from hyimg_cli.kv.tree import KVTree
from hyimg_cli.memory.available import batch_sizes
from hyimg_cli.memory.footprint import Together, needs
from hyimg_cli.models.hunyuan_image3.family import HunyuanImage3
from hyimg_cli.pipelines.clock import PhaseClock
from hyimg_cli.pipelines.image.admission import WholeBatches
from hyimg_cli.pipelines.image.batch import ContinuousBatch
from hyimg_cli.pipelines.image.branches import Prefixes
from hyimg_cli.pipelines.image.stages import ImageRequest, ImageStages, encoded_by
from hyimg_cli.pipelines.queue import Ticket
from hyimg_cli.settings.run import BatchConfig, ModelChoice, OutputConfig, ReuseConfig, RunConfig
from hyimg_cli.spec.events import Progress
from hyimg_cli.spec.job import ImageJob
from shapes.timing import Deadline


@dataclass(frozen=True)
class Requests:
    """This many requests, with this many denoise steps each, with guidance or without.

    `uses_graphs`: text is decoded by CUDA graphs, as the command does by default.
    """

    count: int
    steps: int
    guidance: float
    uses_graphs: bool = True

    @property
    def name(self) -> str:
        plural = "s" * (self.count > 1)
        cfg = "CFG" if self.guidance > 1 else "no CFG"
        graphs = "" if self.uses_graphs else ", no graphs"
        return f"{self.count} request{plural}, {self.steps} steps, {cfg}{graphs}"


@dataclass(frozen=True)
class Served:
    """Results of the requests.

    `is_cut`: time ran out, and seconds are for a part only. `is_whole`: the network has all its
    layers. `phases_s`: median over the finished requests; each includes a group's whole time.
    `notes`: warnings for the requests' lines. `planned_bytes` and `peak_bytes` are of the same run;
    None without a GPU.
    """

    name: str
    form: str
    layers: int
    is_whole: bool
    thinking: int
    drawing: int
    finished: int
    failed: tuple[str, ...]
    is_cut: bool
    seconds: float
    seconds_each: float | None
    events: dict[str, int]
    phases_s: dict[str, float]
    notes: tuple[str, ...]
    planned_bytes: int
    peak_bytes: int | None


def plan_of(scale: Scale) -> tuple[Requests, ...]:
    """Plan one request, then several together, the last with as many steps as time allows."""
    return (
        Requests(1, scale.steps, 2.5),
        Requests(1, scale.fast_steps, 1.0),
        Requests(1, scale.fast_steps, 1.0, uses_graphs=False),
        Requests(scale.together, scale.fast_steps, 1.0),
        Requests(scale.together, scale.steps, 2.5),
    )


def affordable(requests: Requests, done: Sequence[Served], left_s: float) -> int:
    """Return the denoise steps for which time is left, judging by one request and by many."""
    alone = [s for s in done if s.name.startswith("1 request,") and s.seconds_each]
    many = [s for s in done if not s.name.startswith("1 request,") and s.seconds_each]
    if requests.count == 1 or not alone or not many:
        return requests.steps
    denoise = sum(alone[0].phases_s.get(name, 0.0) for name in ("denoise_first", "denoise_rest"))
    steps = alone[0].events["denoise"]
    per_step = requests.count * denoise / max(1, steps)
    return min(requests.steps, math.floor((0.9 * left_s - many[0].seconds) / per_step))


def serve(
    requests: Requests, model: HunyuanImage3, load: Workload, form: str, deadline: Deadline
) -> Served:
    """Run them until they are done, or time is up; graphs are captured before that."""
    how = {"steps": requests.steps, "guidance": requests.guidance}
    jobs = [load.request(n, **how) for n in range(requests.count)]
    device = model.layer_devices[0]
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    config = _config(jobs, model, load, form)
    together = batch_sizes(jobs, model, config)
    if model.graphs is not None:
        model.graphs.prepare(min(together.thinking, len(jobs)))
    started = time.perf_counter()
    run = ContinuousBatch(
        WholeBatches(
            (Ticket(job, submitted=started) for job in jobs),
            _studio(model, load),
            lambda since: PhaseClock(since, partial(synchronize, [device])),
        ),
        together,
    )
    events: Counter[str] = Counter()
    drawn: list[ImageRequest] = []
    timings: list[dict[str, float]] = []
    failed: list[str] = []
    is_cut = False
    for event in run.run():
        if isinstance(event, Progress) and event.done:
            events[event.phase] += 1
        if isinstance(event, ImageRequest):
            drawn.append(event)
            timings.append(event.clock.timings_s())
        elif (error := getattr(event, "error", None)) is not None:
            failed.append(f"{type(error).__name__}: {error}"[:300])
        if deadline.left_s < 0:
            is_cut = True
            break
    synchronize([device])
    seconds = time.perf_counter() - started
    is_done, phases = not is_cut and not failed, timings[0] if timings else ()
    return Served(
        name=requests.name,
        form=form,
        layers=len(model.layer_devices),
        is_whole=len(model.layer_devices) == load.scale.layers,
        thinking=together.thinking,
        drawing=together.drawing,
        finished=len(drawn),
        failed=tuple(failed),
        is_cut=is_cut,
        seconds=seconds,
        seconds_each=seconds / len(drawn) if is_done else None,
        events=dict(events),
        phases_s={name: statistics.median(t[name] for t in timings) for name in phases},
        notes=tuple(dict.fromkeys(note for end in drawn for note in (*end.warnings, *end.notes))),
        planned_bytes=_planned(jobs, load, config, together),
        peak_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
    )


def _studio(model: HunyuanImage3, load: Workload) -> ImageStages:
    return ImageStages(
        model=model,
        reuse=ReuseConfig(),
        prefixes=Prefixes(KVTree(0), "benchmark"),
        read_source=lambda view: (source(view.path, load.scale.size), 0.0),
        encode=lambda image: (encoded_by(model, image), 0.0),
    )


def _config(jobs: list[ImageJob], model: HunyuanImage3, load: Workload, form: str) -> RunConfig:
    """Return the command's run for them; images are encoded in turn, and none are shared."""
    choice = ModelChoice(
        model=jobs[0].model,
        device=model.layer_devices[0].type,
        dtype="bfloat16" if model.dtype_name == "bfloat16" else "float32",
        quantization=quantization_of(form),
        decode_graphs="off" if model.graphs is None else "on",
    )
    batch = BatchConfig(max_size=len(jobs), prefix_cache_mb=0, prefetches_sources=False)
    return RunConfig(OutputConfig(load.prompter.folder), model=choice, batch=batch)


def _planned(jobs: list[ImageJob], load: Workload, config: RunConfig, together: Together) -> int:
    """Return the plan of `hyimg plan` for such a run: weights, K/V and activations."""
    card = load.prompter.card
    weights = card.loaded_bytes(config.model.dtype, config.model.quantization)
    return weights + needs(jobs, card, config).widest(together).total
