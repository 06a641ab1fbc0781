"""Checkpoints that their JSON files tell apart from what is run here; no torch.

All of these name a pipeline that is known, and would load or even run: into an error in the middle
of a job, or into films that are quietly wrong.
"""

from collections.abc import Iterator

from hyimg_cli.errors import CheckpointError
from hyimg_cli.models.diffusers_video.layout import HUNYUAN_VIDEO15, CheckpointLayout, Component

_OTHER_PIPELINE = "download the checkpoint again: model_index.json and transformer are of two kinds"
# Beside the latents: the picture's, and a mask of four frames to each latent one.
_MASK_CHANNELS = 4


def refuse_unsupported(layout: CheckpointLayout) -> None:
    """Passes a checkpoint that can be run. Raises CheckpointError, which says why another cannot
    be.
    """
    for component in layout.components.values():
        if component.has_weights:
            _refuse_quantized(component)
    faults = _hunyuan(layout) if layout.family == HUNYUAN_VIDEO15 else _wan(layout)
    for what, hint in faults:
        raise CheckpointError(what, where=str(layout.folder), hint=hint, code="checkpoint.family")


def _refuse_quantized(component: Component) -> None:
    """A library would load it by a quantizer of its own, which nothing here was tested with."""
    method = component.config().get("quantization_config")
    if method is not None:
        name = method.get("quant_method") if isinstance(method, dict) else None
        raise CheckpointError(
            f"the {component.name} is stored quantized ({name or 'by an unnamed method'})",
            where=str(component.folder),
            hint="use the checkpoint as it was released",
            code="checkpoint.quantized",
        )


def _hunyuan(layout: CheckpointLayout) -> Iterator[tuple[str, str]]:
    network = layout.components["transformer"].config()
    expected = "i2v" if layout.starts_from_pictures else "t2v"
    task = network.get("task_type", "t2v")
    if task != expected:
        # Its pipeline would run it, and not look at the picture, without a word.
        yield f"the transformer is for {task!r}, its pipeline for {expected!r}", _OTHER_PIPELINE
    if network.get("use_meanflow") and expected == "t2v":
        # Its pipeline for text-to-video leaves the second timestep out, without a word.
        what = (
            "the transformer is distilled to few steps (use_meanflow): it wants a second timestep"
        )
        yield what, "use the t2v checkpoint that is not step-distilled"


def _wan(layout: CheckpointLayout) -> Iterator[tuple[str, str]]:
    network, vae = layout.components["transformer"].config(), layout.components["vae"].config()
    taken, made = network.get("in_channels", 16), vae.get("z_dim", 16)
    beside = layout.starts_from_pictures and not layout.index.get("expand_timesteps")
    expected = 2 * made + _MASK_CHANNELS if beside else made
    if taken != expected:
        kind = "image-to-video" if beside else "text-to-video"
        what = f"the transformer takes {taken} channels; for {kind} its VAE makes {expected}"
        yield what, _OTHER_PIPELINE
    reads = network.get("image_dim") is not None or network.get("added_kv_proj_dim") is not None
    encodes = {"image_encoder", "image_processor"} <= layout.components.keys()
    if reads and not encodes:
        what = "the transformer reads a picture's tokens, and nothing in the checkpoint makes them"
        yield what, _OTHER_PIPELINE
    has_boundary = layout.index.get("boundary_ratio") is not None
    if has_boundary != ("transformer_2" in layout.components):
        is_there, is_not = ("boundary_ratio", "transformer_2")[:: 1 if has_boundary else -1]
        what = f"model_index.json has a {is_there} and no {is_not}: which network takes which step?"
        yield what, "download the checkpoint again: Wan 2.2 of two transformers has both"
