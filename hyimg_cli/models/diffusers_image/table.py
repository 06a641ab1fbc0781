"""The library's pipelines that hyimg runs, by name; no torch."""

import math
from dataclasses import replace
from typing import Any

from hyimg_cli.media.images import size_of
from hyimg_cli.models.diffusers_image import parts
from hyimg_cli.models.diffusers_image.kind import (
    APACHE,
    NON_COMMERCIAL,
    SMALL,
    LibraryPipeline,
)
from hyimg_cli.models.diffusers_video.layout import CheckpointLayout
from hyimg_cli.models.licences import UNKNOWN, is_non_commercial, read_card
from hyimg_cli.spec.card import GUIDES_AWAY, ModelCard
from hyimg_cli.spec.job import ImageJob, Size

# Text width of FLUX.2 klein 4B: three layers of Qwen3-4B. Larger releases have a larger one.
_OF_KLEIN_4B = 3 * 2560
# Positions of Qwen-Image, minus the ones that a canvas with sides of 8,192 pixels may take.
_QWEN_ROWS = 4096 - 256
# Layers of Krea 2's text encoder that its blocks read.
_KREA2_LAYERS = [2, 5, 8, 11, 14, 17, 20, 23, 26, 29, 32, 35]
# Sizes of FLUX.1 Kontext's training, to which the library scales sources.
_KONTEXT_SIZES = (
    *((672, 1568), (688, 1504), (720, 1456), (752, 1392), (800, 1328), (832, 1248), (880, 1184)),
    *((944, 1104), (1024, 1024), (1104, 944), (1184, 880), (1248, 832), (1328, 800), (1392, 752)),
    *((1456, 720), (1504, 688), (1568, 672)),
)
_KREA2_LICENCE = "krea-2-community-license"
_FLUX3_LICENCE = "flux-kommunity-license-v1-0"
_NO_GUIDANCE = "its steps have no guidance"
_GUIDANCE_IS_INPUT = "guidance_scale is an input of its network"
_NO_BRANCH = f"{_GUIDANCE_IS_INPUT}; diffusers' true_cfg_scale is not supported"
_SHORT = {"tokenizer": 512}


def _kontext_inputs(job: ImageJob, card: ModelCard) -> dict[str, Any]:
    """Return Kontext's inputs: results keep the requested size.

    The library scales results to a million pixels, whatever size is requested, and sources to a
    size of its list. Here, small sources of small results also stay unchanged.
    """
    bucket = card.bucket_of(job.size)
    made = bucket.size if bucket else Size(card.base_size, card.base_size)
    # A kept source is brought to the size of its edit.
    sources = () if job.outside else map(size_of, job.images)
    areas = [one.height * one.width for one in (made, *sources)]
    own = {"height": made.height, "width": made.width, "max_area": areas[0]}
    return own | {"_auto_resize": max(areas) >= SMALL}


def _layered_inputs(job: ImageJob, card: ModelCard) -> dict[str, Any]:
    """Return the inputs for layers: as many as asked for, of one of the library's areas."""
    area = job.size.height * job.size.width or card.base_size**2
    nearest = min(card.edit_sides, key=lambda side: abs(side**2 - area))
    return {"layers": job.layers, "resolution": nearest, "max_sequence_length": 512}


def _flux3_inputs(job: ImageJob, card: ModelCard) -> dict[str, Any]:
    """Return how FLUX.3 brings sources to whole rows: one is padded, several are cropped."""
    return {"resize_mode": "fill" if len(job.views) == 1 else "crop"} if job.images else {}


