"""A video with more rows, columns or frames than Wan has positions for is refused before a run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed
from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import extract_glyph_texts
from tiny_checkpoints import lingbot_world
from tiny_video import TINY_VIDEO, write_wan

from hyimg_cli.models.diffusers_video.layout import read_layout
from hyimg_cli.models.diffusers_video.record import HUNYUAN_GLYPH_TOKENS, quoted_notes
from hyimg_cli.models.diffusers_video.weights import load_tokenizer

LINE = {"task": "t2v", "prompt": "a dog", "num_inference_steps": 1}


@pytest.mark.parametrize("parts", [("transformer",), ("transformer_2",)])
def test_a_video_beyond_the_positions_is_refused(
    run_cli: Any, write_manifest: Any, tmp_path: Path, parts: tuple[str, ...]
) -> None:
    """Six positions: of 16 pixels, or of four frames."""
    folder = tmp_path / "wan"
    write_wan(folder, boundary_ratio=0.9)
    for part in parts:
        path = folder / part / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_max_seq_len": 6}))
    for size, frames, said in (
        ("96x80", 21, ""),
        ("112x80", 21, "112x80 has more than the 6 rows and columns"),
        ("80x112", 21, "80x112 has more than the 6 rows and columns"),
        ("96x80", 25, "25 frames are more than the 6 latent frames"),
    ):
        manifest = write_manifest(LINE | {"size": size, "num_frames": frames})
        for command in ("check", "plan"):
            ran = run_cli(command, manifest, "--video-model", folder)
            assert (ran.code, said in ran.err) == (2 if said else 0, True), ran.err
    own = WanRotaryPosEmbed(24, (1, 2, 2), 6)
    own(torch.zeros(1, 4, 6, 12, 12))
    for grid in ((7, 12, 12), (6, 14, 12), (6, 12, 14)):
        with pytest.raises(RuntimeError):
            own(torch.zeros(1, 4, *grid))


def test_lingbot_has_the_same_limit(run_cli: Any, write_manifest: Any, tmp_path: Path) -> None:
    folder = tmp_path / "world"
    lingbot_world.write(folder, converted=True)
    path = folder / "transformer" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_max_seq_len": 6}))
    line = {"task": "i2v", "prompt": "a walk", "images": ["in.png"], "num_frames": 9}
    line |= {"camera": "none-1"}
    for size, code in (("96x80", 0), ("112x80", 2)):
        manifest = write_manifest(line | {"size": size})
        ran = run_cli("check", manifest, "--video-model", folder)
        assert ("has more than the 6 rows" in ran.err) == (code == 2), ran.err


@pytest.mark.parametrize(
    "text",
    [
        "no quotes", "a sign “OPEN”", '"a" and “b” and "a"', '"" empty', '"a”b"', 'one" mark',
        f'"{"x" * 247}"', f'"{"x" * 248}"', f"“{'é' * 123}”", f"“{'é' * 124}”",
        f'"{"x" * 120}" "{"y" * 119}"', f'"{"x" * 118}" "{"y" * 119}"', f'"a\n{"x" * 300}"',
    ],
)  # fmt: skip
def test_a_note_where_the_library_would_cut_quoted_text(text: str) -> None:
    tokenizer = load_tokenizer(read_layout(TINY_VIDEO).components["tokenizer_2"], None)
    count = len(tokenizer(extract_glyph_texts(text) or "").input_ids)
    assert len(quoted_notes((text,))) == (count > HUNYUAN_GLYPH_TOKENS)


def test_quoted_text_that_is_too_long_is_noted_before_the_run(
    run_cli: Any, write_manifest: Any
) -> None:
    manifest = write_manifest(LINE | {"prompt": f'a sign "{"x" * 300}"'})
    for command in ("check", "plan"):
        ran = run_cli(command, manifest)
        assert (ran.code, "quoted text of a prompt is longer than the 256" in ran.err) == (0, True)
