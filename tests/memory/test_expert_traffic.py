"""Experts in main memory: what the GPU holds then, and what fetching costs, at released size."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from released import released_folder

from hyimg_cli.doctor import models
from hyimg_cli.errors import UsageError
from hyimg_cli.journal import keys
from hyimg_cli.memory import footprint
from hyimg_cli.memory.available import AvailableMemory
from hyimg_cli.memory.fit import fits, need, remedy, spare_bytes
from hyimg_cli.memory.footprint import working
from hyimg_cli.memory.offload import STATED_BYTES_S, traffic
from hyimg_cli.memory.refusals import refuse_settings
from hyimg_cli.models.registry import model_card
from hyimg_cli.settings.run import MachineInfo, ModelChoice, OutputConfig, ParallelConfig, RunConfig
from hyimg_cli.spec.job import ImageJob

GB = 10**9
PLACE = MachineInfo(has_gpu=True, has_triton=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(released_folder(tmp_path_factory.mktemp("released") / "model"))


@pytest.fixture
def config(model: str) -> RunConfig:
    choice = ModelChoice(
        model, device="cuda", quantization="fp8", offloads_experts=True, machine=PLACE
    )
    return RunConfig(OutputConfig(Path("out")), model=choice)


@pytest.fixture
def drawn(model: str) -> list[ImageJob]:
    return [job for job in models._sample(models._EDIT, model=model, revision=None)
            if isinstance(job, ImageJob)]  # fmt: skip


def test_one_token_moves_an_eighth_of_the_experts(
    model: str, config: RunConfig, drawn: list[ImageJob]
) -> None:
    """By hand: 32 layers x 8 experts x 3 x 3072 x 4096 bytes, with their scales."""
    found = traffic(drawn, config, None, STATED_BYTES_S)
    of_experts = 32 * 64 * 3 * 3072 * 4096
    assert found.resident == 0
    assert found.waiting == of_experts + 32 * 64 * 4 * (2 * 3072 + 4096)
    assert found.step_s == pytest.approx(of_experts / 25e9, rel=0.01)
    assert found.token_s[1] == pytest.approx(of_experts / 8 / 25e9, rel=0.01)
    # Of 64 experts 16 rows choose 1 - (7/8)**16 = 88 %: seven times as much, not sixteen.
    assert found.token_s[16] == pytest.approx(0.882 * of_experts / 25e9, rel=0.01)


def test_a_text_takes_what_it_does_with_as_many_others_as_have_room(
    model: str, config: RunConfig, drawn: list[ImageJob]
) -> None:
    jobs = [replace(drawn[0], custom_id=str(n)) for n in range(16)]
    for free, together in ((24 * 2**30, 1), (40 * GB, 11), (80 * GB, 16)):
        found = traffic(jobs, config, AvailableMemory(free), STATED_BYTES_S)
        assert found.together == together
        assert sorted({1, together, 16}) == list(found.token_s)
        assert found.text_s(1000) == 1000 * found.token_s[together] / together


def test_what_the_card_has_left_stays_there(
    model: str, config: RunConfig, drawn: list[ImageJob]
) -> None:
    for free in (24 * GB, 48 * GB, 80 * GB, 400 * GB):
        there = AvailableMemory(free)
        found = traffic(drawn, config, there, STATED_BYTES_S)
        assert found.resident == min(found.waiting, spare_bytes(drawn, config, there))
        alone = need(model, drawn, config).total
        assert alone + found.resident <= max(free, alone), "the batch has its room first"
        part = 1 - found.resident / found.waiting
        assert found.step_s == pytest.approx(part * found.waiting / 25e9)


def test_a_small_card_is_enough_where_main_memory_holds_the_experts(
    model: str, config: RunConfig, drawn: list[ImageJob]
) -> None:
    needed, whole = need(model, drawn, config), model_card(model).loaded_bytes("bfloat16", "fp8")
    found = traffic(drawn, config, None, STATED_BYTES_S)
    assert needed.weights + needed.waiting == pytest.approx(
        whole + 2 * found.waiting / 32, abs=32
    ), "two layers' experts are on the card as well"
    assert fits(needed, AvailableMemory(32 * GB, main=128 * GB))
    assert not fits(needed, AvailableMemory(32 * GB, main=64 * GB))
    inside = replace(config, model=replace(config.model, offloads_experts=False))
    assert "--offload-experts would fit" in remedy(model, drawn, inside, AvailableMemory(32 * GB))
    assert fits(needed, AvailableMemory(24 * 2**30)), "no source is encoded beside the model there"
    small = remedy(model, drawn, inside, AvailableMemory(16 * GB, main=128 * GB))
    assert re.search(r"use a machine with 2\d\.\d GB for --quantization nf4 --off", small), small
    assert "GB for --quantization nf4;" in remedy(
        model, drawn, inside, AvailableMemory(16 * GB, main=16 * GB)
    )


def test_a_run_by_it_has_no_graphs_and_says_so_in_its_keys(config: RunConfig) -> None:
    assert not keys.by_graphs(config.model, 1)
    assert keys.by_graphs(replace(config.model, offloads_experts=False), 1)


@pytest.mark.parametrize(
    ("change", "ranks", "why"),
    [
        ({"device": "cpu"}, 1, "on the CPU"),
        ({"device": "balanced"}, 1, "one GPU"),
        ({}, 2, "one GPU"),
        ({"decode_graphs": "on"}, 1, "graph"),
    ],
)
def test_where_it_cannot_be_followed_it_is_refused(
    config: RunConfig, drawn: list[ImageJob], change: dict[str, str], ranks: int, why: str
) -> None:
    choice = replace(config.model, **change)  # type: ignore[arg-type]
    other = replace(config, model=choice, parallel=ParallelConfig(tensor_ranks=ranks))
    with pytest.raises(UsageError, match=why) as refused:
        refuse_settings(drawn, other)
    assert refused.value.where == "--offload-experts"
    refuse_settings(drawn, config)


def test_a_card_without_fp8_products_has_room_for_dense_weights(
    model: str, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cards of 24 and 48 GB are no Hoppers: one stack of 64 experts in bfloat16 is 3.2 GB."""
    here = replace(config, model=replace(config.model, machine=None))
    monkeypatch.setattr(footprint, "here", lambda: PLACE)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    card, found = model_card(model), {}
    for capability in ((8, 9), (9, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda own=capability: own)
        found[capability] = working(card, here).fixed
    assert found[8, 9] == 64 * 2 * 3072 * 4096 * 2
    assert found[9, 0] == working(card, config).fixed < found[8, 9] / 4
