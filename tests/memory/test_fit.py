"""Whether it fits: one rule, which plan, doctor and the run ask, and what makes it fit."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from machines import with_gpus, with_main_memory
from released import released_folder

from hyimg_cli.doctor import models
from hyimg_cli.engine.preparation import fits_of
from hyimg_cli.engine.replicas import local as replicas
from hyimg_cli.engine.runner import replicas_of
from hyimg_cli.engine.session import Session
from hyimg_cli.errors import MachineError
from hyimg_cli.journal.keys import key_of
from hyimg_cli.manifest.planner import make_plan
from hyimg_cli.memory import fit, refusals
from hyimg_cli.memory.available import AvailableMemory, available_memory
from hyimg_cli.memory.fit import Fit, check_fit, fits, in_forms, memory_guard, need, need_of_second
from hyimg_cli.memory.footprint import Need, footprint, needs
from hyimg_cli.memory.videos import needs_of
from hyimg_cli.models import registry
from hyimg_cli.models.registry import video_card
from hyimg_cli.pipelines.image import pipeline as pictures
from hyimg_cli.settings.config import build_run_config, settle
from hyimg_cli.settings.run import (
    OFFLOADS,
    QUANTIZATIONS,
    BatchConfig,
    ModelChoice,
    OutputConfig,
    ParallelConfig,
    RunConfig,
)
from hyimg_cli.spec.job import Job
from hyimg_cli.spec.plan import Plan
from hyimg_cli.spec.units import bytes_text

GB = 10**9
CPU = RunConfig(OutputConfig(Path()), model=ModelChoice(device="cpu", dtype="bfloat16"))
GPU = replace(CPU, model=ModelChoice(device="cuda"))


class Loaded(Exception):
    """A run came to the point where it loads."""


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The released model's small files: 166 GB of weights in bfloat16."""
    return str(released_folder(tmp_path_factory.mktemp("released") / "released"))


def edits(model: str) -> list[Job]:
    return _three(models._sample(models._EDIT, model=model, revision=None))


def videos() -> list[Job]:
    return _three(
        models._sample({"prompt": "a film", "task": "t2v"}, video_model="tiny-video", revision=None)
    )


def _three(jobs: Any) -> list[Job]:
    return [replace(jobs[0], custom_id=str(n)) for n in range(3)]


