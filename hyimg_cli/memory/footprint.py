"""Count what a run will hold in memory at once, before anything is loaded; no torch.

    weights       as held once loaded: by dtype and quantization
    K/V           contexts of the jobs that think or wait, branches of those that draw; prefixes,
                  and the rows of encoded source images
    activations   of the widest forward at that moment

    moment   K/V                                                   activations
    think    every job's context                                   one job's prefill or its encode
    draw     the branches that draw, the contexts of the others    one denoise step, or a prefill
    decode   the contexts of the others                            one picture in the VAE

Rows that several hold are counted once: a branch shares those of its context, and of the branch
before it. The canvas is in no page; attention joins it to its prefix, one layer at a time, of all
branches where they are one call. The largest moment counts. If images are encoded while the model
works, that adds to any of them.
Weights and K/V are exact. Activations are compared with the count of
`tests/engine/test_fake_gpu.py` without a GPU: up to a tenth above it. The libraries' own memory (a
GPU's context, workspaces, an allocator's gaps, the nodes of CUDA graphs) is not included.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from hyimg_cli.errors import JobError
from hyimg_cli.journal.keys import by_graphs, here, precision
from hyimg_cli.manifest.cost import JobTokens
from hyimg_cli.manifest.written import Replay
from hyimg_cli.models.registry import model_card, sequences
from hyimg_cli.settings.run import Quantization, RunConfig
from hyimg_cli.spec.card import ModelCard, RankBytes, Working
from hyimg_cli.spec.gc_paused import gc_paused
from hyimg_cli.spec.job import ImageJob, Size
from hyimg_cli.spec.plan import Group, Plan
from hyimg_cli.spec.work import picture_work

# Tokens around a text that was cut at its limit, which does not include them.
_TAGS = 2
# Tokens after both: they open the picture, up to the ratio token.
_BEHIND_TEXT = 6
# Number of encoded source images that a session keeps in memory.
ENCODED_BYTES = 2_000_000_000
# Usable fraction of the memory that weights leave free; the rest is for what is not counted.
_USABLE_PERCENT = 85
# A graph serves the next larger number of rows; sizes grow by at most half.
_GRAPH_ROWS = 1.5


class JobBytes(NamedTuple):
    """Bytes of one job.

    K/V of its `context` while it thinks and of its `branches` while it draws, and of `both` in
    addition while they are built if they share nothing; activations of a denoise `step`, of its
    longest `prefill`, and of the keys and values of its branches `joined` in one layer.
    """

    context: int = 0
    branches: int = 0
    step: int = 0
    prefill: int = 0
    both: int = 0
    joined: int = 0


class Together(NamedTuple):
    """The maximum number of jobs that think together, and of jobs that draw."""

    thinking: int
    drawing: int


@dataclass(frozen=True)
class Footprint:
    """Bytes held at once while this many jobs think and draw, at the `moment` that takes most.

    `least`: the total with one drawing at a time. `ranks`: bytes of each rank if there are several;
    weights and K/V exactly, activations at most those of one process.
    """

    thinking: int
    drawing: int
    moment: str
    weights: int
    kv: int
    activations: int
    least: int = 0
    ranks: Sequence[Mapping[str, int]] = ()

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.activations


@dataclass(frozen=True)
class Needs:
    """A group's need in addition to weights: each part's maximum over jobs, and shared parts.

    `share`: of a job. `encode`, `decode`: of a picture in the VAE; `prefetch`: of an encode that
    may run at the same time. `forward`: of any forward. `kept`: prefixes shared with later jobs,
    and encoded source images. `joins`: jobs arrive, and decode, while others draw.
    """

    jobs: int
    share: JobBytes
    encode: int = 0
    decode: int = 0
    prefetch: int = 0
    forward: Working = field(default_factory=Working)
    kept: int = 0
    has_graphs: bool = False
    joins: bool = False

    def widest(self, together: Together, weights: int = 0) -> Footprint:
        """Return the moment that takes most, with as many at work as `together` says."""
        share, drawing = self.share, min(together.drawing, self.jobs)
        # Fewer jobs wait to draw than draw together when another one begins to think.
        alive = min(self.jobs, together.thinking + drawing - 1)
        others = alive - drawing
        drawn = others * share.context + drawing * share.branches + share.both
        forward = share.joined + self.forward.fixed
        at_work = max(drawing * share.step, share.prefill) + forward
        at_work += (drawing - 1) * share.joined
        opening = max(share.prefill + forward, self.encode)
        moments = {
            "think": (alive * share.context, opening),
            "draw": (drawn, at_work),
            "decode": (others * share.context, self.decode),
        }
        if self.joins:
            kv = max(alive * share.context, drawn)
            moments = {"draw": (kv, max(at_work, opening, self.decode))}
        moment, (kv, activations) = max(moments.items(), key=lambda held: sum(held[1]))
        activations += self.prefetch
        if self.has_graphs:  # of decode steps; all share the memory of the widest
            rows = int(_GRAPH_ROWS * min(together.thinking, self.jobs))
            activations += rows * self.forward.row + self.forward.fixed
        return Footprint(*together, moment, weights, kv + self.kept, activations)

    def fitting(self, room: int, most: int) -> Together:
        """Return how many jobs fit in `room` bytes, `most` of each, and at least one.

        Jobs that think are fitted first, then jobs that draw: a decode step gains from every row
        that joins it; a denoise step is full with few pictures.
        """

        def has_room(thinking: int, drawing: int) -> bool:
            return self.widest(Together(thinking, drawing)).total <= room

        counts = range(most, 1, -1)
        thinking = next((count for count in counts if has_room(count, 1)), 1)
        return Together(thinking, next((n for n in counts if has_room(thinking, n)), 1))


@dataclass(frozen=True)
class Need:
    """Bytes in the memory that holds most of a model: weights, K/V and activations.

    Of the jobs at `work`. `waiting`: main memory, for networks that take turns on a GPU.
    """

    weights: int
    work: int = 0
    waiting: int = 0

    @property
    def total(self) -> int:
        """Return the bytes that must be free, with the margin for what is not counted."""
        return self.weights - (-self.work * 100 // _USABLE_PERCENT)


def held_form(config: RunConfig) -> tuple[str, Quantization]:
    """Return the dtype and quantization in which a run will hold its weights."""
    return precision(config.model)[1], config.model.quantization


def number_width(config: RunConfig) -> int:
    """Return the size of a number relative to bfloat16."""
    return 2 if held_form(config)[0] == "float32" else 1


def kv_bytes_per_token(card: ModelCard, config: RunConfig) -> int:
    """Return the bytes of one token's K/V in the dtype that the run will choose."""
    return card.kv_bytes_per_token * number_width(config)


