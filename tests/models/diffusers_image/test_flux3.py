"""FLUX.3: a modular pipeline's index, and edits that have their source's own size."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diffusers.modular_pipelines.flux3.image_processor import Flux3ImageProcessor
from models.diffusers_image.classic import Checkpoint, line, pixels_of, results
from PIL import Image

from hyimg_cli.errors import CheckpointError
from hyimg_cli.models.diffusers_image.canvas import canvas_of
from hyimg_cli.models.diffusers_image.record import EditorFolder, read_layout
from hyimg_cli.spec.job import Size

INDEX = "modular_model_index.json"
PLACE = {"pretrained_model_name_or_path": "a/b", "revision": None, "variant": None}


@pytest.fixture
def changed(checkpoint: Checkpoint, tmp_path: Path) -> Callable[..., Path]:
    def change(kind: str = "flux3", **entries: Any) -> Path:
        folder = tmp_path / "changed"
        shutil.copytree(checkpoint(kind), folder)
        index = json.loads((folder / INDEX).read_text())
        (folder / INDEX).write_text(json.dumps(index | entries))
        return folder

    return change


def hinted(library: str, name: str, part: str) -> Any:
    """An entry of a part that was not loaded when the index was written."""
    return [None, None, {"type_hint": [library, name], "subfolder": part, **PLACE}]


def test_an_index_whose_parts_were_not_loaded_is_read(
    checkpoint: Checkpoint, changed: Callable[..., Path]
) -> None:
    """Its classes are hints, the tokenizer's an Auto class: then the files name it."""
    folder = changed(
        vae=hinted("diffusers", "AutoencoderKLFlux2", "vae"),
        tokenizer=hinted("transformers", "AutoProcessor", "tokenizer"),
    )
    found, plain = read_layout(folder), read_layout(checkpoint("flux3"))
    classes = {name: part.class_name for name, part in found.components.items()}
    assert classes == {name: part.class_name for name, part in plain.components.items()}
    assert classes["tokenizer"] == "Qwen3VLProcessor"
    assert found.components["scheduler"].config().values["shift"] == 6.93


@pytest.mark.parametrize(
    ("entries", "what"),
    [
        ({"vae": hinted("mine", "Vae", "vae")}, f"the vae in {INDEX} is ['mine', 'Vae']"),
        ({"_class_name": "Flux3ModularPipeline"}, "flow_map"),
        ({"_class_name": "Flux2KleinModularPipeline"}, f"{INDEX} names the pipeline 'Flux2Klein"),
    ],
)
def test_another_index_is_refused(
    changed: Callable[..., Path], entries: dict[str, Any], what: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        EditorFolder(changed(**entries), "x")
    assert what in str(caught.value)


def test_a_canvas_is_the_librarys() -> None:
    """Of sizes around every limit, and of random ones."""
    library, numbers = Flux3ImageProcessor(), random.Random(3)
    sides = [1, 15, 16, 17, 63, 64, 65, 107, 1024, 2047, 2048, 2049, 4096, 4097, 6000]
    sizes = [(numbers.choice(sides), numbers.choice(sides)) for _ in range(40)]
    sizes += [(numbers.randint(1, 5000), numbers.randint(1, 5000)) for _ in range(40)]
    for width, height in sizes:
        shown = library._resize_if_canvas_exceeds_area(Image.new("L", (width, height)))
        rows, columns = library._get_canvas_height_width(shown.height, shown.width)
        found = canvas_of(Size(height, width))
        assert found.size == Size(rows, columns), (width, height)
        assert found.box == library._get_fill_region(shown, rows, columns)


def test_an_edit_of_one_source_has_its_size_and_takes_its_memory(
    run_cli: Any, write_manifest: Any, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Up to four million pixels, whatever is the model's square."""
    sizes = {"odd": (61, 47), "small": (320, 200), "large": (3000, 1700)}
    for name, size in sizes.items():
        Image.fromarray(np.random.default_rng(2).integers(0, 256, (*size[::-1], 3), np.uint8)).save(
            tmp_path / f"{name}.png"
        )
    lines = [line(name, "red", f"{name}.png", num_inference_steps=1, size="auto") for name in sizes]
    model, taken = ("--model", checkpoint("flux3")), dict[str, int]()
    for one in lines:
        plan = run_cli("plan", write_manifest(one), *model, "--json").json_lines[0]
        taken[one["custom_id"]] = plan["groups"][0]["memory"]["denoise"]["work"]
    assert taken["odd"] < taken["small"] < taken["large"] / 20
    ran = run_cli("generate", write_manifest(*lines[:2]), *model, "-o", "out")
    assert ran.code == 0, ran.err
    shapes = {name: pixels.shape[1::-1] for name, pixels in pixels_of(Path("out")).items()}
    assert shapes == {name: sizes[name] for name in shapes}


def test_ten_references_are_read(
    run_cli: Any, write_manifest: Any, checkpoint: Checkpoint, sources: list[str]
) -> None:
    """Each has a place of its own: the order counts."""
    turned = [sources[1]] + [sources[0]] * 9
    lines = [
        line(name, "red", *images, num_inference_steps=1)
        for name, images in (("a", turned), ("b", turned[::-1]))
    ]
    ran = run_cli("generate", write_manifest(*lines), "--model", checkpoint("flux3"), "-o", "out")
    assert ran.code == 0, ran.err
    found = pixels_of(Path("out"))
    assert not np.array_equal(found["a"], found["b"])


def test_a_text_that_is_cut_is_told_once(
    run_cli: Any, write_manifest: Any, checkpoint: Checkpoint
) -> None:
    """Its length is asked first, so the library cuts it twice."""
    one = line("a", "red " * 2500, num_inference_steps=1)
    run_cli("generate", write_manifest(one), "--model", checkpoint("flux3"), "-o", "out")
    (said,) = [text for text in results(Path("out"))["a"]["warnings"] if "was cut" in text]
    assert said.startswith("the text for text_encoder is 10")
