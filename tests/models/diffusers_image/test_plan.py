"""Counts of `plan` for picture editors equal the run's, by the inputs of diffusers' blocks."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from PIL import Image

from hyimg_cli.engine import runner
from hyimg_cli.engine.eta import Eta, Rates
from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.kernels.offload import Offload
from hyimg_cli.manifest.manifest import manifest_of
from hyimg_cli.models.diffusers_image import longcat
from hyimg_cli.models.diffusers_image.own_blocks import OWN_BLOCKS
from hyimg_cli.models.diffusers_image.record import OF_PICTURES, OF_TEXTS, read_layout
from hyimg_cli.models.diffusers_image.table import KINDS
from hyimg_cli.models.diffusers_video.layout import count_in_groups
from hyimg_cli.models.diffusers_video.weights import LoadTarget, blocks_of, load_weights
from hyimg_cli.settings.config import settle
from hyimg_cli.settings.run import CacheConfig, OutputConfig, RunConfig
from hyimg_cli.spec.events import (
    Event,
    GroupStarted,
    JobEnded,
    JobStarted,
    ModelLoading,
    Outcome,
    Progress,
    PromptsReady,
)
from hyimg_cli.spec.plan import Group, Plan

Checkpoint = Callable[[str], Path]
TEXTS = ("red", "blue", "a green hat")


@pytest.fixture
def jobs(tmp_path: Path, sources: list[str], write_manifest: Any) -> str:
    """Three sources, three instructions, two seeds."""
    Image.new("RGB", (96, 64), "red").save(tmp_path / "s2.png")
    lines = [
        {"custom_id": f"{source[:2]}-{number}-{seed}", "task": "it2i", "prompt": text}
        | {"images": [source], "seed": seed, "size": "96x64", "num_inference_steps": 2}
        for source in (*sources, "s2.png")
        for number, text in enumerate(TEXTS)
        for seed in (1, 2)
    ]
    return str(write_manifest(*lines))


@pytest.mark.parametrize(
    ("kind", "texts", "branches"), [("qwen-image-edit-plus", 9 + 3, 2), ("klein", 3, 1)]
)
def test_a_run_encodes_what_its_plan_says(
    run_cli: Any, jobs: str, tmp_path: Path, checkpoint: Checkpoint, kind: str, texts: int,
    branches: int, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Texts by prompt and sources where the encoder is shown them, by prompt alone elsewhere.

    The negative text counts as one more prompt.
    """
    # The library's own references have a million pixels.
    monkeypatch.setattr(
        "diffusers.modular_pipelines.qwenimage.encoders.calculate_dimensions",
        lambda _area, _ratio: (64, 64, None),
    )
    given = (jobs, "--model", str(checkpoint(kind)), "--cache-dir", str(tmp_path / "cache"))
    for out, wanted in (("first", (texts, 3, 0)), ("second", (0, 0, texts + 3))):
        plan = run_cli("plan", *given, "-o", str(tmp_path / out), "--json").json_lines[0]
        total = plan["total"]
        assert tuple(total[f"{n}_encodes"] for n in ("prompt", "image", "kept")) == wanted
        assert (total["denoise_steps"], total["forwards"]) == (36, 36 * branches)
        assert "18 done" in run_cli("generate", *given, "-o", str(tmp_path / out)).err
        last = [*RunFolder(tmp_path / out).results().values()][-1]
        runs = last["cache"]["encoder_runs"]
        assert (runs.get(OF_TEXTS, 0), runs.get(OF_PICTURES, 0)) == wanted[:2]
    # Of a picture that is put back on its source, too.
    outside = tmp_path / "outside.jsonl"
    outside.write_text(Path(jobs).read_text().replace('"size": "96x64", ', ""))
    kept = run_cli("plan", outside, *given[1:], "--keep-outside", "--json")
    # klein is then shown its source in another size.
    again = texts + 3 * (kind != "klein")
    assert kept.json_lines[0]["total"]["kept_encodes"] == again, kept.err
    said = run_cli("plan", *given, "-o", str(tmp_path / "third"), "--no-prompt-cache").out
    assert f"36 denoise steps, {36 * branches} forwards\n" in said
    assert (
        f"to encode: {18 * branches} prompts, 0 source images; found in the disk cache: 3" in said
    )
    for foreign in ("text stage", "prefixes", "estimated"):
        assert foreign not in said


@pytest.mark.parametrize(
    ("kind", "encoder", "expected"),
    [
        ("klein-base", "Qwen3Model", 4 + 1),
        pytest.param("qwen-image", "Qwen2_5_VLModel", 4 + 1, marks=pytest.mark.thorough),
        ("z-image", "Qwen3Model", 4 + 1),
        pytest.param("longcat", "Qwen2_5_VLModel", 4 + 1, marks=pytest.mark.thorough),
        pytest.param("klein", "Qwen3Model", 4, marks=pytest.mark.thorough),
    ],
)
def test_a_negative_text_is_encoded_once_for_all_prompts(
    run_cli: Any, write_manifest: Any, tmp_path: Path, checkpoint: Checkpoint, kind: str,
    encoder: str, expected: int,
) -> None:  # fmt: skip
    """And the line counts forwards of the encoder."""
    lines = [
        {"custom_id": text, "prompt": text, "size": "64x64", "num_inference_steps": 2, "seed": 1}
        for text in "abcd"
    ]
    forwards = 0

    def count(module: Any, _: Any) -> None:
        nonlocal forwards
        forwards += type(module).__name__ == encoder

    hook = torch.nn.modules.module.register_module_forward_pre_hook(count)
    try:
        given = ("--model", str(checkpoint(kind)), "-o", str(tmp_path / "out"))
        run_cli("generate", str(write_manifest(*lines)), *given)
    finally:
        hook.remove()
    last = [*RunFolder(tmp_path / "out").results().values()][-1]
    assert (forwards, last["cache"]["encoder_runs"][OF_TEXTS]) == (expected, expected)