def _share(job: ImageJob, config: RunConfig, kv: int, layers: int, row: int) -> JobBytes:
    """Return the bytes of one job on the device and in the dtype of `config`.

    `kv`: of a token in so many `layers`; `row`: of a forward's row. A job whose sequence cannot be
    built fails later, for its own reason, and takes nothing.
    """
    replay = Replay.of(job)  # a text that is fed again takes the memory of a written one
    job = replay.job if replay else job
    tokens = tokens_of(job, config.model.revision, job.text.max_new_tokens + _TAGS)
    context = tokens.ar_prefill and tokens.ar_prefill + tokens.assumed_think + _BEHIND_TEXT
    apart = tokens.branches * tokens.positive
    # Branches on ranks of their own share a context alone.
    is_together = context > 0 or config.parallel.cfg_ranks == 1
    rows = tokens.kv_rows if config.reuse.kv_reuse and is_together else None
    is_shared = config.reuse.kv_reuse and not job.drop_think
    return JobBytes(
        context=context * kv,
        branches=(rows or apart) * kv,
        step=tokens.branches * tokens.step_rows * row,
        prefill=tokens.positive * row,
        both=0 if is_shared else context * kv,
        joined=tokens.branches * (tokens.positive + tokens.step_rows) * kv // layers,
    )


