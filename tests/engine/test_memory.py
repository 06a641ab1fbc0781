"""How many jobs think and draw together: what memory allows."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from layouts import shared_length

from hyimg_cli.engine.session import Session
from hyimg_cli.errors import UsageError
from hyimg_cli.kernels.devices import peak_memory_mb
from hyimg_cli.memory import available as memory
from hyimg_cli.memory.available import available_memory, batch_sizes
from hyimg_cli.memory.footprint import (
    JobBytes,
    Needs,
    Together,
    footprint,
    held_weights,
    needs,
    usable_bytes,
)
from hyimg_cli.models import registry
from hyimg_cli.models.protocols import GeneratedText
from hyimg_cli.settings.run import (
    BatchConfig,
    ModelChoice,
    OutputConfig,
    ParallelConfig,
    ReuseConfig,
    RunConfig,
)
from hyimg_cli.spec.card import Working
from hyimg_cli.spec.job import ImageJob, SizeRequest

CONFIG = RunConfig(OutputConfig(Path()), model=ModelChoice(device="cpu", dtype="float32"))
LARGE = Needs(40, JobBytes(context=10, branches=30, step=20, prefill=15), decode=25)


def test_counts_the_branches_of_a_job_without_text(family: Any, job: ImageJob) -> None:
    plain = replace(job, bot_task="none", size=SizeRequest(64, 64))
    layout = family.canvas(plain, [], GeneratedText()).branches[0].layout
    share, row = needs([plain], family.card, CONFIG).share, 2 * family.card.activations["cpu"].row
    # float32 is twice the stored bfloat16
    rows = 2 * layout.live_start - shared_length(layout)
    assert share.branches == rows * 2 * family.card.kv_bytes_per_token
    assert share.step == 2 * (layout.live_stop - layout.live_start) * row
    assert share.prefill == layout.live_start * row
    assert share.context == 0
    apart = replace(CONFIG, parallel=ParallelConfig(cfg_ranks=2))
    rows = 2 * layout.live_start
    own = needs([plain], family.card, apart).share
    assert own.branches == rows * 2 * family.card.kv_bytes_per_token


def test_a_context_is_as_large_as_its_rows(
    family: Any, job: ImageJob, sources: tuple[str, ...]
) -> None:
    writes = replace(job, text=replace(job.text, max_new_tokens=30), images=sources[:1])
    shapes = [family.prompter.source_shape(family.prompter.fit(64, 64)[0], None)]
    opening = family.prompter.opening(writes, shapes)
    assert opening.capacity == len(opening.ids) + 30 + 8
    row_bytes = family.arena.storage.row_bytes
    share = needs([writes], family.card, CONFIG).share
    assert share.context == opening.capacity * row_bytes
    assert share.both == 0, "branches share it"
    for config, one in (
        (replace(CONFIG, reuse=ReuseConfig(kv_reuse=False)), writes),
        (CONFIG, replace(writes, drop_think=True)),
    ):
        assert needs([one], family.card, config).share.both > 0
    row, layers = 2 * family.card.activations["cpu"].row, len(family.layer_devices)
    rows = (share.prefill + share.step // 2) // row
    assert share.joined * layers == 2 * rows * row_bytes, "of both branches"


@pytest.mark.parametrize(
    ("together", "moment", "kv", "activations"),
    [
        (Together(16, 4), "draw", 15 * 10 + 4 * 30, 4 * 20),
        (Together(16, 1), "draw", 15 * 10 + 30, 20),
        (Together(1, 1), "draw", 30, 20),
    ],
)
def test_the_widest_moment_counts(
    together: Together, moment: str, kv: int, activations: int
) -> None:
    held = LARGE.widest(together)
    assert (held.moment, held.kv, held.activations) == (moment, kv, activations)


def test_other_moments_can_be_the_widest() -> None:
    in_the_vae = replace(LARGE, decode=10**4).widest(Together(8, 2))
    assert (in_the_vae.moment, in_the_vae.kv, in_the_vae.activations) == ("decode", 70, 10**4)
    opening = replace(LARGE, encode=10**4).widest(Together(8, 2))
    assert (opening.moment, opening.kv, opening.activations) == ("think", 90, 10**4)
    beside = replace(LARGE, prefetch=7, kept=3).widest(Together(16, 4))
    assert (beside.kv, beside.activations) == (15 * 10 + 4 * 30 + 3, 4 * 20 + 7)
    few = replace(LARGE, jobs=5).widest(Together(16, 4))
    assert few.kv == 10 + 4 * 30, "five jobs: one that waits"
    unshared = replace(LARGE, share=LARGE.share._replace(both=10, joined=7))
    assert unshared.widest(Together(16, 4)).kv == 16 * 10 + 4 * 30
    assert unshared.widest(Together(16, 4)).activations == 4 * (20 + 7)


def test_graphs_keep_a_steps_memory() -> None:
    forward = Working(row=3, fixed=11)
    with_graphs = replace(LARGE, forward=forward, has_graphs=True)
    plain = replace(LARGE, forward=forward)
    more = with_graphs.widest(Together(16, 4)).total - plain.widest(Together(16, 4)).total
    assert more == 24 * 3 + 11, "the graph of up to 24 rows"


@pytest.mark.parametrize(
    ("room", "thinking", "drawing"),
    [(10**6, 16, 16), (460, 16, 6), (200, 16, 1), (199, 15, 1), (59, 1, 1), (0, 1, 1)],
)
def test_drawing_gives_way_before_thinking(room: int, thinking: int, drawing: int) -> None:
    found = LARGE.fitting(room, 16)
    assert found == Together(thinking, drawing)
    assert room < 60 or LARGE.widest(found).total <= room


def test_a_session_chooses_by_what_is_free(
    family: Any, job: ImageJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [replace(job, custom_id=str(n)) for n in range(40)]
    card = replace(family.card, vae_bytes_per_pixel=0)
    model: Any = SimpleNamespace(card=card, dtype_name="float32")
    found = needs(jobs, card, CONFIG)
    for expected in (Together(16, 16), Together(16, 3), Together(2, 1)):
        room = int(found.widest(expected).total / 0.85) + 2
        monkeypatch.setattr(memory, "free_bytes", lambda *_, room=room: room)
        assert batch_sizes(jobs, model, CONFIG) == expected
    monkeypatch.setattr(memory, "free_bytes", lambda *_: 10**15)
    assert batch_sizes(jobs, model, CONFIG) == Together(16, 16)
    limit = card.loaded_bytes("float32") + int(found.widest(Together(16, 5)).total / 0.85) + 2
    monkeypatch.setattr(BatchConfig, "memory_bytes", property(lambda _self: limit))
    assert batch_sizes(jobs, model, CONFIG) == Together(16, 5)


def test_a_job_that_cannot_be_counted_takes_nothing(family: Any, job: ImageJob) -> None:
    assert needs([replace(job, prompt="<img>")], family.card, CONFIG).share == JobBytes()
    assert memory.free_bytes(family) > 0
    assert peak_memory_mb(family.layer_devices) > 10


def test_what_torch_keeps_of_earlier_tensors_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a group the allocator has nearly all of a GPU: the next group is not to be cut."""
    fakes = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "mem_get_info": lambda _: (10, 100),
        "memory_reserved": lambda _: 70,
        "memory_allocated": lambda _: 50,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    model: Any = SimpleNamespace(layer_devices=[torch.device("cuda:0"), torch.device("cpu")])
    assert memory.free_bytes(model) == 30
    for device, free in (("cuda:1", 30), ("balanced", 60), ("cuda", 30)):
        assert available_memory(replace(CONFIG, model=ModelChoice(device=device))).free == free
    # Of 100 a part, of which 50 are taken; never more than is free.
    assert [memory.free_bytes(model, part) for part in (0.9, 0.7, 0.4)] == [30, 20, 0]
    part = replace(_on_gpu(0.7), model=ModelChoice(device="balanced"))
    assert available_memory(part).free == 40


