"""Qwen-Image-Layered: the library's layers, as files of their own and as one picture."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models.diffusers_image.classic import (
    STEPS,
    Checkpoint,
    Line,
    line,
    loaded_once,
    pixels_of,
    results,
)
from PIL import Image

from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.models.diffusers_image.record import EditorFolder
from hyimg_cli.pipelines.latents_checkpoint import LatentsCheckpoint
from hyimg_cli.serve.results import respond
from hyimg_cli.spec.job import ImageJob, Size, SizeRequest
from hyimg_cli.spec.work import picture_work

KIND = "qwen-image-layered"


@pytest.fixture
def clear(tmp_path: Path) -> str:
    """A source with every transparency."""
    pixels = np.random.default_rng(2).integers(0, 256, (64, 96, 4), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "clear.png")
    return "clear.png"


def layered(custom_id: str, *images: str, **more: Any) -> Line:
    one = line(custom_id, "red", *images) | more
    return one if "size" in more else {n: v for n, v in one.items() if n != "size"}


def layers_of_library(folder: Path, one: Line, root: Path) -> list[np.ndarray]:
    scale = one.get("guidance_scale", 4.0)
    made = loaded_once(folder)(
        image=Image.open(root / one["images"][0]).convert("RGBA"),
        prompt=one["prompt"],
        true_cfg_scale=scale,
        negative_prompt=one.get("negative_prompt", " ") if scale > 1 else None,
        cfg_normalize=True,  # as on the page of its release
        layers=one.get("layers", 4),
        num_inference_steps=one["num_inference_steps"],
        resolution=1024 if "1024" in one.get("size", "") else 640,
        generator=torch.Generator().manual_seed(one["seed"]),
    )
    return [np.asarray(layer) for layer in made.images[0]]


def test_layers_are_the_librarys(
    run_cli: Any, write_manifest: Any, tmp_path: Path, checkpoint: Checkpoint, sources: list[str],
    clear: str,
) -> None:  # fmt: skip
    lines = [
        layered("a", clear, layers=2),
        layered("b", *sources[1:], layers=2),
        layered("c", *sources[:1], layers=1, guidance_scale=1.0, size="1024x1024"),
        layered("d", clear, negative_prompt="green"),
    ]
    folder, out = checkpoint(KIND), tmp_path / "out"
    done = run_cli("generate", str(write_manifest(*lines)), "--model", str(folder), "-o", str(out))
    assert "4 done, 0 failed" in done.err
    found, told = pixels_of(out), results(out)
    for one in lines:
        name = one["custom_id"]
        expected = layers_of_library(folder, one, tmp_path)
        files = told[name]["outputs"]
        assert [file["path"] for file in files] == [
            f"outputs/{name}.png",
            *(f"outputs/{name}.layer-{n}.png" for n in range(1, len(expected) + 1)),
        ]
        assert [file.get("layer") for file in files] == [None, *range(1, len(expected) + 1)]
        stack = Image.fromarray(expected[0])
        for number, layer in enumerate(expected, 1):
            assert np.array_equal(found[f"{name}.layer-{number}"], layer), (name, number)
            if number > 1:
                stack = Image.alpha_composite(stack, Image.fromarray(layer))
        assert np.array_equal(found[name], np.asarray(stack)), name


@pytest.mark.parametrize("stop", [pytest.param(1, marks=pytest.mark.thorough), STEPS])
def test_a_killed_job_has_no_line_and_then_the_same_layers(
    run_cli: Any, write_manifest: Any, tmp_path: Path, checkpoint: Checkpoint, clear: str,
    monkeypatch: pytest.MonkeyPatch, stop: int,
) -> None:  # fmt: skip
    """Killed behind a step, then between the files of two layers."""
    manifest = str(write_manifest(layered("a", clear, layers=3)))
    run = (manifest, "--model", str(checkpoint(KIND)), "--checkpoint-every", "1", "-o")
    whole, out = tmp_path / "whole", tmp_path / "out"
    run_cli("generate", *run, str(whole))
    keep, save = LatentsCheckpoint.keep, RunFolder.save

    def keep_and_end(self: LatentsCheckpoint, kept: Any) -> None:
        keep(self, kept)
        if kept.step == stop:
            raise KeyboardInterrupt

    def save_and_end(self: RunFolder, job: Any, suffix: str, data: bytes) -> Any:
        saved = save(self, job, suffix, data)
        if suffix == ".layer-2.png":
            raise KeyboardInterrupt
        return saved

    for owner, name, instead in (
        (LatentsCheckpoint, "keep", keep_and_end),
        (RunFolder, "save", save_and_end),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, instead)
            run_cli("generate", *run, str(out))
        assert results(out) == {}
    assert sorted(pixels_of(out)) == ["a.layer-1", "a.layer-2"]
    run_cli("generate", *run, str(out))
    files, expected = (results(folder)["a"]["outputs"] for folder in (out, whole))
    assert [file["pixel_sha256"] for file in files] == [one["pixel_sha256"] for one in expected]
    assert results(out)["a"]["denoise_steps"] == 0 if stop == STEPS else STEPS - stop
    assert not list(out.glob("latents/*"))
    # A layer that is gone is drawn again; nothing else of the run is.
    (out / "outputs" / "a.layer-2.png").unlink()
    again = run_cli("generate", *run, str(out))
    assert "1 done" in again.err
    assert sorted(pixels_of(out)) == ["a", "a.layer-1", "a.layer-2", "a.layer-3"]
    assert "0 done, 0 failed, 1 skipped" in run_cli("generate", *run, str(out)).err


def test_every_layer_is_replayed_described_shown_and_exported(
    run_cli: Any, write_manifest: Any, tmp_path: Path, checkpoint: Checkpoint, clear: str
) -> None:
    model, out = str(checkpoint(KIND)), tmp_path / "out"
    manifest = str(write_manifest(layered("a", clear, layers=2)))
    run_cli("generate", manifest, "--model", model, "-o", str(out))
    page = (out / "report.html").read_text() + "".join(
        file.read_text() for file in out.glob("report/*.js*")
    )
    assert page.count("a.layer-2.png") >= 1
    layer = str(out / "outputs" / "a.layer-2.png")
    again = ("replay", layer, "--model", model, "--images-from", str(tmp_path), "-o")
    found = run_cli(*again, str(tmp_path / "again"), "--expect-equal")
    assert found.code == 0, found.err
    assert "a.layer-2.png" in found.err
    assert run_cli("info", layer, "--json").json_lines[0]["record"]["layer"] == 2
    body = respond({"x_response_format": "url"}, [results(out)["a"]], out, "http://host", 0)
    names = [one["url"].rpartition("/")[2] for one in body["data"]]
    assert names == ["a.png", "a.layer-1.png", "a.layer-2.png"]
    assert [one.get("layer") for one in body["hyimg"]] == [None, 1, 2]
    assert body["background"] == "transparent"
    data = tmp_path / "data"
    allowed = ("--allow-licence", "unknown", "--source-licence", "CC0-1.0")
    done = run_cli("export", str(out), "-o", str(data), "--format", "folder", *allowed)
    assert done.code == 0, done.err
    pictures = sorted(path.name.partition(".")[2] for path in data.rglob("0*.png"))
    assert pictures == ["layers0.png", "layers1.png", "result.png", "source0.png"]
    for number in (0, 1):
        (copy,) = data.rglob(f"0*.layers{number}.png")
        own = out / "outputs" / f"a.layer-{number + 1}.png"
        assert copy.read_bytes() == own.read_bytes()
    assert run_cli("export", "--verify", str(data)).code == 0


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"layers": 0}, "layers"),
        ({"layers": 21}, "layers"),
        ({"layers": 2.5}, "layers"),
        ({"size": "512x512"}, "640x640 or 1024x1024"),
        ({"size": "3:2"}, "640x640 or 1024x1024"),
        ({"format": "jpeg"}, "JPEG cannot hold"),
        ({"keep_outside": True}, "put back"),
        ({"images": None, "task": "t2i"}, "only edits pictures"),
        ({"prompt": " "}, "prompt is empty"),
    ],
)
def test_what_layers_cannot_have_is_refused(
    run_cli: Any, write_manifest: Any, checkpoint: Checkpoint, clear: str, more: Line, said: str
) -> None:
    one = {name: value for name, value in (layered("a", clear) | more).items() if value is not None}
    manifest = str(write_manifest(one))
    found = run_cli("check", manifest, "--model", str(checkpoint(KIND)))
    assert found.code == 2
    assert said in found.err


def test_other_models_refuse_layers_and_keep_their_keys(
    run_cli: Any, write_manifest: Any, checkpoint: Checkpoint, sources: list[str]
) -> None:
    manifest = str(write_manifest(line("a", "red", sources[0], layers=4)))
    found = run_cli("check", manifest, "--model", str(checkpoint("klein")))
    assert "tiny-klein does not follow layers" in found.err


def test_a_job_cannot_have_the_name_of_a_layer(
    run_cli: Any, write_manifest: Any, checkpoint: Checkpoint, clear: str
) -> None:
    manifest = str(write_manifest(layered("a", clear), layered("a.layer-4", clear)))
    found = run_cli("check", manifest, "--model", str(checkpoint(KIND)))
    assert '"a.layer-4.png" is reserved for files of "a"' in found.err
    others = str(write_manifest(layered("a", clear), layered("a.layer-5", clear)))
    assert run_cli("check", others, "--model", str(checkpoint(KIND))).code == 0


def test_the_area_alone_is_asked_for(job: ImageJob, checkpoint: Checkpoint) -> None:
    """An edit has its source's shape; the plan counts every layer."""
    card = EditorFolder(checkpoint(KIND), "x").card
    assert card.size_by_source is not None
    assert card.size_by_source(640, Size(2000, 3000)) == Size(512, 768)
    one, four = (replace(job, layers=layers, size=SizeRequest()) for layers in (1, 4))
    assert picture_work(four, card).pixels == 4 * picture_work(one, card).pixels
    assert picture_work(four, card).denoise == 2 * picture_work(one, card).denoise