def test_the_margin_is_of_the_work(released: str) -> None:
    """Of what weights leave free 85 % may be filled."""
    jobs = edits(released)
    card = registry.model_card(released)
    weights = card.loaded_bytes("bfloat16")
    work = footprint(jobs[:1], card, CPU).least - weights  # type: ignore[arg-type]
    assert work > GB
    enough = weights + -(-work * 100 // 85)
    verdicts = [
        check_fit(released, jobs, CPU, AvailableMemory(free)) for free in (enough, enough - 1)
    ]
    assert [one.is_enough for one in verdicts] == [True, False]
    assert verdicts[0].needed.total == enough
    assert not check_fit(released, jobs, CPU, AvailableMemory(weights - 1)).is_enough


def test_no_more_is_kept_of_prefixes_than_the_jobs_have(released: str) -> None:
    jobs, card = edits(released), registry.model_card(released)
    config = replace(CPU, batch=replace(CPU.batch, prefix_cache_mb=10**6))
    all_of_them = needs(jobs, card, config).kept  # type: ignore[arg-type]
    assert all_of_them < 10**12
    for most in (0, 10**6):
        kept = needs(jobs, card, config, prefixes=most).kept  # type: ignore[arg-type]
        assert all_of_them - kept > most


def test_a_second_model_needs_room_for_a_full_batch(released: str) -> None:
    """Or for as much again as its weights, where its work is not known."""
    jobs = edits(released)
    alone, beside = need(released, jobs[:1], CPU), need_of_second(released, jobs, CPU)
    assert beside.work == need(released, jobs, CPU, together=3).work > alone.work
    weights = need("tiny-video", videos(), CPU).weights
    assert need_of_second("tiny-video", videos(), CPU).total > 2 * weights > 0


def test_networks_that_wait_need_main_memory() -> None:
    needed = Need(10, waiting=50)
    found = [
        fits(needed, AvailableMemory(free, main=main))
        for free, main in ((10, 50), (10, 49), (9, 50))
    ]
    assert found == [True, False, False]


def test_a_model_takes_the_fastest_offload_that_fits_unless_the_user_decides(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with_gpus(monkeypatch, [10**12])
    plain = replace(CPU, model=ModelChoice(device="cuda", dtype="bfloat16"))
    jobs = videos()
    networks = video_card("tiny-video")
    turns = [replace(plain, model=replace(plain.model, cpu_offload=turn)) for turn in OFFLOADS]
    most = [
        max(one.total for one in needs_of(jobs[0], networks, config).values()) for config in turns
    ]
    assert most == sorted(most, reverse=True)
    assert most[0] > most[1]
    for free in most:
        turn = next(turn for turn, needed in zip(OFFLOADS, most, strict=True) if needed <= free)
        found = check_fit("tiny-video", jobs, plain, AvailableMemory(free, "cuda:0"))
        assert (found.is_enough, found.config.model.cpu_offload) == (True, turn)
        assert (f"(--cpu-offload {turn}); same pixels" in found.offload) == (turn != "none")
        assert key_of(jobs[0], [], found.config) == key_of(jobs[0], [], plain)
    there = AvailableMemory(most[1], "cuda:0")
    alone = replace(plain, model=replace(plain.model, auto_fit=False))
    assert check_fit("tiny-video", jobs, alone, there).config is alone
    # Where only the weights fit, the moment that is short is named.
    weights = [need("tiny-video", jobs[:1], config).total for config in turns]
    refused = check_fit("tiny-video", jobs, plain, AvailableMemory(weights[0] - 1))
    assert max(weights[1:]) < weights[0] < most[-1]
    assert not refused.is_enough
    assert "--cpu-offload model would fit with" in refused.remedy
    assert f"one job needs about {bytes_text(most[1])} to decode" in refused.remedy
    # Main memory must hold what waits.
    narrow = check_fit("tiny-video", jobs, plain, replace(there, main=10))
    assert narrow.config is plain
    # An offload that is given, even none, is kept.
    for flags in ({"cpu_offload": "none"}, {"auto_fit": False}):
        given = build_run_config(settle(flags, {}, {}), tmp_path, None)
        assert not given.model.auto_fit
    assert build_run_config(settle({}, {}, {}), tmp_path, None).model.auto_fit


# --- three callers, one answer -------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """Bytes free on each GPU, or in main memory where there is none."""

    free: int
    gpus: int = 0

    def take(self, patch: pytest.MonkeyPatch) -> None:
        with_main_memory(patch, 10**12 if self.gpus else self.free)
        if self.gpus:
            with_gpus(patch, [self.free] * self.gpus, total=2 * self.free)


def says_plan(machine: Machine, order: Plan, config: RunConfig) -> bool:
    """Told what the machine has: on GPUs over which the layers are spread, all of them."""
    free = machine.free * (machine.gpus if config.model.device == "balanced" else 1)
    gb: Any = Fraction(free, GB)
    config = replace(config, batch=replace(config.batch, memory_gb=gb))
    return all(fit.is_enough for fit in fits_of(order, config).values())


def says_doctor(config: RunConfig, *, is_video: bool) -> bool:
    check = models.video_memory if is_video else models.image_memory
    return check(config).status != "failed"


def says_run(patch: pytest.MonkeyPatch, order: Plan, config: RunConfig) -> bool:
    """Whether it comes to load anything."""

    def load(*_: Any, **__: Any) -> Any:
        raise Loaded

    class Ranks:
        def __init__(self, *_: Any, **__: Any) -> None:
            self.load, self.stop = load, lambda: None

    patch.setattr(registry, "load", load)
    patch.setattr(registry, "load_video", load)
    patch.setattr(pictures, "ImageRanks", Ranks)
    count = replicas_of(order, config)
    try:
        replicas._refuse_little_memory(config, order, count)
        with Session(config) as session:
            list(session.run(order))
    except MachineError as error:
        if error.code != "machine.memory":
            raise
        return False
    except Loaded:
        return True
    raise AssertionError("nothing was loaded")


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_plan_doctor_and_run_agree(released: str, data: st.DataObject) -> None:
    is_video = data.draw(st.booleans(), "video")
    gpus = data.draw(st.sampled_from([0, 1, 4]), "gpus")
    device = "cpu" if not gpus else data.draw(st.sampled_from(["cuda", "balanced"]), "device")
    device = "cuda" if is_video and gpus else device
    parallel = data.draw(st.sampled_from([(1, 1), (2, 1), (1, 3)]), "ranks, replicas")
    if gpus:
        parallel = (parallel[0] if gpus == 4 and device == "cuda" else 1, 1)
    choice = ModelChoice(
        model=released,
        device=device,
        dtype=data.draw(st.sampled_from(["float32", "bfloat16"]), "dtype"),
        quantization=data.draw(st.sampled_from(QUANTIZATIONS), "quantization"),
        cpu_offload=data.draw(st.sampled_from(OFFLOADS), "offload")
        if is_video and gpus
        else "none",
    )
    config = replace(
        CPU,
        model=choice,
        parallel=ParallelConfig(tensor_ranks=1 if is_video else parallel[0], replicas=parallel[1]),
    )
    jobs = videos() if is_video else edits(released)
    order = make_plan(jobs, registry.model_card)
    needed = need(order.groups[0].model, jobs[:1], config).total
    near = data.draw(st.sampled_from([0.4, 0.99, 1.0, 1.01, 1.3]), "times")
    edge = data.draw(st.integers(-1, 1), "bytes")
    free = int(near * needed) * parallel[1] + edge
    if device == "balanced":
        free = free // gpus + edge
    machine = Machine(free, gpus)
    with pytest.MonkeyPatch.context() as patch:
        machine.take(patch)
        doctor = says_doctor(config, is_video=is_video)
        assert says_plan(machine, order, config) == doctor
        assert says_run(patch, order, config) == doctor


# --- what makes it fit ---------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(free=st.integers(1, 400), form=st.sampled_from(QUANTIZATIONS))
def test_a_quantization_that_is_named_fits_and_none_before_it(
    released: str, free: int, form: Any
) -> None:
    config = replace(GPU, model=replace(GPU.model, quantization=form))
    jobs, there = edits(released)[:1], AvailableMemory(free * GB)
    smaller = [one for one in QUANTIZATIONS if QUANTIZATIONS.index(one) > QUANTIZATIONS.index(form)]
    enough = {
        one: check_fit(released, jobs, changed, there).is_enough
        for one, changed in in_forms(jobs, config).items()
    }
    assume(not enough[form])
    said = check_fit(released, jobs, config, there).remedy
    first = next((one for one in smaller if enough[one]), None)
    assert (f"--quantization {first} would fit" in said) == (first is not None)
    outside = [
        check_fit(
            released, jobs, replace(one, model=replace(one.model, offloads_experts=True)), there
        )
        for one in (config, *(in_forms(jobs, config)[form] for form in smaller))
    ]
    has_room = any(one.is_enough for one in outside)
    assert ("--offload-experts would fit" in said) == (first is None and has_room)
    assert ("free some memory, or use a machine with" in said) == (first is None and not has_room)


@pytest.mark.parametrize(
    ("free_gb", "changes", "said"),
    [
        (140, {}, "--quantization fp8 would fit with "),
        (79, {}, "--quantization nf4 would fit with "),
        (79, {"quantization": "fp8"}, "--quantization nf4 would fit with "),
        (39, {}, "--offload-experts would fit with "),
        (28, {}, "--quantization fp8 --offload-experts would fit with "),
        (
            12,
            {},
            "GB for --quantization nf4 --offload-experts; split it over more GPUs with --tensor",
        ),
        (12, {"offloads_experts": True}, "--offload-experts is already on"),
        (39, {"device": "balanced"}, "split it over more GPUs with --tensor-parallel-size"),
        (70, {"device": "cpu", "dtype": "float32", "quantization": "nf4"}, "--dtype bfloat16"),
        (39, {"device": "cpu", "quantization": "nf4"}, "or use a machine with "),
    ],
)
def test_the_setting_that_changes_least_is_named(
    released: str, free_gb: int, changes: dict[str, Any], said: str
) -> None:
    config = replace(GPU, model=replace(GPU.model, **({"dtype": "bfloat16"} | changes)))
    found = check_fit(released, edits(released), config, AvailableMemory(free_gb * GB))
    assert not found.is_enough
    assert said in found.remedy


@pytest.mark.parametrize("refused", [{"decode_graphs": "on"}, {"device": "balanced"}])
def test_a_setting_that_the_run_would_refuse_is_not_named(
    released: str, refused: dict[str, Any]
) -> None:
    there = AvailableMemory(39 * GB)
    assert "--offload-experts" in check_fit(released, edits(released), GPU, there).remedy
    config = replace(GPU, model=replace(GPU.model, **refused))
    assert "--offload-experts" not in check_fit(released, edits(released), config, there).remedy


@pytest.mark.parametrize("is_installed", [True, False])
def test_4_bits_of_a_video_are_named_where_its_package_is(
    monkeypatch: pytest.MonkeyPatch, is_installed: bool
) -> None:
    spec = object() if is_installed else None
    monkeypatch.setattr(refusals, "find_spec", lambda name: spec)
    config = replace(GPU, model=replace(GPU.model, cpu_offload="group"))
    packed = replace(config, model=replace(config.model, quantization="nf4"))
    room = need("tiny-video", videos()[:1], packed)
    found = check_fit("tiny-video", videos(), config, AvailableMemory(room.total))
    assert ("--quantization nf4 would fit" in found.remedy) is is_installed


@pytest.mark.parametrize(("free_gb", "ranks"), [(102, 2), (62, 4)])
def test_as_many_ranks_as_are_needed_are_named(released: str, free_gb: int, ranks: int) -> None:
    there = AvailableMemory(free_gb * GB, "cuda:0", gpus=8)
    found = check_fit(released, edits(released), GPU, there)
    assert found.remedy.startswith(f"--tensor-parallel-size {ranks} would fit with ")
    split = replace(GPU, parallel=ParallelConfig(tensor_ranks=ranks))
    assert check_fit(released, edits(released), split, there).is_enough


def test_ranks_are_those_that_the_lines_model_can_be_split_over(released: str) -> None:
    """The run's own model, which has no such line, could be split over six."""
    found = check_fit(released, edits(released), GPU, AvailableMemory(10 * GB, "cuda:0", gpus=7))
    assert "split it over more GPUs with --tensor-parallel-size" in found.remedy


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU of 200 GB, 190 of them free."""
    with_gpus(monkeypatch, [190 * GB], total=200 * GB)
    return


@pytest.mark.usefixtures("gpu")
def test_a_setting_that_allows_less_is_named(released: str) -> None:
    part = replace(GPU, batch=BatchConfig(gpu_memory_utilization=0.5))
    told = replace(GPU, batch=BatchConfig(memory_gb=90))
    jobs = edits(released)
    with memory_guard(released, jobs, GPU):
        pass
    for config, what in (
        (part, "--gpu-memory-utilization 0.5 allows 100.0 GB"),
        (told, "[batch] memory_gb allows 90.0 GB"),
    ):
        with pytest.raises(MachineError) as raised, memory_guard(released, jobs, config):
            raise AssertionError("refused before")
        assert what in raised.value.what
        assert "the weights take 168.5 GB and one job another" in raised.value.what
        assert raised.value.hint.startswith("raise ")


@pytest.mark.usefixtures("gpu")
def test_memory_that_runs_out_while_loading_names_what_helps(released: str) -> None:
    with pytest.raises(MachineError) as raised, memory_guard(released, edits(released), GPU):
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert raised.value.code == "machine.memory"
    assert "the GPU ran out of memory" in raised.value.what
    assert "--quantization fp8 would fit" in raised.value.hint
    # What is counted was there: it was too little all the same, and nothing takes less.
    least = replace(GPU, model=replace(GPU.model, quantization="nf4"))
    with pytest.raises(MachineError) as raised, memory_guard(released, edits(released), least):
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert raised.value.hint.startswith("free some memory, or use a machine with")


def test_a_model_without_experts_is_refused_in_words_before_there_are_jobs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A benchmark has none: no job says what the model cannot do."""
    card = replace(registry.model_card("tiny-image"), routing=None)
    monkeypatch.setattr(fit, "model_card", lambda *_: card)
    found = check_fit("tiny-image", (), CPU, AvailableMemory(1))
    assert not found.is_enough
    assert "free some memory, or use a machine with" in found.remedy


def test_one_job_that_is_too_large_ends_no_run(released: str) -> None:
    """It fails alone, later; a run is refused where none of its jobs fits."""
    small, large = edits(released)[:2]
    long = replace(large, text=replace(large.text, max_new_tokens=15_000))  # type: ignore[union-attr]
    enough = AvailableMemory(need(released, [small], CPU).total)
    assert need(released, [long], CPU).total > enough.free
    assert check_fit(released, [long, small], CPU, enough).is_enough
    assert not check_fit(released, [long], CPU, enough).is_enough


def test_present_is_of_the_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    with_main_memory(monkeypatch, 64.5 * GB)
    assert available_memory(CPU).free == int(64.5 * GB)
    assert available_memory(CPU, replicas=4).free == 16.125 * GB
    asked = replace(CPU, batch=BatchConfig(memory_gb=30))
    assert (available_memory(asked).free, available_memory(asked, replicas=4).free) == (
        30 * GB,
        7.5 * GB,
    )


def test_a_refusal_names_the_memory_that_is_too_small() -> None:
    there = AvailableMemory(141_000_000_000, "cuda:0", main=15_000_000_000)
    on_gpu = Fit(Need(150_000_000_000), there, GPU).refusal()
    assert on_gpu.what == "the weights take 150.0 GB; cuda:0 has 141.0 GB free"
    waits = Fit(Need(2_600_000_000, waiting=31_000_000_000), there, GPU).refusal()
    assert waits.what == (
        "the networks that wait take 31.0 GB of main memory, which has 15.0 GB free"
    )
