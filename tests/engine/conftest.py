"""The embedded checkpoint, loaded once, and jobs for it."""

import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hyimg_cli.kv.buffer import Rows
from hyimg_cli.kv.tree import KVTree
from hyimg_cli.media.images import read_view
from hyimg_cli.memory.footprint import Together
from hyimg_cli.models import registry
from hyimg_cli.pipelines.clock import PhaseClock
from hyimg_cli.pipelines.image.admission import WholeBatches
from hyimg_cli.pipelines.image.batch import ContinuousBatch
from hyimg_cli.pipelines.image.branches import Prefixes
from hyimg_cli.pipelines.image.stages import ImageRequest, ImageStages, encoded_by
from hyimg_cli.pipelines.queue import Ticket
from hyimg_cli.pipelines.request import Lost
from hyimg_cli.settings.run import ModelChoice, ReuseConfig
from hyimg_cli.spec.job import ImageJob, SizeRequest
from hyimg_cli.spec.options import TextSampling

REUSE = ReuseConfig()


@pytest.fixture(scope="session")
def family() -> Any:
    return registry.load(ModelChoice(device="cpu", dtype="float32"))


@pytest.fixture(scope="session")
def several_ratios(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The embedded weights with a card that lets them choose among three sizes."""
    folder = tmp_path_factory.mktemp("several") / "checkpoint"
    shutil.copytree(registry.resolve_model(registry.EMBEDDED), folder)
    card = {"name": "three sizes", "ratio_indices": [0, 16, 32]}
    (folder / "card.json").write_text(json.dumps(card))
    return registry.load(ModelChoice(model=str(folder), device="cpu", dtype="float32"))


@pytest.fixture(scope="session")
def job() -> ImageJob:
    return ImageJob(
        custom_id="job",
        task="t2i",
        prompt="a red circle on a blue background",
        images=(),
        model=registry.EMBEDDED,
        seed=7,
        size=SizeRequest(),
        num_inference_steps=3,
        guidance_scale=3.0,
        flow_shift=2.0,
        bot_task="think_recaption",
        ar_seed=7,
        text=TextSampling(temperature=0.6, top_k=1024, top_p=0.95, max_new_tokens=12),
    )


@pytest.fixture
def sources(tmp_path: Path) -> tuple[str, ...]:
    """Three different source pictures."""
    generator = np.random.default_rng(3)
    paths = []
    for index, (height, width) in enumerate([(64, 64), (48, 90), (120, 70)]):
        pixels = generator.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
        picture = Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)
        paths.append(str(tmp_path / f"source{index}.png"))
        picture.save(paths[-1])
    return tuple(paths)


@dataclass
class Drawn:
    """A finished story: the picture, every step's velocities, the events before it."""

    picture: ImageRequest
    velocities: list[torch.Tensor] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)
    timings_s: dict[str, float] = field(default_factory=dict)


@pytest.fixture
def drawn(family: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Drawn]:
    """Draws one job to its end; velocities are recorded where they leave the network."""

    def tell(job: ImageJob, reuse: ReuseConfig = REUSE, model: Any = family) -> Drawn:
        velocities: list[torch.Tensor] = []
        original = model.network.velocity

        def recorded(*arguments: Any) -> list[torch.Tensor]:
            velocities.extend(result := original(*arguments))
            return result

        clock = PhaseClock(0.0, lambda: None)
        run = ContinuousBatch(
            WholeBatches([Ticket(job)], studio_of(model, reuse=reuse), lambda since: clock),
            Together(1, 1),
        )
        with monkeypatch.context() as patch:
            patch.setattr(model.network, "velocity", recorded)
            events = list(run.run())
        last = events.pop()
        if isinstance(last, Lost):
            raise last.error
        assert isinstance(last, ImageRequest)
        return Drawn(last, velocities, events, clock.timings_s())

    return tell


def studio_of(
    model: Any, *, reuse: ReuseConfig = REUSE, tree: KVTree[Rows] | None = None
) -> ImageStages:
    """What a group works with, without reading ahead or a memo; by default nothing is shared."""
    return ImageStages(
        model=model,
        reuse=reuse,
        prefixes=Prefixes(KVTree(0) if tree is None else tree, "test"),
        read_source=lambda view: (read_view(view), 0.0),
        encode=lambda image, scope="": (encoded_by(model, image), 0.0),
    )


@pytest.fixture
def processor_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Time passes while this process works, and where what is given here "sleeps": what other
    programs take of the processor is in no phase.
    """
    slept_s = 0.0

    def sleep(seconds: float) -> None:
        nonlocal slept_s
        slept_s += seconds

    monkeypatch.setattr(time, "perf_counter", lambda: time.process_time() + slept_s)
    return sleep


@pytest.fixture(scope="session")
def ray_environment() -> Iterator[None]:
    """What Ray reads once in a process, when it is first used: each test that uses it has this."""
    if find_spec("ray") is None:
        pytest.skip("ray is not installed")
    root = Path(__file__).parents[2]
    ours = {
        "PYTHONPATH": os.pathsep.join([str(root), str(root / "tests")]),
        "RAY_TMPDIR": tempfile.mkdtemp(prefix="ray-"),  # sockets there have short names
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_kill_worker_timeout_milliseconds": "500",  # 5 s for one that is stopped
        "RAY_worker_register_timeout_seconds": "30",  # 60 s for one that was stopped as it started
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ours.items():
            patch.setenv(name, value)
        yield
    shutil.rmtree(ours["RAY_TMPDIR"], ignore_errors=True)


@pytest.fixture(scope="session")
def ray_cluster(ray_environment: None) -> Iterator[str]:
    """A cluster of two machines, both of them this one: its address. Runs stay connected to it:
    with each connection it starts workers anew, seconds of them.
    """
    import ray
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hyimg_cli.engine.replicas.cluster.disconnect", lambda: None)
        each = {"num_cpus": 2, "object_store_memory": 80_000_000}
        cluster = Cluster(initialize_head=True, head_node_args=each)
        cluster.add_node(**each)
        yield cluster.address
        ray.shutdown()
        cluster.shutdown()
