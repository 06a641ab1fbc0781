"""What a video takes on its device, against what was counted for released models."""

from dataclasses import replace
from pathlib import Path

import pytest
from tiny_video import WAN_CARD

from hyimg_cli.memory.fit import cards_for
from hyimg_cli.memory.videos import decode_bytes, needs_of
from hyimg_cli.models.common.config import Config
from hyimg_cli.models.diffusers_video.record import (
    _HUNYUAN_DECODE,
    WAN_DECODE,
    hunyuan_forward,
    wan_forward,
)
from hyimg_cli.settings.run import ModelChoice, OutputConfig, RunConfig
from hyimg_cli.spec.card import TileRule, VideoCard, VideoDefaults
from hyimg_cli.spec.job import Size, VideoJob

GPU = ModelChoice(device="cuda", dtype="bfloat16")
SMALL, LARGE = Size(480, 832), Size(720, 1280)
DEFAULTS = VideoDefaults(
    size=SMALL, num_frames=81, fps=16, num_inference_steps=50, guidance_scale=5.0, flow_shift=3.0
)
WAN = replace(
    WAN_CARD,
    model="wan",
    name="14B",
    is_trained=True,
    component_bytes=(("text_encoder", 0), ("transformer", 0), ("vae", 0)),
    component_parameters=(
        ("text_encoder", 5_680_000_000),
        ("transformer", 14_300_000_000),
        ("vae", 127_000_000),
    ),
    defaults=DEFAULTS,
    forward=wan_forward(Config({}, "")),
    grouped_parameters=(("transformer", 715_000_000),),
    decode=WAN_DECODE,
)
PAIR = replace(
    WAN,
    component_bytes=(*WAN.component_bytes, ("transformer_2", 0)),
    component_parameters=(*WAN.component_parameters, ("transformer_2", 14_300_000_000)),
    grouped_parameters=(*WAN.grouped_parameters, ("transformer_2", 715_000_000)),
)
HUNYUAN = replace(
    WAN,
    pixels_per_cell=16,
    tiles=TileRule(16, 12, 16),
    component_parameters=(
        ("text_encoder", 7_070_000_000),
        ("transformer", 8_330_000_000),
        ("vae", 1_260_000_000),
    ),
    forward=hunyuan_forward(Config({}, "")),
    grouped_parameters=(("transformer", 308_518_518),),
    decode=_HUNYUAN_DECODE,
)


def job(size: Size, frames: int) -> VideoJob:
    return VideoJob(
        custom_id="a", task="t2v", prompt="a dog", negative_prompt="", model="tiny-video", seed=1,
        size=size, num_frames=frames, fps=16, num_inference_steps=50, guidance_scale=5.0,
        flow_shift=3.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("card", "is_tiled", "size", "frames", "counted_gb"),
    [
        (HUNYUAN, True, SMALL, 81, 9.8),
        (HUNYUAN, True, SMALL, 121, 14.6),
        (HUNYUAN, True, LARGE, 81, 10.1),
        (HUNYUAN, True, LARGE, 121, 15.1),
        (HUNYUAN, False, SMALL, 81, 59.2),
        (HUNYUAN, False, LARGE, 121, 200),
        (WAN, False, SMALL, 81, 4.2),
        (WAN, False, SMALL, 121, 4.3),
        (WAN, False, LARGE, 81, 9.8),
        (WAN, False, LARGE, 121, 10.0),
        (WAN, True, SMALL, 121, 1.4),
        (WAN, True, LARGE, 81, 2.1),
    ],
)
def test_a_decode_follows_what_was_counted(
    card: VideoCard, is_tiled: bool, size: Size, frames: int, counted_gb: float
) -> None:
    """Of the library's decode; ours holds fewer tiles."""
    choice = replace(GPU, vae_use_tiling=is_tiled)
    found = decode_bytes(job(size, frames), card, choice)
    assert found == pytest.approx(counted_gb * 1e9, rel=0.34 if card is WAN and is_tiled else 0.1)
    wide = decode_bytes(job(size, frames), replace(card, has_float32_vae=True), choice)
    assert wide == decode_bytes(job(size, frames), card, replace(choice, dtype="float32"))
    assert wide == 2 * found


def _run(choice: ModelChoice) -> RunConfig:
    return RunConfig(OutputConfig(Path("out")), model=choice)


def test_what_takes_turns_needs_less_at_every_moment() -> None:
    one = job(LARGE, 81)
    found = {
        how: needs_of(one, PAIR, _run(replace(GPU, cpu_offload=how)))
        for how in ("none", "model", "group")
    }
    whole, turns, groups = (found[how] for how in ("none", "model", "group"))
    all_weights = 2 * (2 * 14_300_000_000 + 127_000_000)
    assert whole["denoise"].weights == whole["decode"].weights == all_weights
    assert turns["denoise"].weights == 2 * 14_300_000_000
    assert groups["denoise"].weights == turns["denoise"].weights // 20
    assert turns["decode"].weights == groups["decode"].weights == 2 * 127_000_000
    # As it was counted for two blocks: 22 of the network's widths a token, without weights.
    assert whole["denoise"].work == pytest.approx(75_600 * 5120 * 22.1, rel=0.2)
    assert {one["denoise"].work for one in found.values()} == {whole["denoise"].work}
    assert max(whole.values(), key=lambda need: need.total) is whole["denoise"]
    eight = needs_of(one, PAIR, _run(replace(GPU, quantization="fp8")))
    assert eight["denoise"].weights == 2 * 14_300_000_000 + 2 * 127_000_000


@pytest.mark.parametrize(
    ("card", "size", "frames", "fits"),
    [
        (WAN, SMALL, 81, ("--cpu-offload group", "")),
        (PAIR, LARGE, 81, ("--cpu-offload group", "--cpu-offload model")),
        (HUNYUAN, SMALL, 81, ("--cpu-offload model", "")),
        (HUNYUAN, LARGE, 241, (None, "--cpu-offload model")),
    ],
)
def test_the_flags_that_change_least_are_named(
    card: VideoCard, size: Size, frames: int, fits: tuple[str | None, str | None]
) -> None:
    config = _run(ModelChoice(device="cpu"))
    one = job(size, frames)
    found = cards_for(one, card, config)
    assert (found["24 GB"], found["48 GB"]) == fits
