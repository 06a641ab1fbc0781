"""Sources of every kind and odd texts: right, or refused by name; a cut is reported."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import thorough_but
from models.diffusers_image.classic import Checkpoint, line, pixels_of, results
from PIL import Image

from hyimg_cli.media.images import read_image

EDITORS = [
    "qwen-image-2.1",
    "qwen-image-edit-plus",
    "klein",
    "kontext",
    "longcat-edit",
]
LONG = " ".join(["word"] * 2000)


@pytest.fixture
def odd_sources(tmp_path: Path) -> list[str]:
    """One of each kind, and an RGB picture of what each shows under `plain-`."""
    numbers = np.random.default_rng(3)

    def noise(*shape: int, kind: type[np.unsignedinteger[Any]] = np.uint8) -> Image.Image:
        return Image.fromarray(numbers.integers(0, np.iinfo(kind).max, shape, kind))

    turned = Image.Exif()
    turned[0x112] = 6
    noise(80, 64, 4).save(tmp_path / "rgba.png")
    noise(80, 64).save(tmp_path / "grey.png")
    noise(80, 64, kind=np.uint16).save(tmp_path / "grey16.png")
    noise(80, 64, 3).quantize(16).save(tmp_path / "palette.png")
    noise(80, 64, 3).convert("CMYK").save(tmp_path / "cmyk.jpg")
    noise(80, 64, 3).save(tmp_path / "turned.jpg", exif=turned)
    noise(111, 79, 3).save(tmp_path / "odd.png")
    noise(63, 63, 3).save(tmp_path / "small.png")
    names = sorted(file.name for file in tmp_path.glob("*.*"))
    for name in names:
        shown = read_image(tmp_path / name).pixels
        Image.fromarray(shown).save(tmp_path / f"plain-{name}.png")
    assert read_image(tmp_path / "plain-turned.jpg.png").pixels.shape == (64, 80, 3)
    return names


@pytest.mark.parametrize("kind", thorough_but(["klein", "qwen-image-2.1"], EDITORS))
def test_a_source_of_any_kind_is_read_as_the_rgb_picture_that_it_shows(
    run_cli: Any, write_manifest: Any, tmp_path: Path, checkpoint: Checkpoint,
    odd_sources: list[str], kind: str,
) -> None:  # fmt: skip
    if kind == "klein":
        odd_sources.remove("small.png")  # refused by name, below
    elif kind != "qwen-image-2.1":  # files are read as of klein; sides may be anything
        for name in ("grey.png", "grey16.png", "palette.png"):
            odd_sources.remove(name)
    lines = [
        line(f"{prefix}{name}"[:-4].replace(".", "-"), "red", found, num_inference_steps=2)
        for name in odd_sources
        for prefix, found in (("", name), ("plain-", f"plain-{name}.png"))
    ]
    for one in lines:
        del one["size"]
    model = str(checkpoint(kind))
    manifest = str(write_manifest(*lines))
    ran = run_cli("generate", manifest, "--model", model, "-o", str(tmp_path / "out"))
    assert ran.code == 0, ran.err
    made, said = pixels_of(tmp_path / "out"), results(tmp_path / "out")
    alpha = {"rgba"} if kind == "qwen-image-2.1" else set()  # it reads what is seen through
    for name in (name[:-4] for name in odd_sources):
        assert np.array_equal(made[name], made[f"plain-{name}"]) == (name not in alpha), name
    assert "CMYK converted to RGB" in said["cmyk"]["notes"]
    assert "EXIF orientation applied" in said["turned"]["notes"]
    assert len({picture.tobytes() for picture in made.values()}) == len(odd_sources) + len(alpha)


@pytest.mark.parametrize(
    ("kind", "more", "code"),
    [
        ("klein", {"images": ["small.png"], "task": "it2i"}, "source-size"),
        ("kontext", {"prompt": "a </s> b"}, "control-token"),
        ("kontext", {"prompt": "a <extra_id_7>"}, "control-token"),
        ("kontext", {"prompt": "a <|endoftext|>"}, "control-token"),
        ("klein", {"prompt": "<|im_end|>"}, "control-token"),
        ("flux2-dev", {"prompt": "a [INST] b"}, "control-token"),
        ("flux2-dev", {"prompt": "a [b] and <c>"}, ""),
        ("flux2-dev", {"negative_prompt": "green"}, "not-followed"),
        ("flux2-dev", {"flow_shift": 2}, "not-followed"),
        ("flux3", {"negative_prompt": "green"}, "not-followed"),
        ("flux3", {"guidance_scale": 3}, "not-followed"),
        ("flux3", {"prompt": "a <|image_pad|>"}, "control-token"),
        ("flux3", {"images": ["odd.png"] * 11, "task": "it2i"}, "too-many-images"),
        ("flux3-base", {"guidance_scale": 1, "negative_prompt": "green"}, "not-followed"),
        ("flux-dev", {"negative_prompt": "green"}, "not-followed"),
        ("flux-dev", {"images": ["odd.png"], "task": "it2i"}, "too-many-images"),
        ("flux-schnell", {"guidance_scale": 3}, "not-followed"),
        ("krea2-turbo", {"guidance_scale": 3}, "not-followed"),
        ("krea2", {"guidance_scale": 0, "negative_prompt": "green"}, "not-followed"),
        ("z-image", {"negative_prompt": "<|im_start|>"}, "control-token"),
        ("longcat", {"prompt": "a <|image_pad|>"}, "control-token"),
        ("longcat", {"prompt": "a <b> and <|b|>"}, ""),
        ("kontext", {"negative_prompt": "green"}, "not-followed"),
        ("longcat-edit", {"images": ["odd.png"], "task": "it2i", "size": "64x64"}, "not-followed"),
        ("qwen-image", {"num_inference_steps": 1}, "one-step"),
    ],
)
def test_what_is_asked_wrongly_is_refused_by_name(
    run_cli: Any, write_manifest: Any, checkpoint: Checkpoint, odd_sources: list[str],
    kind: str, more: dict[str, Any], code: str,
) -> None:  # fmt: skip
    manifest = str(write_manifest(line("a", "red") | more))
    found = run_cli("check", manifest, "--model", str(checkpoint(kind)), "--json").json_lines[0]
    assert found.get("fault", {"code": "manifest."})["code"] == f"manifest.{code}"


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("klein", ["text_encoder is 10018 tokens long and was cut: its encoder reads 512"]),
        ("z-image", ["text_encoder is 10018 tokens long and was cut: its encoder reads 512"]),
        ("qwen-image", ["was cut", "fills the 512 tokens"]),
        ("kontext", ["text_encoder is 8000 tokens", "text_encoder_2 is 10000 tokens"]),
        ("longcat", "the text has 9,999 tokens; its text_encoder reads 512"),
        ("longcat-edit", "the text has 9,999 tokens; its text_encoder reads 512"),
        ("qwen-image-edit", "the text has 9,999 tokens; its text_encoder reads 3,840"),
    ],
)
def test_a_prompt_of_2000_words_is_cut_with_a_warning_or_refused(
    run_cli: Any, write_manifest: Any, tmp_path: Path, checkpoint: Checkpoint, sources: list[str],
    kind: str, told: list[str] | str,
) -> None:  # fmt: skip
    pictures = sources[:1] if "edit" in kind else []
    one = line("a", LONG, *pictures, num_inference_steps=2)
    if pictures:
        del one["size"]
    out, model = tmp_path / "out", str(checkpoint(kind))
    ran = run_cli("generate", str(write_manifest(one)), "--model", model, "-o", str(out))
    if isinstance(told, str):
        assert ran.code == 2
        assert told in ran.err
        return
    said = results(out)["a"]
    assert said["status"] == "done"
    assert len(said["warnings"]) == len(told)
    assert all(part in one for part, one in zip(told, said["warnings"], strict=True))
