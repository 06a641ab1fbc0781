"""Resolve a line: its own values, then the run's settings, then checkpoint defaults.

Faults that depend on the model and the settings, and the jobs themselves, are made in `pictures`
and `videos`.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from hyimg_cli.errors import HyimgError, SourceImageError
from hyimg_cli.manifest.fields import OF_MODELS
from hyimg_cli.manifest.line import ManifestLine, fault
from hyimg_cli.media.images import size_of
from hyimg_cli.settings.config import Setting, as_given
from hyimg_cli.settings.paths import is_hub_file, linked
from hyimg_cli.settings.run import JobKind
from hyimg_cli.settings.table import Field
from hyimg_cli.spec.card import ModelCard, SamplingDefaults, VideoCard, VideoDefaults
from hyimg_cli.spec.digest import seed_from
from hyimg_cli.spec.job import ALONE, LINEAGE, Job, Lineage, Size
from hyimg_cli.spec.options import MAX_SEED, Lora
from hyimg_cli.spec.step_cache import FEWEST_STEPS, StepCache, count_full

_LORA_IN_LINE = "paths in a manifest are relative to it"
_LORA_OF_FLAG = "takes a path from the working folder, or OWNER/REPOSITORY/FILE of the hub"


@cache
def unfollowed(follows: frozenset[str], kind: JobKind) -> tuple[Field, ...]:
    """Return options and fields of a kind of job that a model does not follow.

    `follows`: of its card.
    """
    return tuple(
        field
        for field in OF_MODELS
        if field.name not in follows and field.concerns(kind, denoises_latents=True)
    )


@dataclass(frozen=True)
class ResolvedLine:
    """A line's own `fields`, and all `values`: fields, then settings, then checkpoint defaults.

    Paths are relative to the working folder. `child_ids`: of the jobs that it asks for. `faults`
    are the line's faults for this model and these settings; `job` makes one of the results, counted
    from 0. `defaults`: the checkpoint's. `made`: the sizes of results that lines edit, by id; None
    if the model will choose it.
    """

    line: ManifestLine
    fields: Mapping[str, Any]
    values: Mapping[str, Any]
    settings: Mapping[str, Setting]
    model: str
    child_ids: Sequence[str]
    card: ModelCard | VideoCard
    defaults: SamplingDefaults | VideoDefaults
    made: Mapping[str, Size | None]
    kind: ClassVar[JobKind]

    def faults(self) -> Iterator[HyimgError]:
        """Yield the line's faults; only one for an option that its model does not follow."""
        found = dict(self._unfollowed_faults())
        yield from found.values()
        for one in self.faults_together():
            if one.where.rpartition(": ")[2] not in found:
                yield one

    def faults_together(self) -> Iterator[HyimgError]:
        """Yield faults of values that do not go together, or not with the model."""
        raise NotImplementedError

    def _unfollowed_faults(self) -> Iterator[tuple[str, HyimgError]]:
        """Yield options that ask for something else than what the model does anyway."""
        for field in unfollowed(self.card.follows, self.kind):
            default = getattr(self.defaults, field.name, None)
            if self.values.get(field.name, default) != default:
                what = f"{self.card.name} does not follow {field.name}"
                if why := self.card.reasons.get(field.name):
                    what += f": {why}"
                yield field.name, self.fault("not-followed", what, field.name, "remove it")

    def size_of(self, job: Job) -> Size | None:
        """Return the size of one of its results; None if it is not known before the run."""
        return None

    def own(self, index: int) -> dict[str, Any]:
        """Return the fields of a job that do not come from a setting alone."""
        lineage, fields = ALONE, self.fields
        if fields.keys() & {"candidate_of", "draft_of"}:
            lineage = Lineage(**{name: fields[name] for name in LINEAGE if name in fields})
        elif len(self.child_ids) > 1:
            lineage = Lineage(fields["custom_id"], index)
        return {
            "custom_id": self.child_ids[index],
            "task": fields["task"],
            "prompt": fields["prompt"],
            "images": self.images,
            "model": self.model,
            "file_name": self.values["name"],
            "metadata_json": fields.get("metadata", "null"),
            "extra_json": self.line.extra_json,
            "source_line": self.line.where,
            "user_fields": self.line.given,
            "lineage": lineage,
        }

    def seed(self, index: int) -> int:
        """Return a result's seed: as listed, counted up from the one given, or made from its id."""
        if seeds := self.fields.get("seeds"):
            return int(seeds[index])
        base = self.values["seed"]
        return seed_from(self.child_ids[index]) if base is None else count_up(base, index)

    @property
    def images(self) -> tuple[str, ...]:
        """Return the paths of the line's pictures."""
        return tuple(self.fields.get("images", ()))

    def source_size(self, index: int) -> Size | None:
        """Return a picture's size; None for a result of unknown size, or a file that fails the job.

        A file's is from its header.
        """
        if name := linked(self.images[index]):
            return self.made.get(name)
        try:
            return size_of(self.images[index])
        except SourceImageError:
            return None

    def step_cache_faults(self, *, is_distilled: bool) -> Iterator[HyimgError]:
        """Yield faults of a step cache that a plain run of as few steps would match or beat.

        `is_distilled`: the model or the schedule is a few-step one.
        """
        rule: StepCache | None = self.values["step_cache"]
        if rule is None:
            return
        steps, hint = self.values["num_inference_steps"], 'use "none" here, or more steps'
        if is_distilled:
            what = "a model distilled to few steps has no steps that a step cache could leave out"
            hint = 'use "none" here'
        elif steps < FEWEST_STEPS:
            what = f"a step cache needs at least {FEWEST_STEPS} steps; the job has {steps}"
        elif count_full(rule, steps) == steps:
            what = f"the step cache would leave out none of the {steps} steps"
        else:
            return
        yield self.fault("step-cache", what, "step_cache", hint)

    def lora_faults(self, *, has_two: bool) -> Iterator[HyimgError]:
        """Yield faults of LoRAs for another number of transformers, and of missing files."""
        loras: tuple[Lora, ...] = self.values["lora"]
        places = {one.on for one in loras}
        if loras and has_two and places != {"high", "low"}:
            what = "this model has two transformers, so it needs a pair of LoRA files"
            hint = "write high=FILE;low=FILE; use none for a transformer without a LoRA"
            yield self.fault("lora", what, "lora", hint)
        if places - {""} and not has_two:
            what = "this model has one transformer, without high and low"
            yield self.fault("lora", what, "lora", "give only the file")
        for one in loras:
            if one.file and not os.path.isfile(one.file) and not is_hub_file(one.file):
                what, hint = f"LoRA file not found: {one.file}", _LORA_IN_LINE
                if "lora" not in self.line.given:
                    hint = f"{as_given(self.settings['lora'])} {_LORA_OF_FLAG}"
                yield self.fault("lora", what, "lora", hint)

    def fault(self, slug: str, what: str, name: str, hint: str) -> HyimgError:
        """Return a fault at the line's field, or at the setting that gave the value.

        A field that no setting gives, such as a task that follows from the images, is the line's.
        """
        is_own = name in self.line.given or name not in self.settings
        place = self.line.where if is_own else self.settings[name].origin
        return fault(slug, what, f"{place}: {name}", hint)

    def unused(self, name: str, reason: str) -> HyimgError:
        """Return the fault of a field that would change nothing."""
        return self.fault("unconsumed", f"it has no effect: {reason}", name, "remove the field")


def count_up(seed: int, by: int) -> int:
    """Return the seed that comes `by` after another."""
    # The same object for the first: new ones for a million jobs would take 30 MB.
    return (seed + by) % (MAX_SEED + 1) if by else seed
