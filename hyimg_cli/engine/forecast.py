"""Forecast what a plan computes, without weights or torch.

What is encoded is exact before anything runs. Texts that are not written yet have an assumed
length.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

from hyimg_cli.cache.disk import PROMPT_EMBEDDINGS, SOURCE_IMAGES, DiskStore
from hyimg_cli.errors import CheckpointError, JobError, SourceImageError
from hyimg_cli.journal.keys import UNREADABLE, device_name, precision, source_digest, source_key
from hyimg_cli.manifest.cost import Cost, JobTokens, step_cost, total_cost
from hyimg_cli.manifest.planner import TextIdentity, group_by, text_identity
from hyimg_cli.media.images import view_size
from hyimg_cli.memory.fit import cards_for
from hyimg_cli.memory.footprint import Need, tokens_of
from hyimg_cli.memory.videos import most_joined, needs_of, tiles_of
from hyimg_cli.models import registry
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.spec.card import Networks
from hyimg_cli.spec.gc_paused import gc_paused
from hyimg_cli.spec.job import ImageJob, TextJob
from hyimg_cli.spec.plan import Group, Plan, VideoGroup
from hyimg_cli.spec.work import film_bytes, video_work
from hyimg_cli.tiling.tiles import DecodeForecast, tile_plan
from hyimg_cli.tiling.tiles import forecast as decode_forecast


@dataclass(frozen=True)
class VideoForecast:
    """The work of a group of videos.

    `latent_grid`: latent frames, rows, columns. `full_steps`: the `denoise_steps` that the
    transformer computes with a step cache. `denoise_forwards`: the transformer's forwards in all
    branches; `denoise_flops`: a lower bound of their operations. `tile_shapes`: the distinct tile
    shapes of the VAE's decode, rows and columns of latents. `prompts`: distinct texts to embed if
    none is on disk.

    `disk_bytes`: approximate size of the files; `latents_bytes`: size of the latents kept for one
    video until its file is written. `decode`: its tiles, and how they are spread over the run's
    ranks. `branches`: the maximum number of guidance branches of a job, on `branch_ranks`.
    `context_ranks` share the `tokens` and attention `heads` of each branch.

    `memory`: of one video on its device; `cards`: by GPU size, the flags with which it fits.
    `without_negative`: jobs to which the model's authors would have given a negative prompt.
    """

    jobs: int
    latent_grid: tuple[int, int, int]
    denoise_steps: int
    full_steps: int
    denoise_forwards: int
    denoise_flops: int
    tile_shapes: tuple[tuple[int, int], ...]
    prompts: int
    disk_bytes: int
    latents_bytes: int
    decode: DecodeForecast
    branches: int
    branch_ranks: int
    context_ranks: int
    tokens: int
    heads: int
    memory: Mapping[str, Need]
    cards: Mapping[str, str | None]
    without_negative: int


@dataclass(frozen=True)
class LatentCost(Cost):
    """The cost of pictures whose model only denoises latents.

    `memory` and `cards` are as for videos, for the job that needs the most memory. `joined`: the
    maximum of jobs that are denoised together; `joined_forwards`: the minimum of forwards then,
    with prompts of equal length.
    """

    joined: int = 1
    joined_forwards: int = 0
    memory: Mapping[str, Need] = field(default_factory=dict)
    cards: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True)
class PlanForecast:
    """The cost of each group in plan order, and of all pictures."""

    groups: tuple[Cost | VideoForecast, ...]
    total: Cost


@gc_paused()
def forecast(plan: Plan, config: RunConfig, *, assumed_think: int) -> PlanForecast:
    """Forecast every group of `plan`; source images are not decoded."""
    ahead, groups = Forecast(config, assumed_think), list[Cost | VideoForecast]()
    for group in plan.groups:
        if isinstance(group, VideoGroup):
            groups.append(_forecast_videos(group, config, plan))
            continue
        cost = total_cost(ahead.cost(job, plan) for job in group.jobs)
        card = registry.model_card(group.model, config.model.revision)
        if (networks := card.networks) is not None:
            job = max(group.jobs, key=lambda job: len(job.images))
            joined, forwards = _joined(group, networks, config, plan)
            cost = LatentCost(
                **vars(cost),
                joined=joined,
                joined_forwards=forwards,
                memory=needs_of(job, networks, config, joined=joined),
                cards=cards_for(job, networks, config),
            )
        groups.append(cost)
    return PlanForecast(tuple(groups), total_cost(one for one in groups if isinstance(one, Cost)))


def _joined(group: Group, networks: Networks, config: RunConfig, plan: Plan) -> tuple[int, int]:
    """Return the maximum of jobs that are denoised together, and the forwards of all batches."""
    known = registry.sequences(group.model, config.model.revision)

    def key(part: ImageJob) -> object:
        own = None if config.batch.is_invariant else known.batch_key(part)
        return part if own is None else (plan.begun_of(part), own)

    joined, forwards = 1, 0
    for same, parts in group_by([part for job in group.jobs for part in job.parts], key).items():
        part, most = parts[0], 1
        if same is not part:
            most = min(len(parts), most_joined(part, networks, config))
        tokens = JobTokens(branches=known.card.branches(part))
        each = step_cost(part, tokens, plan.begun_of(part).step).forwards
        joined, forwards = max(joined, most), forwards + -(-len(parts) // most) * each
    return joined, forwards


def _forecast_videos(group: VideoGroup, config: RunConfig, plan: Plan) -> VideoForecast:
    """Forecast a group of videos; figures for a single job are those of the first one."""
    card = registry.video_card(group.model, config.model.revision, config.model.video_components)
    is_wide = card.has_float32_vae or precision(config.model)[1] == "float32"
    branches = max(job.branch_count for job in group.jobs)
    works = [video_work(job, card, plan.begun_of(job).step) for job in group.jobs]
    left = [job for job in group.jobs if not plan.begun_of(job).is_denoised]
    job, first, with_frames = group.jobs[0], works[0], config.output.frames != "none"
    cell_bytes = job.num_frames * 3 * card.pixels_per_cell**2 * (4 if is_wide else 2)
    rule, grid = tiles_of(card, config.model), first.grid[1:]
    if not config.model.tiles_decodes:
        rule = replace(rule, tile=max(grid), stride=max(grid))
    return VideoForecast(
        jobs=len(group.jobs),
        latent_grid=first.grid,
        denoise_steps=sum(work.steps for work in works),
        full_steps=sum(work.full_steps for work in works),
        denoise_forwards=sum(work.forwards for work in works),
        denoise_flops=sum(work.flops for work in works),
        tile_shapes=tuple(dict.fromkeys(tile.shape for tile in tile_plan(rule, *grid).tiles)),
        prompts=len({text for job in left for text in job.texts}),
        disk_bytes=film_bytes(sum(work.pixels for work in works), with_frames=with_frames),
        latents_bytes=first.latents_bytes,
        decode=decode_forecast(rule, grid, config.parallel.vae_ranks, cell_bytes),
        branches=branches,
        branch_ranks=min(branches, config.parallel.cfg_ranks),
        context_ranks=config.parallel.context_ranks,
        tokens=first.tokens,
        heads=card.context_heads,
        memory=needs_of(job, card, config),
        cards=cards_for(job, card, config),
        without_negative=sum(
            card.wants_negative and one.branch_count > 1 and not one.negative_prompt
            for one in group.jobs
        ),
    )


class Forecast:
    """Counts jobs in the order in which they will run; each job can use what earlier ones left."""

    def __init__(self, config: RunConfig, assumed_think: int) -> None:
        self._config, self._assumed_think = config, assumed_think
        self._seen: set[tuple[str, str, Any]] = set()
        self._texts: set[TextIdentity] = set()
        # Beginnings of questions' prompts, as keys of their segments after the model.
        self._prompts: set[tuple[str, ...]] = set()
        self._digest_of = cache(source_digest)
        self.card_of = partial(registry.model_card, revision=config.model.revision)
        self._store = DiskStore(config.cache.folder, config.cache.budget_bytes)

    def cost(self, job: ImageJob, plan: Plan) -> Cost:
        """Return the job's cost from where an earlier run left it."""
        card, begun = self.card_of(job.model), plan.begun_of(job)
        if card.denoises_latents:
            tokens = JobTokens(branches=card.branches(job))
        else:
            think = min(self._assumed_think, job.text.max_new_tokens)
            tokens = tokens_of(job, self._config.model.revision, think)
        cost = step_cost(job, tokens, begun.step)
        will_fail = not (tokens.positive or card.denoises_latents)
        if begun.is_denoised or will_fail:
            return cost
        cost = replace(cost, **self.encodes(job))
        if isinstance(job, TextJob):
            cost = replace(cost, **self._prompt_rows(job), chosen=int(not job.writes_text))
        is_read = UNREADABLE not in map(self._digest_of, job.images)
        text = text_identity(job, card) if is_read and tokens.ar_prefill else None
        if text is None:
            return cost
        if text in self._texts:
            return replace(cost, shared_texts=1)
        self._texts.add(text)
        return replace(cost, texts=1, think_rows=tokens.assumed_think)

    def _prompt_rows(self, job: TextJob) -> dict[str, int]:
        """Return the tokens of a question's prompt, and those that earlier ones have computed."""
        known = registry.sequences(job.model, self._config.model.revision)
        try:
            whole = known.count(job, [*map(view_size, job.views)], 0).ar_prefill
        except (SourceImageError, JobError):  # the job will fail
            return {}
        segments = known.prefixes(job)[0]
        keys = [job.model, *(one.key for one in segments)]
        paths = [tuple(keys[:stop]) for stop in range(2, len(keys) + 1)]
        seen = sum(path in self._prompts for path in paths)
        self._prompts.update(paths)
        # Pictures count as the smallest in the segments, and in their size in the whole.
        behind = 1 + sum(one.length for one in segments[seen:])
        return {"prompt_rows": whole, "shared_rows": whole - behind if seen else 0}

    def encodes(self, job: ImageJob) -> dict[str, int]:
        """Return the numbers of texts and images to encode, and of those kept by an earlier run.

        What an earlier job has encoded is not counted.
        """
        known = registry.sequences(job.model, self._config.model.revision)
        files = [self._digest_of(path) for path in job.images]
        seen = (one for part in job.parts for one in known.encodings(part, files))
        asked = {(job.model, *one) for one in seen}
        if not self._config.reuse.prompt_cache:  # each job embeds its own prompts
            self._seen = {one for one in self._seen if one[1] != PROMPT_EMBEDDINGS}
        new = asked - self._seen
        self._seen |= new
        left = Counter(kind for _, kind, item in new if not self._is_kept(job.model, kind, item))
        texts, images = left[PROMPT_EMBEDDINGS], left[SOURCE_IMAGES]
        kept = len(new) - texts - images
        return {"prompt_encodes": texts, "image_encodes": images, "kept_encodes": kept}

    def _is_kept(self, model: str, kind: str, item: Any) -> bool:
        """True if an earlier run has left an encoding on disk."""
        choice, (device, dtype) = self._config.model, precision(self._config.model)
        is_off = kind == PROMPT_EMBEDDINGS and not self._config.reuse.prompt_cache
        if is_off or not self._store.takes_more:
            return False
        try:
            if self.card_of(model).denoises_latents:
                known = registry.sequences(model, choice.revision)
                key = known.encoding_key(item, choice, dtype, device_name(choice))
            else:
                weights = registry.fingerprint(model, choice.revision)
                key = source_key(item, weights, device=device, dtype=dtype)
        except CheckpointError:  # without local weights, nothing has been encoded
            return False
        return self._store.has(kind, key)