_KLEIN_PIPELINE = LibraryPipeline(
    "Flux2KleinModularPipeline", parts.KLEIN, parts.FITS_FLUX2, 0, 12, steps=4, guidance=1.0,
    licence="", negative=None, no_negative=_NO_GUIDANCE, is_distilled=True, has_own_shift=True,
    least_side=64, most_ratio=8,
    text_layers=28, text_tokens=_SHORT, scales_pictures=False,
    fits_kept=True, is_bounded=True, smooths_masks=True,
    own_blocks="rows in order",
)  # fmt: skip
_FLUX_PIPELINE = LibraryPipeline(
    "FluxModularPipeline", parts.FLUX, parts.FITS_FLUX, 0, 0, steps=50, guidance=3.5,
    licence=NON_COMMERCIAL, negative=None, no_negative=_NO_BRANCH,
    # Its guidance is an input of the transformer: never a second branch.
    guides_above=math.inf,
    text_tokens={"tokenizer": 77 - 2, "tokenizer_2": 512 - 1},
)  # fmt: skip
_KREA2_PIPELINE = LibraryPipeline(
    "Krea2ModularPipeline", parts.KREA2, parts.FITS_KREA2, 0, 0, steps=52, guidance=3.5,
    licence=_KREA2_LICENCE, negative="", guides_above=0.0,
    # Of 512 rows, five are for the end of its template.
    text_tokens={"tokenizer": 512 - 5}, text_layers=36,
    own_blocks="texts without padding",
    built_in={"text_encoder_select_layers": _KREA2_LAYERS, "patch_size": 2},
)  # fmt: skip
_FLUX3_PIPELINE = LibraryPipeline(
    "Flux3ModularPipeline", parts.FLUX3, parts.FITS_FLUX3, 0, 10, steps=50, guidance=4.0,
    licence=_FLUX3_LICENCE, negative="",
    # Its blocks make the scheduler.
    built_in_parts={
        "scheduler": {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 6.93}
    },
    of_transformer={"flow_map": False},
    own_inputs=_flux3_inputs, of_encoders=frozenset({"resize_mode"}),
    # Of 8,192 rows, eight are for its template. The last layer that is read has a norm only if it
    # is the encoder's last.
    text_tokens={"tokenizer": 8192 - 8}, text_layers=33, shows_pictures=False,
    scales_pictures=False, fits_kept=True, is_bounded=True, keeps_whole=True,
    least_side=16, smooths_masks=True, rewrites=True,
    text_row_bytes=260_000,
    own_blocks="sources alone", rows="windows of text",
)  # fmt: skip
_QWEN21_PIPELINE = LibraryPipeline(
    "QwenImage21ModularPipeline", parts.QWEN21, parts.FITS_QWEN21, 0, 10, steps=40, guidance=1.0,
    licence=NON_COMMERCIAL,
    own_inputs=lambda job, card: {"output_resolution": card.base_size},
    of_encoders=frozenset({"output_resolution"}),
    # Of 8,192 positions, ten pictures take fewer than 1,024. Later ones would be read as negative.
    text_tokens={"processor": 8192 - 1024}, cuts_texts=False,
    reads_alpha=True, multiple=32, narrows=True, prefix="pictures, then text",
    shows_pictures=True, text_bytes=1_000_000_000,
)  # fmt: skip
_EDIT_PIPELINE = LibraryPipeline(
    "QwenImageEditModularPipeline", parts.QWEN_EDIT, parts.FITS_QWEN, 1, 1, steps=50, guidance=4.0,
    most_rows=_QWEN_ROWS, text_tokens={"tokenizer": _QWEN_ROWS}, cuts_texts=False,
    # Its text encoder takes shapes up to 200 to 1, after sides were rounded to multiples of 32.
    most_ratio=163, fitted_multiple=32, shows_pictures=True, text_bytes=600_000_000,
)  # fmt: skip
_LONGCAT_PIPELINE = LibraryPipeline(
    "LongCatImageModularPipeline",
    parts.LONGCAT,
    parts.FITS_LONGCAT,
    0,
    0,
    steps=50,
    guidance=4.0,
    negative="",
    text_tokens=_SHORT,
    cuts_texts=False,
)
KINDS = {
    "QwenImagePipeline": LibraryPipeline(
        "QwenImageModularPipeline", parts.QWEN, parts.FITS_QWEN, 0, 0, steps=50, guidance=4.0,
        own_inputs=lambda job, card: {"max_sequence_length": 512},  # the classic call's
        text_tokens=_SHORT,
        of_texts=frozenset({"max_sequence_length"}),
    ),
    "QwenImageEditPipeline": _EDIT_PIPELINE,
    "QwenImageEditPlusPipeline": replace(
        _EDIT_PIPELINE, blocks="QwenImageEditPlusModularPipeline", most=5, steps=40, most_ratio=0
    ),
    # Its texts are those of Qwen-Image: they see no pictures.
    "QwenImageLayeredPipeline": LibraryPipeline(
        "QwenImageLayeredModularPipeline", parts.QWEN_EDIT, parts.FITS_QWEN, 1, 1, steps=50,
        guidance=4.0, layers=4, base_size=640, edit_sides=(640, 1024),
        own_inputs=_layered_inputs, of_encoders=frozenset({"resolution"}),
        text_tokens=_SHORT, of_texts=frozenset({"max_sequence_length"}),
        fitted_multiple=32, narrows=True, reads_alpha=True, own_blocks="texts alone",
    ),
    "Flux2KleinPipeline": _KLEIN_PIPELINE,
    "Flux2KleinKVPipeline": replace(_KLEIN_PIPELINE, prefix="references"),
    "Flux2Pipeline": replace(
        _KLEIN_PIPELINE, blocks="Flux2ModularPipeline", parts=parts.FLUX2, most=10, steps=50,
        guidance=4.0, licence=NON_COMMERCIAL, no_negative=_GUIDANCE_IS_INPUT, is_distilled=False,
        guides_above=math.inf, text_layers=31, own_blocks="system message",
    ),
    "Flux3ModularPipeline": _FLUX3_PIPELINE,
    "Flux3DistilledModularPipeline": replace(
        _FLUX3_PIPELINE, blocks="Flux3DistilledModularPipeline", steps=16, guidance=1.0,
        negative=None, no_negative=_NO_GUIDANCE, is_distilled=True,
        of_transformer={"flow_map": True},
    ),
    "QwenImage21Pipeline": _QWEN21_PIPELINE,
    "ZImagePipeline": LibraryPipeline(
        "ZImageModularPipeline", parts.Z_IMAGE, parts.FITS_Z_IMAGE, 0, 0, steps=50, guidance=5.0,
        negative="", guides_above=0.0, text_tokens=_SHORT, own_blocks="joined branches",
    ),
    "FluxPipeline": _FLUX_PIPELINE,
    "FluxKontextPipeline": replace(
        _FLUX_PIPELINE, blocks="FluxKontextModularPipeline", most=1, steps=28, guidance=2.5,
        own_inputs=_kontext_inputs, of_encoders=frozenset({"_auto_resize"}), least_side=16,
        fitted_sizes=_KONTEXT_SIZES, fits_kept=True, squares=True,
    ),
    "Krea2Pipeline": _KREA2_PIPELINE,
    "LongCatImagePipeline": _LONGCAT_PIPELINE,
    "LongCatImageEditPipeline": replace(
        _LONGCAT_PIPELINE, blocks="LongCatImageEditModularPipeline", fewest=1, most=1, guidance=4.5,
        takes_size=False, own_inputs=lambda job, card: {"max_area": card.base_size**2},
        of_encoders=frozenset({"max_area"}), shows_pictures=True, text_bytes=600_000_000,
    ),
}  # fmt: skip
# Distilled releases that name the same pipeline as the full one: scheduler values that only they
# have, and the steps and guidance of their pages.
_DISTILLED: dict[str, tuple[dict[str, float], int, float]] = {
    "ZImagePipeline": ({"shift": 3.0}, 8, 0.0),
    "LongCatImageEditPipeline": ({"base_shift": 1.15, "max_shift": 1.15}, 8, 1.0),
}


