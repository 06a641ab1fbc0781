"""Jobs that ask for a text."""

from collections.abc import Sequence
from typing import Any

from hyimg_cli.models import registry
from hyimg_cli.models.protocols import Context, Prefill
from hyimg_cli.spec.job import SizeRequest, TextJob
from hyimg_cli.spec.options import TextSampling


def question(
    custom_id: str, prompt: str, images: Sequence[str] = (), *, tokens: int = 12, **more: Any
) -> TextJob:
    """A job as a manifest's line makes it; greedy."""
    given: dict[str, Any] = {
        "custom_id": custom_id,
        "task": "i2t" if images else "t2t",
        "prompt": prompt,
        "images": tuple(images),
        "model": registry.EMBEDDED,
        "seed": 1,
        "size": SizeRequest(),
        "num_inference_steps": 0,
        "guidance_scale": 1.0,
        "flow_shift": 1.0,
        "bot_task": "none",
        "ar_seed": 1,
        "text": TextSampling(0.0, 0, 1.0, tokens),
        "image_guidance_scale": None,
        "guidance_interval": None,
        "guidance_renorm": None,
        "guidance_renorm_min": None,
        "layers": None,
    }
    return TextJob(**given | more)


def written_anew(
    model: Any, layout: Any, ids: Sequence[int], sources: Sequence[Any], count: int
) -> list[int]:
    """The most likely tokens after a prompt; prompt and text are computed anew for each."""
    found = list[int]()
    while len(found) < count:
        buffer = model.new_buffer()
        (hidden,) = model.prefill([Prefill(layout, ids, sources, buffer, len(ids))])
        context = Context([*ids], buffer, hidden, layout)
        if found:
            model.feed([(context, found)])
        found.append(int(model.text_logits([context])[0].argmax()))
    return found
