"""FLUX.3's prompt rewriter: texts that `think` writes, and that people edit and draw."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import tiny_editors
import torch
from diffusers.modular_pipelines.flux3 import prompt_upsampler as library
from library_weights import copy_weights
from models.diffusers_image.classic import Checkpoint, Line, line, pixels_of, results
from PIL import Image
from transformers import Qwen3_5ForConditionalGeneration, Qwen3VLProcessor

from hyimg_cli.models.diffusers_image.rewriter.record import RELEASE

Draft = dict[str, Line]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rewriting") / "flux3"
    tiny_editors.write(folder, "flux3")
    tiny_editors.write_rewriter(folder / "prompt_upsampler")
    return folder


@pytest.fixture
def think(run_cli: Any, write_manifest: Any, model: Path) -> Callable[..., Any]:
    def write(*lines: Line, flags: tuple[str, ...] = (), code: int = 0) -> Any:
        command = ("think", write_manifest(*lines), "--model", model, "-o", "texts.jsonl")
        ran = run_cli(*command, *flags)
        assert ran.code == code, ran.err
        return ran

    return write


def written() -> Draft:
    lines = map(json.loads, Path("texts.jsonl").read_text().splitlines())
    return {one["custom_id"]: one for one in lines}


@cache
def whole_pipeline(model: Path) -> Any:
    """The library's pipeline with the block that rewrites prompts."""
    pipeline = diffusers.Flux3DistilledModularPipeline()
    index = json.loads((model / "modular_model_index.json").read_text())
    for name in ("text_encoder", "tokenizer", "vae", "transformer"):
        kind = getattr(diffusers, index[name][1], None) or getattr(
            __import__("transformers"), index[name][1]
        )
        pipeline.update_components(**{name: kind.from_pretrained(model / name)})
    place = model / "prompt_upsampler"
    pipeline.update_components(
        prompt_upsampler=Qwen3_5ForConditionalGeneration.from_pretrained(place),
        prompt_upsampler_processor=Qwen3VLProcessor.from_pretrained(place),
    )
    pipeline.set_progress_bar_config(disable=True)
    return copy_weights(pipeline)


def lines_of(sources: list[str]) -> list[Line]:
    sets: dict[str, tuple[str, ...]] = {
        "new": (), "other": (), "one": (sources[0],), "two": tuple(sources),
    }  # fmt: skip
    return [line(name, f"{name}: red", *images) for name, images in sets.items()]


def test_a_text_is_the_librarys_and_so_are_its_pixels(
    think: Callable[..., Any], run_cli: Any, model: Path, sources: list[str], tmp_path: Path
) -> None:
    """Of its whole pipeline, which rewrites and draws."""
    lines = lines_of(sources)
    think(*lines)
    found, pipeline = written(), whole_pipeline(model)
    ran = run_cli("generate", "texts.jsonl", "--model", model, "-o", "out")
    assert ran.code == 0, ran.err
    pixels = pixels_of(Path("out"))
    for one in lines:
        name, images = one["custom_id"], [Image.open(tmp_path / i) for i in one.get("images", ())]
        state = pipeline(
            prompt=one["prompt"],
            num_inference_steps=one["num_inference_steps"],
            generator=torch.Generator().manual_seed(one["seed"]),
            height=64,
            width=96,
            **({"image": images} if images else {}),
        )
        assert found[name]["prompt"] == state.get("prompt") != one["prompt"]
        assert np.array_equal(pixels[name], np.asarray(state.get("images")[0]))
    assert len({one["prompt"] for one in found.values()}) > 1
    assert results(Path("out"))["new"]["x_rewritten"]["prompt"] == "new: red"


