"""Blocks of editors compiled by torch: graphs are whole, and a new length needs none of its own."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ZImageTransformer2DModel

from hyimg_cli.models.diffusers_image import prefix
from hyimg_cli.models.diffusers_image.own_blocks import _attend_by_length
from hyimg_cli.models.diffusers_video.networks import compile_blocks
from hyimg_cli.pipelines.latent.pictures import EditPipeline
from hyimg_cli.pipelines.queue import Ticket, TicketQueue
from hyimg_cli.pipelines.request import Lost
from hyimg_cli.settings.run import ModelChoice, OutputConfig, RunConfig
from hyimg_cli.spec.job import ImageJob, SizeRequest

pytestmark = pytest.mark.thorough
LENGTHS = 10
KINDS = (
    *("qwen-image", "qwen-image-edit-plus", "qwen-image-2.1", "klein", "klein-kv", "kontext"),
    *("longcat", "flux2-dev", "flux3", "flux-dev", "krea2-turbo"),
)


@pytest.fixture
def graphs() -> Iterator[list[Any]]:
    torch._dynamo.reset()
    yield []
    torch._dynamo.reset()


def compile_whole(graphs: list[Any], network: Any) -> None:
    """Compile a network's repeated blocks; a graph that breaks raises."""

    def compiled(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compile_blocks(network, fullgraph=True, backend=compiled)


@pytest.mark.parametrize("kind", KINDS)
def test_ten_lengths_compile_nothing_after_the_second(
    checkpoint: Callable[[str], Path],
    job: ImageJob,
    tmp_path: Path,
    graphs: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """Texts grow with the pictures. Products have as many rows as on a GPU."""
    monkeypatch.setattr(prefix, "_filled", lambda rows: rows)
    model = str(checkpoint(kind))
    edits = "edit" in kind or kind == "kontext"
    given = job if edits else replace(job, task="t2i", images=())
    given = replace(given, model=model)
    pipeline = EditPipeline(
        RunConfig(OutputConfig(tmp_path / "out"), model=ModelChoice(model, device="cpu"))
    )
    counts = list[int]()
    for length in range(LENGTHS):
        size = SizeRequest(64 + 16 * length, 96)
        text = "red " * (1 + 9 * length)
        one = replace(given, custom_id=f"{length}", prompt=text, size=size)
        list(pipeline.use(model, [one], None))
        if not counts:
            compile_whole(graphs, pipeline._resident().have("transformer"))
        told = list[Any]()
        deque(pipeline.work(TicketQueue([Ticket(one, tell=told.append)], is_whole=True)), 0)
        for event in told:
            if isinstance(event, Lost):
                raise event.error
        counts.append(len(graphs))
    assert 0 < counts[0] <= counts[1] == counts[-1] <= 8, counts


@torch.no_grad()
def test_lengths_of_two_branches_share_their_graphs(
    checkpoint: Callable[[str], Path], graphs: list[Any]
) -> None:
    """Z-Image's attention on a GPU: either branch may be the longer one, or none."""
    network = ZImageTransformer2DModel.from_pretrained(checkpoint("z-image") / "transformer")
    compile_whole(graphs, network)
    width, channels = network.config.cap_feat_dim, network.config.in_channels

    def draw(*lengths: int, rows: int) -> int:
        texts = [torch.randn(length, width) for length in lengths]
        picture = torch.randn(channels, 1, rows, 16)
        _attend_by_length(network, lengths)
        network(x=[picture] * 2, t=torch.tensor([0.3, 0.3]), cap_feats=texts, return_dict=False)
        return len(graphs)

    # Equal, either one the longer, and another size of each.
    first = [draw(5, 20, rows=8), draw(70, 5, rows=16), draw(5, 130, rows=24), draw(70, 80, rows=8)]
    later = [draw(5 + 33 * number, 90, rows=8 * number) for number in range(1, LENGTHS)]
    assert first[0] > 0
    assert {*later} == {first[-1]}, (first, later)
