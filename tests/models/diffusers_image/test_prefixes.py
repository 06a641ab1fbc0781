"""Qwen-Image-2.1 and klein KV: the classic pipeline's pixels, prefixes shared or not."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models.diffusers_image.classic import Checkpoint, Line, loaded_once, pixels_of
from models.diffusers_image.test_settings import LAYERS, draw, editor, lora
from PIL import Image

from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.kv.slices import Slice
from hyimg_cli.kv.tree import KVTree
from hyimg_cli.manifest.manifest import read_manifest
from hyimg_cli.measure.bench.budget import PIXEL_METRICS
from hyimg_cli.measure.bench.harness import Bench
from hyimg_cli.measure.bench.scenario import read_scenario
from hyimg_cli.models.diffusers_image import prefix
from hyimg_cli.spec.job import ImageJob, Task
from hyimg_cli.spec.options import Lora

SIDE, STEPS, SIZES = 96, 3, ((64, 96), (80, 70), (96, 64), (64, 64))


@pytest.fixture
def sources(tmp_path: Path) -> list[str]:
    numbers, names = np.random.default_rng(1), []
    for number, size in enumerate(SIZES):
        # One is clear in places.
        pixels = numbers.integers(0, 256, (*size, 4 if number == 2 else 3), np.uint8)
        names.append(f"s{number}.png")
        Image.fromarray(pixels).save(tmp_path / names[-1])
    return names


def line(custom_id: str, prompt: str, images: Sequence[str], **more: Any) -> Line:
    own = {"custom_id": custom_id, "task": "it2i" if images else "t2i", "prompt": prompt}
    own |= {"size": "96x64", "seed": 7} | ({"images": list(images)} if images else {})
    return own | more


def classic(folder: Path, lines: Sequence[Line], root: Path) -> dict[str, np.ndarray]:
    """The classic pipeline's pictures, line by line."""
    pipeline, made = loaded_once(folder), {}
    for one in lines:
        given: dict[str, Any] = {
            "image": [Image.open(root / path) for path in one.get("images", ())]
        }
        if "qwen" in folder.name:
            scale = one.get("guidance_scale", 1.0)
            negative = (one.get("negative_prompt") or " ") if scale > 1 else None
            given |= {"output_resolution": SIDE, "true_cfg_scale": scale}
            given["negative_prompt"] = negative
        drawn = pipeline(
            prompt=one["prompt"],
            width=96,
            height=64,
            num_inference_steps=one.get("num_inference_steps", 4),
            generator=torch.Generator().manual_seed(one["seed"]),
            **{key: value for key, value in given.items() if value != []},
        )
        made[one["custom_id"]] = np.asarray(drawn.images[0])
    return made


def lines_of(kind: str, sources: Sequence[str]) -> list[Line]:
    steps = {} if kind.endswith("turbo") else {"num_inference_steps": STEPS}
    alike = sources if "qwen" in kind else [*sources[:2], sources[3]]  # klein reads no alpha
    sets = [(), alike[:1], alike[1:3], (*alike, alike[0])[:4]]
    lines = [line(f"{number}", "red", images, **steps) for number, images in enumerate(sets)]
    lines.append(line("again", "a longer text", sets[1], **steps | {"seed": 8}))
    if kind == "qwen-image-2.1":
        guided = {"guidance_scale": 3.0, **steps}
        lines.append(line("none", "red", sets[1], **guided))
        lines.append(line("empty", "red", (), negative_prompt="", **guided))
        lines.append(line("given", "red", sets[2], negative_prompt="green", **guided))
    return lines


@pytest.mark.parametrize(
    "kind",
    [
        "klein-kv",
        "qwen-image-2.1",
        pytest.param("qwen-image-2.1-turbo", marks=pytest.mark.thorough),
    ],
)
def test_pixels_are_the_librarys_in_any_order_shared_or_not(
    run_cli: Any, write_manifest: Any, tmp_path: Path, checkpoint: Checkpoint,
    sources: list[str], kind: str,
) -> None:  # fmt: skip
    folder, lines = checkpoint(kind), lines_of(kind, sources)
    ways = {
        "as-the-library": (lines, ("--no-kv-reuse",)),
        "shared": (lines, ()),
        "turned": (lines[::-1], ()),
        "apart": (lines, ("--prefix-cache-mb", "0")),
    }
    found = {}
    for name, (ordered, flags) in ways.items():
        manifest, out = str(write_manifest(*ordered)), tmp_path / name
        made = run_cli("generate", manifest, "--model", str(folder), "-o", str(out), *flags)
        assert f"{len(lines)} done, 0 failed" in made.err, made.err
        found[name] = pixels_of(out)
    for custom_id, pixels in classic(folder, lines, tmp_path).items():
        assert np.array_equal(found["as-the-library"][custom_id], pixels), custom_id
        for name in ("shared", "turned", "apart"):
            assert np.array_equal(found[name][custom_id], pixels), (name, custom_id)


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        ("qwen-image-2.1", ("a", "ab", "abcd", "a longer text")),
        ("klein-kv", ("a",)),
    ],
)
def test_latents_are_the_librarys_to_the_bit_with_shared_prefixes(
    checkpoint: Checkpoint, job: ImageJob, sources: list[str], tmp_path: Path, kind: str,
    texts: Sequence[str],
) -> None:  # fmt: skip
    """Whatever is left over of its products' rows; pixels would hide a difference."""
    alone, shared = editor(checkpoint(kind)), editor(checkpoint(kind))
    shared.tree = KVTree[Slice](10**8)
    for number, images in enumerate(((), sources[1:2], sources[2:])):
        paths = tuple(str(tmp_path / name) for name in images)
        task: Task = "it2i" if paths else "t2i"
        for text in texts[number % 2 :]:
            scale = 3.0 if "qwen" in kind and number else 1.0
            one = replace(job, task=task, images=paths, prompt=text, guidance_scale=scale)
            assert torch.equal(draw(shared, one), draw(alone, one)), (images, text)


