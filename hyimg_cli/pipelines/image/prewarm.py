"""Running the plan's shapes once before they count: kernels are chosen and memory is laid out.

Stand-in jobs of the same shapes with blank pictures go through the same stages; nothing of them is
kept. Every random draw in a job has a generator of its own, so no later draw is shifted.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hyimg_cli.errors import SourceImageError
from hyimg_cli.kv.tree import KVTree
from hyimg_cli.media.images import SourceImage, size_of
from hyimg_cli.memory.footprint import Together
from hyimg_cli.pipelines.clock import PhaseClock
from hyimg_cli.pipelines.image.admission import WholeBatches
from hyimg_cli.pipelines.image.batch import ContinuousBatch
from hyimg_cli.pipelines.image.branches import Prefixes
from hyimg_cli.pipelines.image.stages import ImageStages, encoded_by
from hyimg_cli.pipelines.request import Lost
from hyimg_cli.spec.card import ModelCard
from hyimg_cli.spec.job import ImageJob, Size

_STEPS = 2
_WORDS = 2
# Prompts of a GPU's stand-ins differ by so many tokens at least.
_LENGTHS = 512
# Whose sources and texts are measured: a shape that only others have waits for its first job.
_MOST_JOBS = 4096


@dataclass(frozen=True)
class Shape:
    """Key of the shapes of a job's forwards by one model: the sizes that its sources are fitted to,
    picture size, text, branches; `tokens` before the picture, rounded up, where they count.
    """

    sources: tuple[Size, ...]
    size: str
    writes_text: bool
    has_guidance: bool
    tokens: int = 0


def shape_of(job: ImageJob, card: ModelCard, tokens: int = 0) -> Shape | None:
    """The shape of a job with so many tokens; None where a source cannot be read, and the job will
    fail.

    A model sees a source in the nearest of its sizes: photographs of any number of sizes have few
    shapes.
    """
    try:
        found = map(size_of, job.images)
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
) -> list[Shape]:
    """Run every shape that is not in `warmed` yet, and add it; those that there were.

    On a GPU one stand-in a shape: by one, kernels are compiled and libraries' plans made, and with
    as many as will run together prewarming would take as long as they do. Its text has the length
    of one of the jobs', of every range of lengths in turn: `tokens_of` counts them. On a CPU as
    many as jobs of that shape will, up to the batch sizes: its libraries lay out memory by the
    number of rows. Of very many jobs some are looked at, evenly. `learn` is told for how many there
    was memory.
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
        learn(_run(named, stages, together))
        warmed.add(shape)
    return new


def _run(jobs: list[ImageJob], stages: ImageStages, together: Together) -> Together:
    images: dict[str, SourceImage] = {}
    for path in jobs[0].images:
        size = size_of(path)
        pixels = np.full((size.height, size.width, 3), 127, dtype=np.uint8)
        pixels[: size.height // 2] = 200
        images[path] = SourceImage(pixels, f"blank {size}", ())
    is_aligned = jobs[0].infer_align_image_size
    shown = [image.stretched() if is_aligned else image for image in images.values()]
    encoded = {image.digest: encoded_by(stages.model, image) for image in shown}
    blank = replace(
        stages,
        prefixes=Prefixes(KVTree(0), "prewarm"),
        read=lambda path: (images[path], 0.0),
        encode=lambda image: (encoded[image.digest], 0.0),
        texts=None,
    )
    known = WholeBatches(jobs, blank, lambda: PhaseClock(0.0, lambda: None))
    run = ContinuousBatch(known, together)
    for event in run.run():
        if isinstance(event, Lost):
            break  # the job itself will fail, and say why
    return run.memory.most