@pytest.fixture
def large_gpu(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, torch.device]]:
    """A GPU of 100 GB, of which another process has 10; what torch was told of its part."""
    told: list[tuple[float, torch.device]] = []
    fakes = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "mem_get_info": lambda _: (90 * 10**9, 100 * 10**9),
        "memory_reserved": lambda _: 0,
        "memory_allocated": lambda _: 0,
        "set_per_process_memory_fraction": lambda part, gpu: told.append((part, gpu)),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return told


def _on_gpu(part: float | None, memory_gb: int | None = None) -> RunConfig:
    batch = BatchConfig(
        prefix_cache_mb=0,
        prefetches_sources=False,
        memory_gb=memory_gb,
        gpu_memory_utilization=part,
    )
    return replace(CONFIG, model=ModelChoice(device="cuda", dtype="bfloat16"), batch=batch)


@pytest.mark.usefixtures("large_gpu")
def test_fewer_work_together_on_a_part_of_a_gpu(family: Any, job: ImageJob) -> None:
    jobs = [replace(job, custom_id=str(n)) for n in range(40)]
    card = replace(family.card, vae_bytes_per_pixel=0, kv_bytes_per_token=40_000_000)
    model: Any = SimpleNamespace(card=card, layer_devices=[torch.device("cuda:0")])
    found = needs(jobs, card, _on_gpu(None))

    def chosen(part: float | None, memory_gb: int | None = None) -> Together:
        return batch_sizes(jobs, model, _on_gpu(part, memory_gb))

    assert chosen(None) == chosen(1.0) == found.fitting(usable_bytes(90 * 10**9), 16)
    assert chosen(0.5) == found.fitting(usable_bytes(50 * 10**9), 16)
    assert 1 <= chosen(0.5).drawing < chosen(None).drawing <= 16
    # Both: the smaller counts.
    assert chosen(0.5, 80) == chosen(0.5)
    assert chosen(0.9, 20) == chosen(None, 20)
    assert chosen(None, 20).thinking < chosen(0.5).thinking