def test_a_prefix_of_one_lora_is_not_used_with_another(
    checkpoint: Checkpoint, job: ImageJob, sources: list[str], tmp_path: Path
) -> None:
    """Equal text and pictures: with none, one, two strengths of it, and with none again."""
    kind = "qwen-image-2.1"
    alone, shared = editor(checkpoint(kind)), editor(checkpoint(kind))
    shared.tree = KVTree[Slice](10**8)
    file = tmp_path / "a.safetensors"
    lora(file, alone.have("transformer"), LAYERS[kind], published=False, seed=1)
    found = []
    for strength in (0.0, 1.0, 0.5, 0.0):
        named = (Lora(str(file), weight=strength),) if strength else ()
        one = replace(job, images=(str(tmp_path / sources[1]),), lora=named)
        found.append(draw(shared, one))
        assert torch.equal(found[-1], draw(alone, one)), strength
    assert not any(torch.equal(found[0], one) for one in found[1:3])
    assert not torch.equal(*found[1:3])


def counted(out: Path) -> tuple[int, int]:
    """Rows that a run's transformer computed of prefixes, and of canvases."""
    prefix, canvas = 0, 0
    for one in RunFolder(out).results().values():
        for branch in one["kv_reuse"]["branches"]:
            prefix += branch["computed"]
            canvas += branch["per_step"] * one["denoise_steps"]
    return prefix, canvas