@pytest.mark.parametrize("name", KINDS)
def test_conditions_are_what_the_blocks_declare(name: str) -> None:
    """The table says of each pipeline what its blocks say, who need torch for it."""
    kind = KINDS[name]
    pipe: Any = getattr(diffusers if hasattr(diffusers, kind.blocks) else longcat, kind.blocks)()
    given = {"prompt": ""} | ({"image": True} if kind.most else {})
    reads: dict[str, set[str]] = {}
    parts: dict[str, set[str]] = {}
    blocks = dict(pipe.blocks.get_execution_blocks(**given).sub_blocks)
    if kind.rewrites:  # by `hyimg think`, in a run of its own
        del blocks["prompt_upsampler"]
    if kind.own_blocks:
        OWN_BLOCKS[kind.own_blocks](blocks)
    for block_name, block in blocks.items():
        stage = block_name.split(".")[0]
        parts.setdefault(stage, set()).update(one.name for one in block.expected_components)
        reads.setdefault(stage, set()).update(one.name for one in block.inputs)
    stages = [stage for stage in reads if stage not in ("denoise", "decode")]
    assert stages == ([OF_TEXTS, OF_PICTURES] if kind.most else [OF_TEXTS])
    assert ("image" in reads[OF_TEXTS]) == (kind.shows_pictures and kind.most > 0)
    assert ("negative_prompt" in reads[OF_TEXTS]) == (kind.negative is not None)
    own = {"max_area", "_auto_resize", "output_resolution", "resolution"}
    assert own & reads.get(OF_PICTURES, set()) == own & kind.of_encoders
    assert own & reads[OF_TEXTS] == (own & kind.of_encoders if kind.shows_pictures else set())
    assert not parts[OF_TEXTS] & {"vae", "transformer", "scheduler"}
    assert not (parts.get(OF_PICTURES, set()) & kind.parts.keys()) - {"vae"}


def test_time_of_encoding_ahead_is_by_what_is_left_to_encode(
    tmp_path: Path, checkpoint: Checkpoint, sources: list[str]
) -> None:
    """A plan of more texts and fewer sources than an earlier run; loads are the model's own."""
    load, text, picture, step, end = 30.0, 3.0, 7.0, 0.5, 1.0
    config = RunConfig(OutputConfig(tmp_path / "out"), cache=CacheConfig(folder=None))
    model = str(checkpoint("klein-base"))

    def plan_of(texts: int, images: int, scale: float) -> Plan:
        lines = [
            {"custom_id": f"{n}-{source}", "task": "it2i", "prompt": f"{n}", "size": "96x64"}
            | {"images": [str(tmp_path / source)], "num_inference_steps": 4}
            | {"guidance_scale": scale}
            for n in range(texts)
            for source in sources[:images]
        ]
        manifest = manifest_of("\n".join(map(json.dumps, lines)).encode(), "test")
        jobs, _ = runner.examine(manifest, settle({"model": model}, {}, {}))
        return Plan((Group(model, "96x64", tuple(jobs)),))

    def run(plan: Plan, earlier: Rates | None, texts: int, images: int, step: float) -> Eta:
        """Followed to its end."""
        now = 0.0
        eta = Eta(plan, config, {model: [earlier]} if earlier else {}, clock=lambda: now)
        said.append(eta.left_s)
        events: list[tuple[float, Event]] = [
            (1.0, ModelLoading(model)),
            (texts * text, Progress("", "embed", texts, texts)),
            (0, PromptsReady(texts, texts, texts * text)),
            (images * picture, Progress("", "embed", images, images)),
            (0, PromptsReady(images, images, images * picture, "source pictures")),
            (load - 1.0, GroupStarted(model, "96x64")),
        ]
        for name in (job.custom_id for job in plan.jobs):
            events += [(0, JobStarted(name)), (0, Progress(name, "denoise", 0, 4))]
            events += [(step, Progress(name, "denoise", n + 1, 4)) for n in range(4)]
            events += [(end, JobEnded(Outcome(name, "done", key="")))]
        for seconds, event in events:
            now += seconds
            eta.add(event)
        return eta

    said: list[float | None] = []
    rates = run(plan_of(2, 2, 4.0), None, 2, 2, 2 * step).rates()[model]
    assert rates["load"] == pytest.approx(load)
    # Without guidance a step has one branch.
    run(plan_of(6, 1, 1.0), rates, 6, 1, step)
    assert said == [None, pytest.approx(load + 6 * text + picture + 6 * (4 * step + end))]


@pytest.mark.parametrize("kind", ["qwen-image-edit", "klein", "kontext"])
def test_blocks_of_the_text_encoder_come_one_by_one(checkpoint: Checkpoint, kind: str) -> None:
    """And its card counts them so: all but two wait."""
    layout = read_layout(checkpoint(kind))
    part = layout.components["text_encoder_2" if kind == "kontext" else "text_encoder"]
    target = LoadTarget(Offload(torch.device("cpu")), torch.float32, "group")
    module = load_weights(part, target)
    blocks = blocks_of(module)
    assert blocks
    assert all(block._forward_pre_hooks for block in blocks), "each is brought before its work"
    numbers = [sum(one.numel() for one in block.parameters()) for block in blocks]
    whole = sum(one.numel() for one in module.parameters())
    held = whole - sum(numbers) + 2 * max(numbers)
    assert count_in_groups(part.tensors()) == pytest.approx(held, rel=0.05)