def kind_of(layout: CheckpointLayout) -> LibraryPipeline:
    """Return the pipeline's row, adapted to a checkpoint's base or turbo version.

    For a klein base model, FLUX.1 schnell, or a turbo version of Krea 2, Qwen-Image-2.1, Z-Image or
    LongCat-Image-Edit.
    """
    kind, index = KINDS[layout.family], layout.index
    if kind is _KLEIN_PIPELINE and not index.flag("is_distilled", False):
        base = "Flux2KleinBaseModularPipeline"
        return replace(
            kind, blocks=base, steps=50, guidance=4.0, is_distilled=False, no_negative=GUIDES_AWAY
        )
    if kind is _QWEN21_PIPELINE and index.has("sample_sigmas"):
        sigmas = index.numbers("sample_sigmas")
        turbo = "QwenImage21TurboModularPipeline"
        return replace(
            kind,
            blocks=turbo,
            steps=len(sigmas),
            sigmas=sigmas,
            negative=None,
            is_distilled=True,
            no_negative=_NO_GUIDANCE,
        )
    if kind is _FLUX_PIPELINE and not layout.components["transformer"].config().flag(
        "guidance_embeds", False
    ):
        # FLUX.1 schnell, by the page of its release.
        return replace(
            kind,
            steps=4,
            guidance=0.0,
            licence=APACHE,
            is_distilled=True,
            no_negative=_NO_GUIDANCE,
            own_inputs=lambda job, card: {"max_sequence_length": 256},
            of_texts=frozenset({"max_sequence_length"}),
            text_tokens={**kind.text_tokens, "tokenizer_2": 256 - 1},
        )
    if kind is _KREA2_PIPELINE and index.flag("is_distilled", False):
        return replace(
            kind,
            blocks="Krea2TurboModularPipeline",
            steps=8,
            guidance=0.0,
            negative=None,
            is_distilled=True,
            has_own_shift=True,
            no_negative=_NO_GUIDANCE,
        )
    if layout.family in _DISTILLED:
        known, steps, guidance = _DISTILLED[layout.family]
        if known.items() <= layout.components["scheduler"].config().values.items():
            return replace(kind, steps=steps, guidance=guidance)
    return kind


def licence_of(layout: CheckpointLayout) -> str:
    """Return a checkpoint's licence in one word, or UNKNOWN.

    From its README, or else its pipeline's releases.
    """
    words = read_card(layout.folder)
    if any(map(is_non_commercial, words)):
        return NON_COMMERCIAL
    if words and words[0] != "other":
        return APACHE if words[0] == "apache-2.0" else words[0]
    if of_releases := kind_of(layout).licence:
        return of_releases
    width = layout.components["transformer"].config().count("joint_attention_dim", 0)
    return APACHE if width == _OF_KLEIN_4B else NON_COMMERCIAL if width > _OF_KLEIN_4B else UNKNOWN
