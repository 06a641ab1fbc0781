"""A night in small: 200 edits by a GGUF file with two LoRAs, killed 20 times, lose nothing."""

import random
from pathlib import Path
from typing import Any

import pytest
import single_files
import tiny_editors
import torch
from models.diffusers_image.classic import line
from models.diffusers_image.test_kills import MOMENTS, Entry, driven, files_of
from safetensors.torch import save_file
from single_files import weights_of

EDITS, KILLS, STEPS = 200, 20, 2


def write_lora(path: Path, layer: str, seed: int) -> str:
    numbers = torch.Generator().manual_seed(seed)
    pairs = {
        f"transformer.{layer}.lora_{side}.weight": torch.randn(*shape, generator=numbers)
        for side, shape in (("A", (4, 256)), ("B", (256, 4)))
    }
    save_file(pairs, path)
    return path.name


@pytest.mark.thorough
def test_a_night_of_edits_with_gguf_and_loras(
    write_manifest: Any, tmp_path: Path, sources: list[str]
) -> None:
    parts = tiny_editors.wide_parts("klein", with_encoder=False)
    folder = tiny_editors.write(tmp_path / "klein", "klein", **parts)
    packed, _ = single_files.pack(weights_of(folder), "Q4_K")
    model = single_files.write_gguf(tmp_path / "night.gguf", packed)
    ink, oil = [
        write_lora(tmp_path / f"{name}.safetensors", f"transformer_blocks.0.attn.{layer}", seed)
        for seed, (name, layer) in enumerate((("ink", "to_q"), ("oil", "to_out.0")))
    ]
    lines = [
        line(
            f"{number:03d}", ("red", "blue")[number % 2], sources[number % 2], seed=number,
            num_inference_steps=STEPS, **[{}, {"lora": ink}, {"lora": f"{ink};{oil}"}][number % 3],
        )
        for number in range(EDITS)
    ]  # fmt: skip
    manifest, chance = write_manifest(*lines), random.Random(1)
    plan: list[Entry] = [("whole", None, 0, 0, ["--no-disk-cache"])]
    plan += [
        ("killed", chance.choice(MOMENTS[1:]), chance.randrange(1, EDITS // KILLS), 9,
         ["--checkpoint-every", chance.choice("01")])
        for _ in range(KILLS)
    ]  # fmt: skip
    plan += [("killed", "", 0, 0, [])]
    codes = [code for _, code, _ in driven(manifest, model, plan, "--components", str(folder))]
    assert (codes[0], codes[-1], codes.count(-9)) == (0, 0, KILLS)
    found = files_of(tmp_path / "killed")
    assert len(found) == EDITS
    assert found == files_of(tmp_path / "whole")
    assert not list((tmp_path / "killed").rglob("*.tmp"))