def test_a_part_of_a_gpu_binds_torch_too(large_gpu: list[tuple[float, torch.device]]) -> None:
    memory.limit_gpu_memory(_on_gpu(None))
    assert large_gpu == []
    memory.limit_gpu_memory(_on_gpu(0.6))
    assert large_gpu == [(0.6, torch.device("cuda:0"))]
    with pytest.raises(UsageError, match="on the CPU") as raised:
        memory.limit_gpu_memory(replace(_on_gpu(0.6), model=ModelChoice(device="cpu")))
    assert raised.value.where == "--gpu-memory-utilization"


def test_a_session_that_ends_leaves_the_gpu_to_the_next(
    large_gpu: list[tuple[float, torch.device]],
) -> None:
    for part in (None, 0.6):
        Session(_on_gpu(part)).close()
    assert large_gpu == [(1.0, torch.device("cuda:0"))]


@pytest.mark.parametrize("sets", [1, 2])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_plan_and_a_session_of_ranks_agree(
    family: Any, job: ImageJob, monkeypatch: pytest.MonkeyPatch, device: str, sets: int
) -> None:
    """Each rank has half of the K/V, on a GPU of its own or beside the other in main memory."""
    config = replace(
        CONFIG,
        model=ModelChoice(device=device, dtype="float32"),
        batch=BatchConfig(prefix_cache_mb=0, prefetches_sources=False, memory_gb=1),
        parallel=ParallelConfig(tensor_ranks=2, cfg_ranks=sets),
    )
    jobs = [replace(job, custom_id=str(n)) for n in range(40)]
    held_kv = 500_000 // sets if device == "cpu" else 700_000
    large = replace(family.card, vae_bytes_per_pixel=0, kv_bytes_per_token=held_kv)
    kv_bytes = large.kv_bytes_per_token * (1 if device == "cuda" else 2 * sets) // 2
    model: Any = SimpleNamespace(card=replace(large, kv_bytes_per_token=kv_bytes))
    monkeypatch.setattr(memory, "free_bytes", lambda *_: 10**15)
    planned, chosen = footprint(jobs, large, config), batch_sizes(jobs, model, config)
    assert 1 < chosen.drawing < 16, "memory decides"
    assert Together(planned.thinking, planned.drawing) == chosen
    held = registry.sequences(config.model.model).rank_bytes(2, "float32", "none")
    expected = held.first + ((2 * sets - 1) * held.other if device == "cpu" else 0)
    assert held_weights(large, config) == expected
    one, alone = (needs([job], large, each).share for each in (config, CONFIG))
    assert (one.context, one.branches) == (alone.context, alone.branches)


def test_prefixes_that_are_held_are_counted_once(
    family: Any, job: ImageJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full tree grows no more: a later group has what the first one had beside it."""
    held, config = 10**8, replace(CONFIG, batch=BatchConfig(prefix_cache_mb=100))
    jobs = [replace(job, custom_id=str(n)) for n in range(40)]
    card = replace(family.card, vae_bytes_per_pixel=0, kv_bytes_per_token=400_000)
    model: Any = SimpleNamespace(card=card)
    first = needs(jobs, card, config)
    assert first.kept - needs(jobs, card, config, prefixes=0).kept == held
    room = int(first.widest(Together(16, 3)).total / 0.85) + 2
    monkeypatch.setattr(memory, "free_bytes", lambda *_: room)
    assert batch_sizes(jobs, model, config) == Together(16, 3)
    monkeypatch.setattr(memory, "free_bytes", lambda *_: room - held)
    assert batch_sizes(jobs, model, config, held_prefixes=held) == Together(16, 3)