def prompt_tokens(job: ImageJob, revision: str | None) -> int:
    """Return the tokens before a job's picture, without unwritten text; 0 if it will fail."""
    return tokens_of(job, revision, 0).positive


def tokens_of(job: ImageJob, revision: str | None, written: int) -> JobTokens:
    """Return the tokens of a job that writes this many, with square sources; zeros if it fails."""
    try:
        return sequences(job.model, revision).count(job, [Size(1, 1)] * len(job.images), written)
    except JobError:
        return JobTokens()


def working(card: ModelCard, config: RunConfig) -> Working:
    """Return the activations of a forward on the device and in the dtype of `config`."""
    choice = config.model
    kind = "cpu" if precision(choice)[0] == "cpu" else choice.quantization
    if kind == "fp8" and not choice.machine and here().has_gpu:
        import torch

        from hyimg_cli.kernels.choice import takes_scaled

        # A GPU without FP8 row products unpacks the experts for theirs, as for NF4.
        if torch.cuda.is_available() and not takes_scaled(torch.cuda.get_device_capability()):
            kind = "nf4"
    found = card.activations.get(kind, Working())
    width = number_width(config)
    return Working(found.row * width, found.fixed * width)


def needs(
    jobs: Sequence[ImageJob], card: ModelCard, config: RunConfig, *, prefixes: int | None = None
) -> Needs:
    """Return the needs of a group.

    `prefixes`: the maximum bytes of kept shared K/V, by default the run's.
    """
    choice, kind = config.model, precision(config.model)[0]
    # Called once, because there may be many jobs.
    forward, kv = working(card, config), kv_bytes_per_token(card, config)
    # Few differ.
    shares = Counter(_share(job, config, kv, card.kv_layers, forward.row) for job in jobs)
    largest = max(bucket.size.height * bucket.size.width for bucket in card.buckets)
    share = JobBytes(*map(max, zip(*shares, strict=True)))
    branches = sum(one.branches * count for one, count in shares.items())
    room = config.batch.prefix_cache_mb * 1_000_000 if prefixes is None else prefixes
    # With offloaded experts, the VAE waits in main memory too: a half of it comes for each turn.
    halves = card.vae_halves if choice.offloads_experts else (0, 0)
    images = {view for job in jobs for view in job.views}
    encode = halves[0] + card.vae_bytes(largest, kind) if images else 0
    pixels = max(picture_work(job.parts[0], card).pixels for job in jobs)
    decode = halves[1] + card.vae_bytes(pixels, kind, in_tiles=bool(choice.vae_use_tiling))
    # The jobs hold rows of the source images, and so does a bounded memo.
    rows = len(images) * (1 + largest // card.pixels_per_cell**2 + card.source_vit_tokens)
    return Needs(
        jobs=len(jobs),
        share=share,
        encode=encode,
        decode=decode,
        prefetch=encode if prefetches_sources(config) else 0,
        forward=forward,
        kept=min(room, branches) + min(ENCODED_BYTES, rows * card.row_bytes * number_width(config)),
        has_graphs=by_graphs(replace(choice, model=card.model), config.parallel.picture_ranks),
    )


def prefetches_sources(config: RunConfig) -> bool:
    """True if images are encoded while the model works.

    By default on one GPU, which leaves the CPU free, unless experts may have that memory. A model
    spread over GPUs encodes in turn: its encoders may be on any of them.
    """
    choice, asked = config.model, config.batch.prefetches_sources
    by_default = choice.device != "balanced" and not choice.offloads_experts
    return precision(choice)[0] == "cuda" and by_default if asked is None else asked


def held_weights(card: ModelCard, config: RunConfig) -> int:
    """Return the bytes of a model's weights in the memory that has most of them.

    That is one GPU of several ranks, or main memory for all ranks.
    """
    held = _by_rank(card, config)
    return held.first + (_ranks_together(config) - 1) * held.other


def picture_need(
    card: ModelCard, config: RunConfig, jobs: Sequence[ImageJob], together: int
) -> Need:
    """Return a picture model's need with this many of `jobs` at work `together`.

    Without jobs, its weights.
    """
    waiting = work = 0
    if config.model.offloads_experts:
        waiting = card.weights.experts_nbytes(*held_form(config)) + sum(card.vae_halves)
    if jobs:
        found = _in_fullest_memory(needs(jobs, card, config, prefixes=0), card, config)
        work = found.widest(Together(together, together)).total
    return Need(held_weights(card, config), work, waiting)


def _in_fullest_memory(whole: Needs, card: ModelCard, config: RunConfig) -> Needs:
    """Return the same with the part of K/V in that memory, as a session of ranks counts it."""
    share, part = whole.share, _by_rank(card, config).kv_share * _ranks_together(config)
    fields = ("context", "branches", "both", "joined")
    parts = {name: round(getattr(share, name) * part) for name in fields}
    return replace(whole, share=share._replace(**parts))


def _ranks_together(config: RunConfig) -> int:
    """Return how many ranks share the fullest memory, rank 0's: on GPUs each has its own."""
    return config.parallel.picture_ranks if precision(config.model)[0] == "cpu" else 1


def _by_rank(card: ModelCard, config: RunConfig) -> RankBytes:
    """Return the bytes of weights on each rank, and each rank's part of all K/V."""
    if config.parallel.picture_ranks == 1:
        return RankBytes(_whole(card, config), 0, 1.0)
    known = sequences(card.model, config.model.revision)
    return known.rank_bytes(config.parallel.tensor_ranks, *held_form(config))


def _whole(card: ModelCard, config: RunConfig) -> int:
    """Return the bytes of weights that one process loads; with offload, those on the device."""
    waits = config.model.offloads_experts
    return card.loaded_bytes(*held_form(config), offloads_experts=waits)


def footprint(jobs: Sequence[ImageJob], card: ModelCard, config: RunConfig) -> Footprint:
    """Return the maximum that one model's jobs take.

    As many work together as fit into `config.batch.memory_gb`; without it, as many as allowed: a
    session that finds less free memory lets fewer work together. Prefixes that are kept for later
    jobs are not counted: they are dropped before a job lacks memory.
    """
    found, weights = needs(jobs, card, config, prefixes=0), _whole(card, config)
    by_rank, count = _by_rank(card, config), config.parallel.picture_ranks
    most, memory = min(config.batch.max_size, len(jobs)), config.batch.memory_bytes
    together = Together(most, most)
    if memory is not None:
        room = usable_bytes(memory - held_weights(card, config))
        together = _in_fullest_memory(found, card, config).fitting(room, most)
    least = found.widest(Together(together.thinking, 1), weights).total
    whole = found.widest(together, weights)
    kv, activations = round(whole.kv * by_rank.kv_share), whole.activations
    ranks = [
        {"rank": rank, "weights": own, "kv": kv, "activations": activations}
        | {"total": own + kv + activations}
        for rank, own in enumerate([by_rank.first] + [by_rank.other] * (count - 1))
    ]
    return replace(whole, least=least, ranks=ranks if count > 1 else ())


@gc_paused()
def footprints(plan: Plan, config: RunConfig) -> dict[str, Footprint]:
    """Return by picture model the group that takes most. One model is loaded at a time."""
    found: dict[str, Footprint] = {}
    for group in plan.groups:
        if isinstance(group, Group):
            card = model_card(group.model, config.model.revision)
            if card.networks is not None:  # see `memory.videos`
                continue
            one = footprint(group.jobs, card, config)
            found[group.model] = max(found.get(group.model, one), one, key=lambda it: it.total)
    return found


def usable_bytes(free: int) -> int:
    """Return the bytes for K/V and activations, of the free bytes after loading the weights.

    The rest is a margin.
    """
    return free * _USABLE_PERCENT // 100
