"""Run the plan's shapes once before the jobs, so that kernels and memory layout are ready.

Stand-in jobs of the same shapes with blank pictures go through the same stages, and none of their
results are kept. Every random draw in a job has its own generator, so no later draw is shifted.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hyimg_cli.errors import SourceImageError
from hyimg_cli.kv.tree import KVTree
from hyimg_cli.media.images import SourceImage, view_size
from hyimg_cli.memory.footprint import Together
from hyimg_cli.pipelines.clock import PhaseClock
from hyimg_cli.pipelines.image.admission import WholeBatches
from hyimg_cli.pipelines.image.batch import ContinuousBatch
from hyimg_cli.pipelines.image.branches import Prefixes
from hyimg_cli.pipelines.image.stages import ImageStages, encoded_by
from hyimg_cli.pipelines.out_of_memory import Attempt
from hyimg_cli.pipelines.queue import Ticket
from hyimg_cli.pipelines.request import Lost
from hyimg_cli.spec.card import ModelCard
from hyimg_cli.spec.job import ImageJob, Size, View

_STEPS = 2
_WORDS = 2
# Prompt lengths of a GPU's stand-ins differ by at least this many tokens.
_LENGTHS = 512
# Jobs whose sources and texts are measured. Shapes of other jobs are run by their first job.
_MOST_JOBS = 4096


@dataclass(frozen=True)
class Shape:
    """Key of the shapes of a job's forwards by one model.

    It holds the sizes to which its sources are fitted, the picture size, text and branches.
    `tokens`: the length before the picture, rounded up, where it matters.
    """

    sources: tuple[Size, ...]
    size: str
    writes_text: bool
    has_guidance: bool
    tokens: int = 0


def shape_of(job: ImageJob, card: ModelCard, tokens: int = 0) -> Shape | None:
    """Return the shape of a job of this many tokens; None if a source cannot be read.

    Such a job will fail later. A model sees a source in the nearest of its sizes, so photographs of
    many sizes have few shapes.
    """
    try:
        found = map(view_size, job.views)
        sizes = tuple(card.nearest_bucket(size.height, size.width).size for size in found)
    except SourceImageError:
        return None
    length = -(-tokens // _LENGTHS) * _LENGTHS
    return Shape(sizes, str(job.size), job.writes_text, job.guidance_scale > 1, length)


def prewarm(
    jobs: Sequence[ImageJob],
    stages: ImageStages,
    *,
    together: Together,
    warmed: set[Shape],
    tokens_of: Callable[[ImageJob], int] = lambda _: 0,
    learn: Callable[[Together], None] = lambda _: None,
    lost: Callable[[Exception], None] = lambda _: None,
) -> list[Shape]:
    """Run every shape that is not in `warmed`, and add it; return the new shapes.

    On a GPU one stand-in per shape is enough to compile kernels and make the libraries' plans; a
    full batch would take as long as the jobs. There is one stand-in per range of text lengths, with
    the length of its longest job, as `tokens_of` counts it.

    On a CPU a shape has as many stand-ins as jobs will run together, because libraries lay out
    memory by the number of rows. Of very many jobs only an even sample is examined. `learn` gets
    the number of jobs that fitted into memory, `lost` each error that ended a shape's stand-ins.
    """
    jobs = jobs[:: -(-len(jobs) // _MOST_JOBS) or 1]
    is_on_gpu = stages.model.layer_devices[0].type == "cuda"
    alike: dict[Shape, list[tuple[int, ImageJob]]] = defaultdict(list)
    for job in jobs:
        tokens = tokens_of(job) if is_on_gpu else 0
        if shape := shape_of(job, stages.model.card, tokens):
            alike[shape].append((tokens, job))
    new = [shape for shape in alike if shape not in warmed]
    most = 1 if is_on_gpu else max(together.thinking, together.drawing)
    for shape in new:
        _, longest = max(alike[shape], key=lambda known: known[0])
        stand_in = replace(
            longest,
            num_inference_steps=min(_STEPS, longest.num_inference_steps),
            text=replace(longest.text, max_new_tokens=min(_WORDS, longest.text.max_new_tokens)),
        )
        count = min(len(alike[shape]), most)
        named = [replace(stand_in, custom_id=f"prewarm-{number}") for number in range(count)]
        with Attempt() as tried:
            learn(_run(named, stages, together, lost))
        if tried.error is not None:
            lost(tried.error)
        warmed.add(shape)
    return new


def _run(
    jobs: list[ImageJob],
    stages: ImageStages,
    together: Together,
    lost: Callable[[Exception], None],
) -> Together:
    images: dict[View, SourceImage] = {}
    for view in jobs[0].views:
        size = view_size(view)
        pixels = np.full((size.height, size.width, 3), 127, dtype=np.uint8)
        pixels[: size.height // 2] = 200
        images[view] = SourceImage(pixels, f"blank {size}", ())
    is_aligned = jobs[0].infer_align_image_size
    shown = [image.stretched() if is_aligned else image for image in images.values()]
    encoded = {image.digest: encoded_by(stages.model, image) for image in shown}
    blank = replace(
        stages,
        prefixes=Prefixes(KVTree(0), "prewarm"),
        read_source=lambda view: (images[view], 0.0),
        encode=lambda image: (encoded[image.digest], 0.0),
        texts=None,
        checkpoint_of=lambda work: None,
    )
    known = WholeBatches(map(Ticket, jobs), blank, lambda since: PhaseClock(since, lambda: None))
    run = ContinuousBatch(known, together)
    for event in run.run():
        if isinstance(event, Lost):
            lost(event.error)
            break
    return run.memory.most
