"""Turn a manifest line that asks for pictures into jobs, and find what its model cannot do."""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import log, sqrt
from typing import cast

from hyimg_cli.errors import HyimgError, SourceImageError
from hyimg_cli.finishing.crops import Crop, around, crops_of, holds, shared_out
from hyimg_cli.manifest.fields import COT_FIELDS
from hyimg_cli.manifest.line import fault, idle_fields
from hyimg_cli.manifest.resolved_line import ResolvedLine, count_up
from hyimg_cli.media.carried import check_region, region_parts
from hyimg_cli.settings.paths import linked
from hyimg_cli.spec.card import ModelCard, SamplingDefaults
from hyimg_cli.spec.job import Encoding, ImageJob, Job, Size, SizeRequest
from hyimg_cli.spec.model_name import names_file
from hyimg_cli.spec.options import (
    DRAWING,
    FINISHING,
    PICTURE_OPTIONS,
    TEXT_OPTIONS,
    Box,
    KeepOutside,
    RegionMode,
    TextSampling,
    box_text,
    boxes_text,
)
from hyimg_cli.spec.units import counted

# Most of a million jobs have the same value, so they share one object.
_text_sampling = lru_cache(1024, typed=True)(TextSampling)
_file_encoding = lru_cache(1024, typed=True)(Encoding)
# A source with more pixels per side than this, by those that are drawn, loses detail that shows.
_MOST_PER_DRAWN = 1.5
_MEGAPIXEL = 1024**2
# Each crop would need a text of its own.
_ONE_TEXT = "the text before the picture is written for one crop only"
# Settings by which a crop is chosen.
_OF_CROPS = ("region_size", "region_context", "region_pixels")


@lru_cache(64)
def crop_sizes(card: ModelCard, megapixels: float | None) -> tuple[Size, ...]:
    """Return the sizes in which a model draws crops; empty for an area that it does not."""
    return card.crop_sizes(None if megapixels is None else round(megapixels * _MEGAPIXEL))


def sampling_defaults(card: ModelCard, *, is_edit: bool) -> SamplingDefaults:
    """Return the checkpoint's own sampling defaults, for an edit or a new picture."""
    return (is_edit and card.edit_defaults) or card.defaults


