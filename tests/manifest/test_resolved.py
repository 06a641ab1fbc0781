"""A resolved job, written as a manifest line and read back, is the same job."""

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from hyimg_cli.manifest.fields import SAMPLED_FIELDS
from hyimg_cli.manifest.manifest import read_manifest
from hyimg_cli.manifest.resolve import resolve_jobs
from hyimg_cli.manifest.resolved import job_to_json, lines_beside
from hyimg_cli.settings.config import Setting
from hyimg_cli.spec.card import ModelCard
from hyimg_cli.spec.job import ImageJob
from hyimg_cli.spec.options import BOT_TASKS

TEXT = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1
).filter(lambda text: text.strip())
SEEDS = st.integers(0, 2**63 - 1)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "custom_id": st.from_regex(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,20}", fullmatch=True),
    "images": st.lists(TEXT.map(lambda name: f"in/{name}.png"), min_size=1, max_size=3),
    "model": TEXT,
    "seed": SEEDS,
    "size": st.sampled_from(["auto", "64x96", "1024x768", "16:9", "3:4", "16x16"]),
    "num_inference_steps": st.integers(1, 1000),
    "guidance_scale": st.floats(0, 100),
    "flow_shift": st.floats(0.01, 100),
    "bot_task": st.sampled_from(BOT_TASKS),
    "system_prompt": TEXT,
    "metadata": st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), st.integers()),
    "x_shelf": st.integers(),
}
WRITTEN = {
    "ar_seed": SEEDS,
    "temperature": st.floats(0, 100),
    "top_k": st.integers(0, 1000),
    "top_p": st.floats(0.01, 1),
    "max_new_tokens": st.integers(1, 4096),
    "drop_think": st.booleans(),
}
GIVEN = {
    "cot_text": {"cot_text": TEXT, "drop_think": st.booleans()},
    "cot_token_ids": {"cot_token_ids": st.lists(st.integers(0, 327), min_size=1)},
}


@st.composite
def entries(draw: st.DrawFn) -> dict[str, Any]:
    """Lines with any fields that can stand together."""
    kind = draw(st.sampled_from(["written", "none", *GIVEN]))
    entry = {"prompt": draw(TEXT)} | draw(st.fixed_dictionaries({}, optional=FIELDS))
    if kind in GIVEN:
        entry.pop("bot_task", None)
        return entry | draw(st.fixed_dictionaries(GIVEN[kind]))
    if kind == "written":
        entry["bot_task"] = draw(st.sampled_from(BOT_TASKS[1:]))
        entry |= draw(st.fixed_dictionaries({}, optional=WRITTEN))
        if entry.get("temperature") == 0:
            entry = {k: v for k, v in entry.items() if k not in SAMPLED_FIELDS}
        if entry["bot_task"] == "recaption":
            entry.pop("drop_think", None)
    return entry


def resolved(
    entry: dict[str, Any], settings: dict[str, Setting], card_of: Callable[[str], ModelCard]
) -> ImageJob:
    manifest = read_manifest("-", io.StringIO(json.dumps(entry) + "\n"))
    jobs, faults = resolve_jobs(manifest, settings, card_of)
    assert not [str(fault) for fault in (*manifest.faults, *faults)]
    (job,) = jobs
    return job


@given(entry=entries())
def test_read_back_it_is_the_same_job(
    entry: dict[str, Any], settings: dict[str, Setting], card_of: Callable[[str], ModelCard]
) -> None:
    job = resolved(entry, settings, card_of)
    line = job_to_json(job)
    again = resolved(line, settings, card_of)
    assert replace(again, user_fields=job.user_fields, text=job.text, bot_task=job.bot_task) == job
    if job.writes_text and job.text.temperature:
        assert (again.text, again.bot_task) == (job.text, job.bot_task)
    assert job_to_json(again) == line


def test_fields_that_no_stage_uses_are_not_in_it(make_job: Callable[..., ImageJob]) -> None:
    silent = job_to_json(make_job(bot_task="none"))
    assert not {"temperature", "ar_seed", "drop_think", "cot_text", "images"} & silent.keys()
    told = job_to_json(make_job(cot_token_ids=(1, 2)))
    assert told["cot_token_ids"] == [1, 2]
    assert not {"temperature", "bot_task"} & told.keys()
    greedy = replace(make_job().text, temperature=0.0)
    line = job_to_json(make_job(bot_task="recaption", text=greedy, drop_think=True))
    assert line["temperature"] == 0
    assert not {"ar_seed", "top_k", "top_p", "drop_think"} & line.keys()


def test_paths_lead_from_the_folder_even_through_a_link(
    make_job: Callable[..., ImageJob], tmp_path: Path
) -> None:
    for name in ("in", "disk/far/out", "disk/model"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "out").symlink_to(tmp_path / "disk" / "far" / "out")
    (tmp_path / "in" / "cat.png").write_bytes(b"cat")
    job = make_job(images=(str(tmp_path / "in" / "cat.png"),), model=str(tmp_path / "disk/model"))
    out = tmp_path / "out"
    (line, named) = lines_beside([job, make_job(model="tencent/HunyuanImage-3.0")], out)
    assert line["model"] == "../../model"
    assert (out / line["images"][0]).read_bytes() == b"cat"
    assert str(tmp_path) not in json.dumps(line)
    assert named["model"] == "tencent/HunyuanImage-3.0"