def rows_of(kind: str, sizes: Sequence[tuple[int, int]], texts: Sequence[str]) -> int:
    """Of a set of sources once, and of each text behind it."""
    if kind == "klein-kv":
        return sum((height // 16) * (width // 16) for height, width in sizes)
    # Sources are brought to 96 x 96 pixels, sides in multiples of 32; a byte is a token.
    shapes = [(96 * (h / w) ** 0.5 / 32, 96 * (w / h) ** 0.5 / 32) for h, w in sizes]
    head, shown = 1 + len("user\n"), len("<image1>") + 1
    pictures = head + sum(round(h) * round(w) * 4 + shown for h, w in shapes)
    between = (len(sizes) - 1) * 2
    tail = 1 + 1 + 1 + 1 + len("assistant\n")
    return pictures + between + sum(len(text) + tail for text in texts)


@pytest.mark.parametrize(
    ("kind", "references", "guided"),
    [("qwen-image-2.1", 1, False), ("qwen-image-2.1", 4, True), ("klein-kv", 2, False)],
)
def test_a_run_computes_each_set_of_sources_and_each_text_once(
    run_cli: Any, write_manifest: Any, tmp_path: Path, checkpoint: Checkpoint,
    sources: list[str], kind: str, references: int, guided: bool,
) -> None:  # fmt: skip
    """Four sets of sources, four texts, two seeds: each set once, and behind it each text."""
    steps, texts = 2, ["red", "a blue sky", "snow", "night, with stars"]
    sets = [(sources * 2)[first : first + references] for first in range(4)]
    more = {"guidance_scale": 2.0, "negative_prompt": "dull"} if guided else {}
    lines = [
        line(f"{a}{b}{seed}", texts[b], sets[a], seed=seed, num_inference_steps=steps, **more)
        for a, b, seed in itertools.product(range(4), range(4), (1, 2))
    ]
    lines = [lines[at] for at in np.random.default_rng(0).permutation(len(lines))]
    manifest, model = str(write_manifest(*lines)), str(checkpoint(kind))
    sizes = dict(zip(sources, SIZES, strict=True))
    read = [*texts, *(["dull"] if guided else ())]
    prefix = sum(rows_of(kind, [sizes[name] for name in images], read) for images in sets)
    per_step = (512 if kind == "klein-kv" else 0) + 4 * 6
    canvas = per_step * steps * len(lines) * (2 if guided else 1)
    ran = run_cli("generate", manifest, "--model", model, "-o", str(tmp_path / "out"), "--json")
    assert counted(tmp_path / "out") == (prefix, canvas)
    summary = ran.json_lines[-1]["summary"]
    each = sum(
        rows_of(kind, [sizes[name] for name in one["images"]], [one["prompt"]]) for one in lines
    )
    assert summary["prompt_tokens_computed"] == prefix
    assert summary["prompt_tokens_computed"] + summary["prompt_tokens_reused"] >= each


def test_an_empty_negative_prompt_and_none_are_one_prefix(
    run_cli: Any, write_manifest: Any, tmp_path: Path, checkpoint: Checkpoint, sources: list[str]
) -> None:
    more = {"num_inference_steps": 2, "guidance_scale": 3.0}
    lines = [line("none", "red", sources[:1], **more)]
    lines.append(line("empty", "red", sources[:1], negative_prompt="", **more))
    given = (str(write_manifest(*lines)), "--model", str(checkpoint("qwen-image-2.1")))
    run_cli("generate", *given, "-o", str(tmp_path / "out"))
    assert counted(tmp_path / "out")[0] == rows_of("qwen-image-2.1", SIZES[:1], ["red", " "])


def test_a_picture_with_alpha_is_kept_replayed_and_put_back(
    run_cli: Any, write_manifest: Any, tmp_path: Path, checkpoint: Checkpoint,
    sources: list[str],
) -> None:  # fmt: skip
    """A PNG has the alpha that was drawn, a JPEG none; an edit in a box leaves its source's."""
    box = {"keep_outside": True, "region": "10,10,40,40", "region_mode": "instead"}
    steps = {"num_inference_steps": 2}
    kept = line("kept", "red", sources[2:3], **steps, **box)
    del kept["size"]
    lines = [
        line("png", "red", (), **steps),
        line("jpeg", "red", (), output_format="jpeg", **steps),
    ]
    manifest, model = str(write_manifest(*lines, kept)), str(checkpoint("qwen-image-2.1"))
    made = run_cli("generate", manifest, "--model", model, "-o", str(tmp_path / "out"))
    assert "3 done, 0 failed" in made.err, made.err
    found = pixels_of(tmp_path / "out")
    assert found["png"].shape[2] == found["kept"].shape[2] == 4
    with Image.open(tmp_path / "out" / "outputs" / "jpeg.jpg") as drawn:
        assert drawn.mode == "RGB"
    with Image.open(tmp_path / sources[2]) as given:
        source = np.asarray(given)
    outside = np.ones(source.shape[:2], bool)
    outside[10:40, 10:40] = False
    assert np.array_equal(found["kept"][outside], source[outside])
    assert not np.array_equal(found["kept"], source)
    picture = str(tmp_path / "out" / "outputs" / "png.png")
    again = run_cli("replay", picture, "--model", model, "--expect-equal")
    assert again.code == 0, again.err


@torch.no_grad()
def test_an_edit_is_compared_with_its_source_as_an_opaque_picture(checkpoint: Checkpoint) -> None:
    """The VAE reads alpha: 1 where a picture has none."""
    model = editor(checkpoint("qwen-image-2.1"))
    vae, pixels = (
        model.have("vae"),
        np.random.default_rng(1).integers(0, 256, (64, 96, 3), np.uint8),
    )
    opaque = np.dstack((pixels, np.full(pixels.shape[:2], 255, np.uint8)))
    shown = torch.from_numpy(opaque).permute(2, 0, 1)[None, :, None] / 255 * 2 - 1
    made = vae.decode(vae.encode(shown).latent_dist.mode()).sample[0, :3, 0] / 2 + 0.5
    expected = (made.clamp(0, 1).permute(1, 2, 0) * 255).round().byte().numpy()
    assert np.array_equal(model.round_trip(pixels, ""), expected)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["qwen-image-2.1", "klein-kv"])
def test_a_bench_finds_a_key_that_forgets_its_picture(
    write_manifest: Any, tmp_path: Path, checkpoint: Checkpoint, kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Its runs begin with nothing kept; variants that share alike compare nothing."""
    paths = [str(tmp_path / f"{colour}.png") for colour in ("red", "blue")]
    for path, colour in zip(paths, ("red", "blue"), strict=True):
        Image.new("RGB", (64, 64), colour).save(path)
    given = [line(path[-7:-4], "red", [path], num_inference_steps=1) for path in paths]
    given += [line("again", "blue", paths[:1], num_inference_steps=1)]
    manifest = read_manifest(write_manifest(*given))

    def verdict_of(name: str) -> str:
        scenario = replace(read_scenario(name), steps=(1,), main_steps=1, repeats=1)
        found = Bench(
            scenario,
            manifest,
            {"model": str(checkpoint(kind)), "device": "cpu"},
            folder=tmp_path / "bench",
            metrics=tuple(PIXEL_METRICS.values()),
            tell=lambda _: None,
        ).run()
        first, *_ = found.comparisons[0].timed[0].a[0].outcomes
        assert first.kv_reuse
        assert [one.shared for one in first.kv_reuse.branches] == [0]
        return found.verdict.name

    assert verdict_of("prefix-sharing") == "identical"
    assert verdict_of("batching") == "not explained"
    monkeypatch.setattr(prefix, "_digest", lambda *_: "of any picture")
    assert verdict_of("prefix-sharing") == "differs"
