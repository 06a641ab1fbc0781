"""Golden case 13: layouts, the AR stage's transitions, size tables, schedules."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parity.golden_layouts import target_grid, target_ratio
from safetensors.torch import load_file

from hyimg_cli.diffusion.schedule import Schedule
from hyimg_cli.models.common.spans import Grid
from hyimg_cli.models.hunyuan_image3.card import buckets, model_card
from hyimg_cli.models.hunyuan_image3.script import Script
from hyimg_cli.models.hunyuan_image3.sequence import (
    LayoutBuilder,
    SourceShape,
    Target,
    sections_of_text,
)

pytestmark = pytest.mark.parity
_TRIGGERS = {"auto": "", "think": "<think>", "recaption": "<recaption>"}


@pytest.fixture(scope="module")
def tables(goldens: Path) -> dict[str, Any]:
    path = goldens / "cases" / "13_layouts_and_tables.json"
    if not path.is_file():
        pytest.skip("this folder has no case 13")
    value: dict[str, Any] = json.loads(path.read_text())
    return value


def _sources(open_case: Any, vocabulary: Any, count: int) -> tuple[SourceShape, ...]:
    """The sources that case 13 used: those of cases 10 (one) and 14 (two)."""
    if count == 0:
        return ()
    case = open_case("10_it2i_run" if count == 1 else "14_it2i_two_images", borrowed=True)
    ids = case["input_ids"][0].tolist()
    shapes = []
    for index, timestep in enumerate(case["cond_timestep_index"][0].tolist()):
        name = "cond" if count == 1 else f"cond{index + 1}"
        vit_start, vit_stop = case["cond_vit_slices"][index].tolist()
        shapes.append(
            SourceShape(
                ratio_index=vocabulary.ratios.index(ids[timestep - 1]),
                vae_grid=Grid(*case[f"{name}_vae_latents"].shape[-2:]),
                vit_grid=Grid(*case[f"{name}_vit_spatial_shapes"].flatten().tolist()),
                vit_slots=vit_stop - vit_start,
            )
        )
    return tuple(shapes)


def test_13_layouts(tables: dict[str, Any], open_case: Any, vocabulary: Any, arch: Any) -> None:
    first = open_case("07_t2i_first_step", borrowed=True)
    target = Target(target_ratio(first, vocabulary), target_grid(first))
    assert tables["layouts"], "nothing to compare"
    for stored in tables["layouts"]:
        template = stored["template"]
        builder = LayoutBuilder(
            vocabulary, has_joint_source_span=arch.has_joint_source_span, template=template
        )
        sources = _sources(open_case, vocabulary, stored["n_cond_images"])
        builder.prompt(stored["prompt"], stored["system"], sources)
        if stored["mode"] == "gen_text":
            is_ratio = stored["bot_task"] == "img_ratio"
            tag = None if is_ratio else _TRIGGERS[stored["bot_task"]]
            rows = [list(builder.opening(tag).ids)]
        else:
            sections = [
                section
                for text in stored["cot"] or []
                for section in sections_of_text(
                    vocabulary, text, template, drop_think=stored["drop_think"]
                )
            ]
            layout = builder.picture(sections, target)
            rows = [list(layout.ids), list(layout.unconditional_ids)]
        assert rows == stored["rows"], stored["name"]


def test_13_special_tokens(tables: dict[str, Any], vocabulary: Any) -> None:
    assert list(vocabulary.ratios) == tables["ratio_ids"]
    for token, id_ in tables["special_ids"].items():
        assert vocabulary.encode(token) == [id_]


def test_13_processor_trace(tables: dict[str, Any], goldens: Path, vocabulary: Any) -> None:
    """Each step's scores through the script: as many ids allowed, and the same one best."""
    scores = load_file(goldens / "cases" / "13_processor_scores.safetensors")["scores"]
    script = Script(vocabulary, "think_recaption", True, "instruct", vocabulary.ratios)
    assert len(scores) == len(tables["processor_trace"]) > 0
    for row, step in zip(scores, tables["processor_trace"], strict=True):
        allowed = script.allowed(step["history"][-1])
        if allowed is None:
            count, best = len(row), int(row.argmax())
        else:
            # Upstream keeps the best ratio alone; ours names them all and takes the best.
            count, best = 1, allowed[int(row[list(allowed)].argmax())]
        assert (count, best) == (step["n_allowed"], step["argmax_after_processing"]), step


def test_13_size_tables(tables: dict[str, Any], goldens: Path) -> None:
    card = model_card(goldens / "checkpoint", "golden")
    assert tables["resolution_tables"], "nothing to compare"
    for base, table in tables["resolution_tables"].items():
        ours = buckets(int(base), has_extras=True)
        assert [[b.size.height, b.size.width] for b in ours] == table["buckets_hw"]
        known = replace(card, buckets=ours)
        for (width, height), index, (target_width, target_height) in table[
            "lookups_wh_to_index_targetwh"
        ]:
            bucket = known.nearest_bucket(height, width)
            assert bucket.ratio_index == index
            assert (bucket.size.width, bucket.size.height) == (target_width, target_height)


def test_13_schedules(tables: dict[str, Any]) -> None:
    assert tables["schedules"], "nothing to compare"
    for name, stored in tables["schedules"].items():
        count, shift = name.removeprefix("n").split("_shift")
        schedule = Schedule(int(count), float(shift))
        torch.testing.assert_close(
            schedule.sigmas(), torch.tensor(stored["sigmas"]), atol=1e-6, rtol=0
        )
        ours = torch.tensor([step.timestep for step in schedule.steps()])
        torch.testing.assert_close(ours, torch.tensor(stored["timesteps"]), atol=1e-3, rtol=0)