def test_an_edited_text_is_drawn_as_it_is(
    think: Callable[..., Any], run_cli: Any, write_manifest: Any, model: Path
) -> None:
    """And is not written again, neither in the same file nor from it."""
    think(line("a", "red"), line("b", "blue"))
    lines = written()
    lines["a"]["prompt"] = "a person's own words"
    edited = "".join(json.dumps(one) + "\n" for one in lines.values())
    Path("texts.jsonl").write_text(edited)
    again = think(line("a", "red"), line("b", "blue"))
    assert "0 done, 0 failed, 2 skipped" in again.err
    assert Path("texts.jsonl").read_text() == edited
    ran = run_cli("think", "texts.jsonl", "--model", model, "-o", "copy.jsonl")
    assert ran.code == 0, ran.err
    assert json.loads(Path("copy.jsonl").read_text().splitlines()[0])["prompt"].startswith("a pers")
    run_cli("generate", "texts.jsonl", "--model", model, "-o", "edited")
    plain = write_manifest(line("a", "a person's own words"))
    run_cli("generate", plain, "--model", model, "-o", "plain")
    assert np.array_equal(pixels_of(Path("edited"))["a"], pixels_of(Path("plain"))["a"])


@pytest.mark.thorough
def test_a_text_of_another_line_is_not_overwritten(think: Callable[..., Any]) -> None:
    think(line("a", "red"))
    ran = think(line("a", "green"), code=2)
    assert "error[output.other-job]" in ran.err
    think(line("a", "green"), flags=("--force",))
    assert written()["a"]["x_rewritten"]["prompt"] == "green"


def test_one_texts_fault_never_ends_the_run(
    think: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = library.upsample_prompt

    def fail(network: Any, processor: Any, request: str, **options: Any) -> str:
        if request == "bad":
            raise RuntimeError("The prompt upsampler returned an empty caption.")
        return str(plain(network, processor, request, **options))

    with monkeypatch.context() as patch:
        patch.setattr(library, "upsample_prompt", fail)
        ran = think(line("a", "bad"), line("b", "blue"), code=1)
    assert "1 done, 1 failed" in ran.err
    assert "a: failed[job.not-rewritten]: prompt: the prompt rewriter wrote no text" in ran.err
    assert written().keys() == {"b"}
    think(line("a", "bad"), line("b", "blue"))
    assert written().keys() == {"a", "b"}


@pytest.mark.thorough
def test_a_text_that_ends_at_the_limit_is_told(
    think: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "MAX_NEW_TOKENS", 1)
    plain = library.upsample_prompt
    monkeypatch.setattr(
        library, "upsample_prompt", lambda *given, **named: plain(*given, max_new_tokens=1, **named)
    )
    assert "was cut at its rewriter's limit" in think(line("a", "red")).err


def test_without_its_files_the_command_that_gets_them_is_named(
    run_cli: Any, write_manifest: Any, checkpoint: Checkpoint
) -> None:
    manifest, folder = write_manifest(line("a", "red")), checkpoint("flux3")
    ran = run_cli("think", manifest, "--model", folder, "-o", "texts.jsonl")
    assert ran.code == 3
    assert "error[checkpoint.missing]: the prompt rewriter of flux3 is not here" in ran.err
    assert f"hyimg pull {RELEASE}" in ran.err


@pytest.mark.thorough
def test_damaged_files_are_refused_before_anything_is_read(
    run_cli: Any, write_manifest: Any, model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(model, folder)
    path = folder / "prompt_upsampler" / "config.json"
    own = json.loads(path.read_text())
    own["text_config"]["intermediate_size"] = 48
    path.write_text(json.dumps(own))
    manifest = write_manifest(line("a", "red"))
    ran = run_cli("think", manifest, "--model", folder, "-o", "texts.jsonl")
    assert ran.code == 3
    assert "error[checkpoint.mismatch]" in ran.err


@pytest.mark.thorough
def test_a_prompt_that_was_not_rewritten_is_noted(
    think: Callable[..., Any], run_cli: Any, write_manifest: Any, model: Path
) -> None:
    said = "authors advise against prompts as people write them: hyimg think"
    manifest = write_manifest(line("a", "red"), line("b", "blue"))
    assert run_cli("check", manifest, "--model", model).err.count(said) == 1
    think(line("a", "red"))
    assert said not in run_cli("check", "texts.jsonl", "--model", model).err
