"""Checkpoints that their JSON files tell apart from what is run here; no torch.

All of these name a pipeline that is known, and would load or even run: into an error in the middle
of a job, or into films that are quietly wrong.
"""

from collections.abc import Iterator
from itertools import chain

from hyimg_cli.errors import CheckpointError
from hyimg_cli.loading.config import Config
from hyimg_cli.models.diffusers_video.layout import HUNYUAN_VIDEO15, CheckpointLayout, Component

_OTHER_PIPELINE = "download the checkpoint again: model_index.json and transformer are of two kinds"
_OTHER_VAE = "download the checkpoint again, with its config.json files"
# A tile is 256 pixels, and shares 64 with the next one: both are whole latent cells.
_SHARED_PIXELS = 64
# Beside the latents: the picture's, and a mask of four frames to each latent one.
_MASK_CHANNELS = 4


def refuse_unsupported(layout: CheckpointLayout) -> None:
    """Passes a checkpoint that can be run. Raises CheckpointError, which says why another cannot
    be.
    """
    for component in layout.components.values():
        if component.has_weights:
            _refuse_quantized(component)
    is_hunyuan = layout.family == HUNYUAN_VIDEO15
    vae = layout.components["vae"].config()
    faults = chain(
        _hunyuan(layout) if is_hunyuan else _wan(layout),
        ((what, _OTHER_VAE) for what in (_hunyuan_vae if is_hunyuan else _wan_vae)(vae)),
    )
    for what, hint in faults:
        raise CheckpointError(what, where=layout.folder, hint=hint, code="checkpoint.family")


def _refuse_quantized(component: Component) -> None:
    """A library would load it by a quantizer of its own, which nothing here was tested with."""
    method = component.config().table("quantization_config", {})
    if method.values:
        raise CheckpointError(
            f"the {component.name} is stored quantized ({method.text('quant_method', 'unnamed')})",
            where=component.folder,
            hint="use the checkpoint as it was released",
            code="checkpoint.quantized",
        )


def _hunyuan(layout: CheckpointLayout) -> Iterator[tuple[str, str]]:
    network = layout.components["transformer"].config()
    expected = "i2v" if layout.starts_from_pictures else "t2v"
    task = network.text("task_type", "t2v")
    if task != expected:
        # Its pipeline would run it, and not look at the picture, without a word.
        yield f"the transformer is for {task!r}, its pipeline for {expected!r}", _OTHER_PIPELINE
    if network.flag("use_meanflow", False) and expected == "t2v":
        # Its pipeline for text-to-video leaves the second timestep out, without a word.
        what = (
            "the transformer is distilled to few steps (use_meanflow): it wants a second timestep"
        )
        yield what, "use the t2v checkpoint that is not step-distilled"


def _hunyuan_vae(vae: Config) -> Iterator[str]:
    """Faults by which it could not be built, or would decode frames of another size."""
    cell, stride = (
        vae.count("spatial_compression_ratio", 16),
        vae.count("temporal_compression_ratio", 4),
    )
    levels = len(vae.counts("block_out_channels", (1,) * 5))
    yield from _wrong_cell(cell)
    if cell > 2 ** (levels - 1) or stride not in (1, 2, 4, 8, 16) or stride > cell:
        yield f"the VAE's {levels} levels cannot shrink {cell} pixels and {stride} frames to one"
    if (channels := vae.count("out_channels", 3)) != 3:
        yield f"the VAE decodes {channels} channels, not red, green and blue"


def _wan_vae(vae: Config) -> Iterator[str]:
    """The same; the library reads the cell, its levels and the patch apart from each other."""
    cell, stride = vae.count("scale_factor_spatial", 8), vae.count("scale_factor_temporal", 4)
    patch, halves = (
        vae.count("patch_size", 1),
        vae.flags("temperal_downsample", (False, True, True)),
    )
    levels = len(vae.counts("dim_mult", (1,) * 4))
    yield from _wrong_cell(cell)
    if (cell, stride) != (2 ** (levels - 1) * patch, 2 ** sum(halves)):
        yield (
            f"the VAE says that {cell} pixels and {stride} frames are one latent cell; by its "
            f"levels they are {2 ** (levels - 1) * patch} and {2 ** sum(halves)}"
        )
    if len(halves) != levels - 1:
        yield f"the VAE has {levels} levels, and says of {len(halves)} whether they halve frames"
    if (channels := vae.count("out_channels", 3)) != 3 * patch**2:
        yield f"the VAE decodes {channels} channels, not {3 * patch**2}"
    expected = vae.count("z_dim", 16)
    for name in ("latents_mean", "latents_std"):
        count = len(vae.numbers(name, (1.0,) * 16))
        if count != expected:
            yield f"the VAE's {name} has {count} numbers for {expected} channels"


def _wrong_cell(cell: int) -> Iterator[str]:
    if _SHARED_PIXELS % cell:
        yield f"the VAE's latent cell of {cell} pixels does not divide tiles that share 64"


def _wan(layout: CheckpointLayout) -> Iterator[tuple[str, str]]:
    network, vae = layout.components["transformer"].config(), layout.components["vae"].config()
    taken, made = network.count("in_channels", 16), vae.count("z_dim", 16)
    beside = layout.starts_from_pictures and not layout.expands_timesteps
    expected = 2 * made + _MASK_CHANNELS if beside else made
    if taken != expected:
        kind = "image-to-video" if beside else "text-to-video"
        what = f"the transformer takes {taken} channels; for {kind} its VAE makes {expected}"
        yield what, _OTHER_PIPELINE
    reads = network.has("image_dim") or network.has("added_kv_proj_dim")
    encodes = {"image_encoder", "image_processor"} <= layout.components.keys()
    if reads and not encodes:
        what = "the transformer reads a picture's tokens, and nothing in the checkpoint makes them"
        yield what, _OTHER_PIPELINE
    has_boundary = layout.boundary_ratio is not None
    if has_boundary != ("transformer_2" in layout.components):
        is_there, is_not = ("boundary_ratio", "transformer_2")[:: 1 if has_boundary else -1]
        what = f"model_index.json has a {is_there} and no {is_not}: which network takes which step?"
        yield what, "download the checkpoint again: Wan 2.2 of two transformers has both"