@dataclass(frozen=True)
class PictureLine(ResolvedLine):
    """A line that asks for pictures."""

    card: ModelCard
    defaults: SamplingDefaults
    kind = "pictures"

    def faults_together(self) -> Iterator[HyimgError]:
        fields = self.fields
        settled = {**fields, "use_system_prompt": self.values["use_system_prompt"]}
        for name, reason in idle_fields(settled, self.line.given, self.values["bot_task"]).items():
            yield self.unused(name, reason)
        if fields.get("use_system_prompt") == "custom" and self.values["system_prompt"] is None:
            what, hint = "custom needs a system_prompt", "write the system_prompt"
            yield self.fault("missing-field", what, "use_system_prompt", hint)
        # The line has one result, or all its results are the same.
        if len(self.child_ids) == 1:
            if "vary" in self.line.given:
                yield self.unused("vary", "the line has one result")
        elif self.values["vary"] == "text":
            # A text that no seed changes makes its seed unused.
            given = {"ar_seed"} | self.line.given & {*COT_FIELDS}
            if why := idle_fields(self.values, given, self.values["bot_task"]).get("ar_seed"):
                equal = f"{len(self.child_ids)} equal pictures"
                what = f"varying only the text would give {equal}: {why}"
                yield self.fault("vary", what, "vary", "use vary: picture")
        if "components" in fields and not names_file(self.model):
            yield self.unused("components", "the model is not one file")
        count, most = len(self.images), self.card.most_images
        if self._inpaints:
            most = self.card.most_sources
        if count > most:
            limit = f"at most {most}" if most else "none"
            what = f"{counted(count, 'source image')}, but {self.card.name} takes {limit}"
            hint = "remove the others" if most else "name a model that edits pictures"
            if count == 1 and self.card.inpaints:
                what = f"{self.card.name} sees no source image; it can only draw in a region of one"
                hint = f"give a region and --region-mode inpaint, or {hint}"
            yield self.fault("too-many-images", what, "images", hint)
        elif count < self.card.fewest_images:
            what = f"{self.card.name} only edits pictures, and the line has none"
            yield self.fault("task", what, "task", "set task it2i and images")
        if "ratio_index" in fields and self._of_ratio(fields["ratio_index"]) is None:
            known = [f"{bucket.ratio_index} is {bucket.size}" for bucket in self.card.buckets]
            names = ", ".join(known if len(known) < 5 else [known[0], "…", known[-1]])
            what = f"the model has no ratio {fields['ratio_index']}"
            hint = f"{names}; or remove it and give size"
            yield self.fault("out-of-range", what, "ratio_index", hint)
        beyond = [n for n in fields.get("cot_token_ids", ()) if n >= self.card.vocab_size]
        if beyond:
            what = f"{beyond[0]} is not a token of the model"
            hint = f"its tokens are 0 to {self.card.vocab_size - 1}"
            yield self.fault("out-of-range", what, "cot_token_ids", hint)
        if self._is_aligned and not self._keeps_outside and not self._size().is_auto:
            # Of a line and a setting, the line counts.
            is_own = bool({"size", "width", "height"} & self.line.given)
            if is_own == ("infer_align_image_size" in self.line.given):
                what = f"it gives the edit its source's shape, but size is {self._size()}"
                name = "infer_align_image_size"
                yield self.fault("conflict", what, name, "remove it, or the size")
        yield from self.step_cache_faults(is_distilled=self.card.is_distilled)
        yield from self.lora_faults(has_two=False)
        # Options that the file's format does not support, or implies.
        kind, is_lossless = self.values["format"], self.values["lossless"]
        if kind == "jpeg" and is_lossless:
            yield self.fault("conflict", "JPEG cannot be lossless", "lossless", "use webp or png")
        if "lossless" in self.line.given and is_lossless and kind == "png":
            yield self.unused("lossless", "PNG is always lossless")
        # A quality of 100 asks a file without loss for nothing: it is OpenAI's default for a PNG.
        has_quality = "quality" in self.line.given and self.values["quality"] != 100
        if has_quality and self._encoding().quality is None:
            what = "a PNG" if kind == "png" else "a lossless WebP"
            yield self.unused("quality", f"{what} has none")
        yield from self._layer_faults()
        yield from self._outside_faults()

    def _layer_faults(self) -> Iterator[HyimgError]:
        """Yield what a picture in transparent layers cannot have."""
        name, size = self.card.name, self._size()
        if self.card.draws_layers:
            if self.values["format"] == "jpeg":
                what = f"{name} draws transparent layers, which JPEG cannot hold"
                yield self.fault("conflict", what, "format", "use png or webp")
            if self._keeps_outside:
                what = f"{name} draws layers, of which none is put back on the source"
                yield self.fault("conflict", what, "keep_outside", "remove it")
        if self.card.edit_sides and not size.is_auto and self._fitted(size) is None:
            squares = [f"{side}x{side}" for side in self.card.edit_sides]
            what = f"{name} draws its source's shape in the area of {' or '.join(squares)}"
            hint = f"give {' or '.join(squares)} for the area, or remove it"
            yield self.fault("out-of-range", f"{what}, not {size}", "size", hint)

    def _fitted(self, size: SizeRequest) -> SizeRequest | None:
        """Return the size of an edit by a model of a few areas; None if it draws none of `size`."""
        rule, source = self.card.size_by_source, self.source_size(0) if self.images else None
        assert rule is not None, "sizes follow the source"
        for side in self.card.edit_sides:
            drawn = rule(side, source) if source else Size(side, side)
            if not size.is_ratio and Size(size.height, size.width) in (drawn, Size(side, side)):
                return SizeRequest(drawn.height, drawn.width)
        return None

    def _outside_faults(self) -> Iterator[HyimgError]:
        """Yield faults of options that an edit with `keep_outside` excludes or requires."""
        fields = self.fields
        if not self._keeps_outside:
            why = "it needs keep_outside"
            if not fields.get("images"):
                why = "there is no source image to keep"
            names = {*DRAWING, "crop", *_OF_CROPS, *FINISHING}
            for name in sorted(names & self.line.given):
                yield self.unused(name, why)
            return
        number, images = self.values["kept_source"], fields["images"]
        if number > len(images):
            what = f"kept_source is {number}, but the line has {counted(len(images), 'image')}"
            yield self.fault("out-of-range", what, "kept_source", "count images from 1")
            return
        if self._encoding().quality is not None:
            kind = "a JPEG" if self.values["format"] == "jpeg" else "a lossy WebP"
            what = f"keep_outside cannot work with {kind}, which changes every pixel"
            yield self.fault("conflict", what, "format", "use png, or webp with lossless")
        if "infer_align_image_size" in self.line.given and not fields["infer_align_image_size"]:
            what = "keep_outside includes infer_align_image_size"
            yield self.fault("conflict", what, "infer_align_image_size", "remove the field")
        mode = self._region_mode
        if mode == "inpaint" and not self.card.inpaints:
            what = f"{self.card.name} cannot draw in a region only"
            yield self.fault("conflict", what, "region_mode", 'use "limit" or "instead"')
        elif mode == "inpaint" and not self.values["region"]:
            what = "inpainting needs a region in which the model draws"
            yield self.fault("conflict", what, "region_mode", "give a region")
            return
        elif mode != "inpaint" and "strength" in self.line.given:
            yield self.unused("strength", f"region_mode is {mode}")
        if not self.values["region"]:
            for name in sorted({"region_mode", "region_keeps", "max_spill"} & self.line.given):
                yield self.unused(name, "there is no region")
        source, asked = self._kept_size(), self._size()
        name = linked(images[number - 1])
        if source is None and name in self.made:
            what = f'the size of "{name}" is not known before the run, and keep_outside needs it'
            yield self.fault("link", what, "images", f'give "{name}" a size')
        if source is None:  # the file cannot be read, which is reported later
            return
        try:
            if self.values["region"]:
                check_region(self._outside(), source)
        except SourceImageError as error:
            if error.code == "source.region":
                yield fault("region", error.what, f"{self.line.where}: region", error.hint)
                return
        yield from self._crop_faults(source)
        # A size other than the one to which the kept source is fitted.
        if asked.is_auto or Size(asked.height, asked.width) in self._drawn_crops:
            return
        drawn, bucket = self.card.kept_size(source), self.card.bucket_of(asked)
        # An explicit size means exactly that size, or the source's own.
        is_exact = asked.is_ratio or Size(asked.height, asked.width) in (drawn, source)
        if bucket is None or bucket.size != drawn or not is_exact:
            name = "ratio_index" if "ratio_index" in self.fields else "size"
            what = f"keep_outside draws at the size of its source, {drawn}, not at {asked}"
            if self._crops:
                what = f"the region is drawn at {self._crops[0].drawn}, not at {asked}"
            yield self.fault("conflict", what, name, "remove it: the result has the source's")

    def _crop_faults(self, source: Size) -> Iterator[HyimgError]:
        """Yield faults of a crop, and of settings by which one is chosen; the region is valid."""
        crops, region = self.fields.get("crop"), self.values["region"]
        mode, pixels = self.values["region_size"], self.values["region_pixels"]
        why = ""
        if crops is not None:
            why = "the crop is given"
            yield from self._given_crop_faults(crops, source)
        elif not region:
            why = "there is no region"
        elif mode == "fit":
            why = "region_size is fit"
        elif pixels is not None and not self._crop_sizes:
            what = f"{self.card.name} draws no crop of {pixels:g} megapixels"
            limit = f"{self.card.base_size**2 / _MEGAPIXEL:.2g}"
            how = (
                f"give at most {limit}" if self.card.keeps_small else f"remove it: it draws {limit}"
            )
            yield self.fault("out-of-range", what, "region_pixels", how)
        for name in sorted({*_OF_CROPS} & self.line.given) if why else ():
            # `fit` says why, and for `native` a draft finds a region.
            if name != "region_size" or crops is not None:
                yield self.unused(name, why)

    def _given_crop_faults(self, crops: tuple[Box, ...], source: Size) -> Iterator[HyimgError]:
        parts, hint, what = tuple[Box, ...](), "remove it: it follows the region", ""
        with suppress(SourceImageError):  # of the mask, reported elsewhere
            parts = region_parts(self._outside(), source)
        # One crop shows all of the region; several share its parts out.
        parts = (around(parts),) if parts and len(crops) == 1 else parts
        beyond = [one for one in crops if one[2] > source.width or one[3] > source.height]
        bare = [part for part in parts if not any(holds(one, part) for one in crops)]
        idle = [] if bare else [n for n, own in enumerate(shared_out(parts, crops)) if not own]
        if beyond:
            what = f"the crop {box_text(beyond[0])} extends beyond the source ({source})"
        elif (0, 0, source.width, source.height) in crops:
            what = "the crop is the whole source"
        elif not self.values["region"]:
            what, hint = "a crop needs a region, to which the edit is limited", "give a region"
        elif bare:
            what = f"the crop {boxes_text(crops)} does not contain the region ({box_text(bare[0])})"
        elif parts and idle:
            what = f"no part of the region is in the crop {box_text(crops[idle[0]])}"
        elif not self._crops:
            what = f"{self.card.name} draws no crops"
        elif len(crops) > 1 and self.values["bot_task"] != "none":
            what, hint = _ONE_TEXT, "give one crop, or set bot_task none"
        if what:
            yield fault("crop", what, f"{self.line.where}: crop", hint)
        elif self._crops and not self.card.sees_unresized(self._crops[0].drawn):
            what = f"{self.card.name} would resize a crop of {self._crops[0].drawn} again"
            yield self.fault("conflict", what, "size", "remove it: it follows the crop")

    @property
    def _crop_sizes(self) -> tuple[Size, ...]:
        return crop_sizes(self.card, self.values["region_pixels"])

    @property
    def _drawn_crops(self) -> tuple[Size, ...]:
        return tuple(crop.drawn for crop in self._crops)

    @cached_property
    def _crops(self) -> tuple[Crop, ...]:
        """Return the parts of the kept source that are drawn; empty if all of it is."""
        source, asked = self._kept_size(), self._size()
        if source is None or not self.values["region"] or not (sizes := self._crop_sizes):
            return ()
        exact = None if asked.is_auto or asked.is_ratio else Size(asked.height, asked.width)
        if given := self.fields.get("crop"):
            ratio = (given[0][3] - given[0][1]) / (given[0][2] - given[0][0])
            nearest = min(sizes, key=lambda one: abs(log(one.height / one.width / ratio)))
            return tuple(Crop(one, exact or nearest) for one in given)
        whole, mode = self.card.kept_size(source), self.values["region_size"]
        per_drawn = sqrt(source.height * source.width / (whole.height * whole.width))
        # A line that has the size of the whole wants the whole, as lines of earlier runs do.
        if mode == "fit" or exact == whole or (mode == "auto" and per_drawn <= _MOST_PER_DRAWN):
            return ()
        try:
            parts = region_parts(self._outside(), source)
        except SourceImageError:  # reported for the file elsewhere
            return ()
        if parts and self.values["bot_task"] != "none":
            parts = (around(parts),)  # see _ONE_TEXT
        return crops_of(parts, source, sizes, self.values["region_context"])

    @property
    def _finds_region(self) -> bool:
        """Return True for a region that is to be drawn at its own resolution, but not given."""
        is_given = self.values["region"] or self.fields.get("crop")
        return self._keeps_outside and not is_given and self.values["region_size"] == "native"

    @property
    def _keeps_outside(self) -> bool:
        return bool(self.values["keep_outside"] and self.fields.get("images"))

    @property
    def _inpaints(self) -> bool:
        return self._keeps_outside and self._region_mode == "inpaint"

    @property
    def _is_aligned(self) -> bool:
        """Return True for an edit in its source's shape, by a model that only takes sizes."""
        is_asked = self.values["infer_align_image_size"] and self.fields.get("images")
        return bool(is_asked and self.card.edit_shape != "chosen")

    def _aligned_size(self) -> SizeRequest:
        """Return the size of an aligned edit."""
        size = self._size()
        if not size.is_auto and "infer_align_image_size" not in self.line.given:
            return size
        if self.card.edit_shape == "square" and (source := self.source_size(0)):
            kept = self.card.kept_size(source)
            return SizeRequest(kept.height, kept.width)
        return SizeRequest()

    def _kept_size(self) -> Size | None:
        """Return the kept source's size; None if it cannot be read."""
        return self.source_size(self.values["kept_source"] - 1)

    def size_of(self, job: Job) -> Size | None:
        assert isinstance(job, ImageJob), "the line asks for pictures"
        if job.outside is not None:
            return self._kept_size()
        bucket = self.card.bucket_of(job.size)
        is_known = bucket is not None and not (job.infer_align_image_size and job.images)
        return bucket.size if bucket and is_known else None

    def _outside(self) -> KeepOutside:
        """Return how the edit is put back on its source."""
        values = {name: self.values[name] for name in (*DRAWING, *FINISHING)}
        mode = self._region_mode
        # Where it has no effect, it is not in the key.
        strength = values["strength"] if mode == "inpaint" else 1.0
        return KeepOutside(**values | {"region_mode": mode, "strength": strength})

    @property
    def _region_mode(self) -> RegionMode:
        asked: RegionMode = self.values["region_mode"]
        if asked != "auto":
            return asked
        return "inpaint" if self.card.inpaints else "instead"

    def job(self, index: int) -> ImageJob:
        fields = self.fields
        values = {name: self.values[name] for name in PICTURE_OPTIONS} | self.own(index)
        ar_seed, vary = self.values["ar_seed"], self.values["vary"]
        values["seed"] = self.seed(0 if vary == "text" else index)
        # The text's seed is used as given, else the picture's own; `vary` says which of them
        # change.
        if ar_seed is None:
            ar_seed = self.seed(0 if vary == "picture" else index)
        elif vary == "text":
            ar_seed = count_up(ar_seed, index)
        values["ar_seed"] = int(ar_seed)
        # A line with a system prompt wants it to be used, and so do settings that name no other
        # kind. Only `custom` has a text.
        text, kind = self.values["system_prompt"], str(self.values["use_system_prompt"])
        is_named = "use_system_prompt" in fields or self.settings["use_system_prompt"].value
        if "system_prompt" in fields or (text is not None and not is_named):
            kind = "custom"
        if kind == "custom" and text is None:
            kind = "None"
        values["use_system_prompt"] = kind
        values["system_prompt"] = text if kind == "custom" else None
        if not values["negative_prompt"] and "negative_prompt" not in self.line.given:
            values["negative_prompt"] = self.defaults.negative_prompt
        size, outside, crops = self._size(), None, tuple[Box, ...]()
        if self._keeps_outside:
            values["infer_align_image_size"], outside = True, self._outside()
            if parts := self._crops:
                drawn, crops = parts[0].drawn, tuple(one.box for one in parts)
                size = SizeRequest(drawn.height, drawn.width)
            elif source := self._kept_size():
                kept = self.card.kept_size(source)
                size = SizeRequest(kept.height, kept.width)
        elif self._is_aligned:
            values["infer_align_image_size"], size = False, self._aligned_size()
        if self.card.edit_sides and not size.is_auto:
            size = self._fitted(size) or size
        # The note describes the ids; an edited text has none.
        has_note = {"written", "cot_token_ids"} <= fields.keys()
        written = json.dumps(fields["written"], sort_keys=True) if has_note else ""
        job = ImageJob(
            **values,
            size=size,
            text=_text_sampling(**{name: self.values[name] for name in TEXT_OPTIONS}),
            cot_text=fields.get("cot_text"),
            cot_token_ids=fields.get("cot_token_ids"),
            written_json=written,
            outside=outside,
            crops=crops,
            finds_region=self._finds_region,
            encoding=self._encoding(),
        )
        is_own = bool(job.negative_prompt) and "negative_prompt" not in self.line.given
        # Without guidance there is no second branch to compare with.
        if is_own and self.card.branches(job) == 1:
            job = replace(job, negative_prompt="")
        return job

    def _encoding(self) -> Encoding:
        kind = self.values["format"]
        is_lossless = kind == "png" or (kind == "webp" and self.values["lossless"])
        return _file_encoding(kind, None if is_lossless else self.values["quality"])

    def _size(self) -> SizeRequest:
        """Return the size as asked for, or the one that a given text's ratio means."""
        size = self._of_ratio(self.fields.get("ratio_index"))
        if size is None:
            return cast(SizeRequest, self.values["size"])
        return SizeRequest(size.height, size.width)

    def _of_ratio(self, index: int | None) -> Size | None:
        """Return the size of a ratio token; None if the model has no such ratio."""
        return next((b.size for b in self.card.buckets if b.ratio_index == index), None)
