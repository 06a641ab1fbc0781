"""What released editors take, by their public configurations: header files without weights."""

import json
import math
import re
import shutil
import weakref
from functools import cache
from pathlib import Path
from typing import Any

import model_files
import pytest
from conftest import thorough_but
from fake_gpu.released_editors import CHECKPOINTS, numbers, shapes, write_network
from PIL import Image
from tiny_editors import PIPELINES

from hyimg_cli.doctor.models import image_checkpoint
from hyimg_cli.errors import MachineError
from hyimg_cli.loading.checkpoint import PARTS_INDEXES
from hyimg_cli.models import registry
from hyimg_cli.models.diffusers_image import model as loaded
from hyimg_cli.models.diffusers_image.record import EditorFolder, read_layout
from hyimg_cli.models.diffusers_image.table import KINDS, licence_of
from hyimg_cli.settings.run import ModelChoice, OutputConfig, RunConfig

DOCS = Path(__file__).parents[3] / "docs"
PAGE, GGUF_PAGE = DOCS / "gpus.md", DOCS / "model-files.md"
WEIGHTS = shutil.ignore_patterns("*.safetensors")
# What of a VAE would be on disk is asked by its digest, that of a hole of half a GB.
GPU = ("--device", "cuda", "--dtype", "bfloat16", "--no-disk-cache")


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory, checkpoint: Any) -> Any:
    root = tmp_path_factory.mktemp("released")

    @cache
    def of(model: str) -> Path:
        pipeline, transformer, vae, *encoders = CHECKPOINTS[model]
        folder = root / model.split("/")[1]
        folder.mkdir()
        index: dict[str, Any] = {"_class_name": pipeline, "is_distilled": True}
        names = {"transformer": transformer, "vae": vae}
        names |= dict(zip(("text_encoder", "text_encoder_2"), encoders, strict=False))
        for part, classes in KINDS[pipeline].parts.items():
            if part in names:
                index[part] = write_network(folder / part, names[part])
            else:
                is_scheduler = part == "scheduler"
                index[part] = ["diffusers" if is_scheduler else "transformers", min(classes)]
                # Texts are read by tokenizers of any size.
                tiny = next(kind for kind, name in PIPELINES.items() if name == pipeline)
                shutil.copytree(checkpoint(tiny) / part, folder / part)
        scheduler = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0}
        if (folder / "scheduler").is_dir():
            (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler))
        name = PARTS_INDEXES["Modular" in pipeline]
        (folder / name).write_text(json.dumps(index))
        return folder

    return of


def plan_of(run_cli: Any, folder: Path, pipeline: str, *flags: str, code: int = 0) -> Any:
    edits = KINDS[pipeline].most > 0
    line = {"custom_id": "a", "task": "it2i" if edits else "t2i", "prompt": "red"}
    line |= {"images": ["s.png"]} if edits else {}
    Image.new("RGB", (1024, 1024), "red").save("s.png")
    Path("jobs.jsonl").write_text(json.dumps(line))
    given = ("jobs.jsonl", "--model", str(folder), "-o", "out", *flags)
    found = run_cli("plan", *given, "--json")
    assert found.code == code, found.err
    return found.json_lines[0]


def unread_numbers(folder: Path, text_layers: int) -> int:
    """The numbers of a text encoder's head, and of layers behind those that the pipeline reads."""
    tensors = EditorFolder(folder, "").layout.components["text_encoder"].known_tensors()
    layers = {
        name: re.match(r"(?:model\.|language_model\.)*layers\.(\d+)\.", name) for name in tensors
    }
    return sum(
        math.prod(tensors[name].shape)
        for name, layer in layers.items()
        if name == "lm_head.weight" or (layer is not None and 0 < text_layers <= int(layer[1]))
    )


@pytest.mark.parametrize("model", thorough_but([*CHECKPOINTS][4::4], CHECKPOINTS))
def test_weights_are_counted_by_dtype_and_the_page_says_so(
    run_cli: Any, released: Any, model: str
) -> None:
    """Parameters of the transformer, bytes of all weights, and flags by a GPU's size."""
    pipeline, *parts = CHECKPOINTS[model]
    forms = {("--dtype", "float32"): (4, 4), ("--quantization", "fp8"): (1, 2), (): (2, 2)}
    for flags, (of_transformer, of_others) in forms.items():
        plan = plan_of(run_cli, released(model), pipeline, *GPU, *flags)
        (found,) = plan["weight_bytes"].values()
        transformer, *others = (numbers(name) for name in parts)
        assert found["transformer"] == pytest.approx(of_transformer * transformer, rel=0.01)
        read = sum(others) - unread_numbers(released(model), KINDS[pipeline].text_layers)
        expected = of_transformer * transformer + of_others * read
        assert sum(found.values()) == pytest.approx(expected, rel=0.01)
    rows = {row[0]: row[1:] for row in map(_cells, PAGE.read_text().splitlines()) if row}
    cards = plan["groups"][0]["cards"]
    flags = [
        "too small" if one is None else f"`{one}`" if one else "as is" for one in cards.values()
    ]
    size, nbytes = f"{numbers(parts[0]) / 1e9:.1f}B", f"{sum(found.values()) / 1e9:.1f}"
    licence = registry.model_card(str(released(model))).licence
    assert rows[f"`{model}`"] == [f"`{pipeline}`", size, nbytes, licence, *flags]


@pytest.mark.parametrize("model", thorough_but(["Qwen/Qwen-Image-Edit-2511"], CHECKPOINTS))
def test_the_offload_that_a_model_takes_by_itself_is_the_fastest_that_fits(
    run_cli: Any, released: Any, tmp_path: Path, model: str
) -> None:
    """By the flags that the plan names for a GPU's size; no other setting is changed."""
    pipeline, folder = CHECKPOINTS[model][0], released(model)
    cards = plan_of(run_cli, folder, pipeline, *GPU)["groups"][0]["cards"]
    taken = dict[int, str]()
    for size in (12, 16, 24, 48, 80):
        recipe = tmp_path / f"{size}.toml"
        recipe.write_text(f"[batch]\nmemory_gb = {size}\n")
        found = plan_of(run_cli, folder, pipeline, *GPU, "--recipe", str(recipe))
        assert not found["too_large"]
        taken[size] = "".join(f"--cpu-offload {turn}" for turn in found["auto_fit"].values())
        assert found["groups"][0]["cards"] == cards
    named = {int(name.split()[0]): flags for name, flags in cards.items()}
    assert {size: taken[size] for size in named} == named
    speed = ["--cpu-offload group", "--cpu-offload model", ""]
    ranks = [speed.index(taken[size]) for size in sorted(taken)]
    assert ranks == sorted(ranks), "a larger GPU is never slower"
    # Without it, a model is refused if its weights do not fit; activations are only estimated.
    weights = plan_of(run_cli, folder, pipeline, *GPU)["groups"][0]["memory"]["decode"]["weights"]
    alone = ("--recipe", str(tmp_path / "12.toml"), "--no-auto-fit")
    code = MachineError.exit_code if weights > 12 * 10**9 else 0
    assert not plan_of(run_cli, folder, pipeline, *GPU, *alone, code=code)["auto_fit"]


def _write_gguf(path: Path, network: str, dtype: str) -> Path:
    """Write the header of a released transformer's GGUF file; its data are a hole."""
    stored = dict[str, tuple[str, tuple[int, ...]]]()
    for name, shape in shapes(network).items():
        is_packed = len(shape) == 2 and shape[1] % 256 == 0 and re.search("blocks|layers", name)
        plain = "F32" if len(shape) == 1 else "BF16"
        stored[name] = dtype if is_packed else plain, tuple(shape)
    return model_files.gguf(path, stored, is_hole=True)


_TYPES = ("Q8_0", "Q4_K")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "of",
    [
        (model, dtype)
        for model in CHECKPOINTS
        for dtype in _TYPES
        if f"| {model.split('/')[1]} | `{dtype}`" in GGUF_PAGE.read_text()
    ],
)
def test_a_gguf_is_counted_as_stored_and_the_page_says_so(
    run_cli: Any, released: Any, tmp_path: Path, of: tuple[str, str]
) -> None:
    model, dtype = of
    pipeline, network, *_ = CHECKPOINTS[model]
    file = _write_gguf(tmp_path / f"{dtype}.gguf", network, dtype)
    flags = ("--components", str(released(model)), *GPU)
    plan = plan_of(run_cli, file, pipeline, *flags)
    (found,) = plan["weight_bytes"].values()
    assert found["transformer"] == pytest.approx(file.stat().st_size, rel=0.02)
    cards = [*plan["groups"][0]["cards"].values()][:3]
    said = [f"`{one}`" if one else "as is" for one in cards]
    name, size = model.split("/")[1], f"{file.stat().st_size / 1e9:.1f}"
    assert [name, f"`{dtype}`", size, *said] in map(_cells, GGUF_PAGE.read_text().splitlines())


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        ("Qwen/Qwen-Image-Edit-2511", 16),
        pytest.param("black-forest-labs/FLUX.1-Kontext-dev", 1024, marks=pytest.mark.thorough),
    ],
)
def test_a_tiled_decode_takes_less(run_cli: Any, released: Any, model: str, parts: int) -> None:
    """Tiles have 256 pixels a side, or as many as the VAE says: here 32, its class's own."""
    given = (run_cli, released(model), CHECKPOINTS[model][0], *GPU)
    whole, tiled = (
        plan_of(*given, *flags)["groups"][0]["memory"]["decode"]["work"]
        for flags in ((), ("--vae-use-tiling",))
    )
    assert whole == parts * tiled > 0


@pytest.mark.parametrize(
    ("readme", "licence"),
    [
        ("---\nlicense: apache-2.0\n---\n", "Apache-2.0"),
        ("---\nlanguage: en\nlicense: cc-by-nc-4.0\n---\n", "non-commercial"),
        ("---\nlicense: other\nlicense_name: some-Non-Commercial-licence\n---\n", "non-commercial"),
        ("---\nlicense: other\nlicense_name: ours\n---\n", "Apache-2.0"),
        ("---\nlicense: mit\n---\nlicense: cc-by-nc-4.0\n", "mit"),
        ("license: mit\n", "Apache-2.0"),
    ],
)
def test_a_readme_is_asked_first(released: Any, tmp_path: Path, readme: str, licence: str) -> None:
    shutil.copytree(released("black-forest-labs/FLUX.2-klein-4B"), tmp_path / "a", ignore=WEIGHTS)
    (tmp_path / "a" / "README.md").write_text(readme)
    assert licence_of(read_layout(tmp_path / "a")) == licence


def test_a_licence_that_is_not_for_every_use_is_said_once(
    run_cli: Any, write_manifest: Any, tmp_path: Path, checkpoint: Any
) -> None:
    """Of a trained checkpoint, at the start; that nobody knows it in `doctor` alone."""
    one = {"task": "t2i", "prompt": "red", "size": "96x64", "num_inference_steps": 1}
    manifest = write_manifest(*({"custom_id": name} | one for name in "ab"))
    for kind, licence in (("kontext", "non-commercial"), ("klein", "unknown")):
        shutil.copytree(checkpoint(kind), tmp_path / kind)
        said = run_cli("generate", manifest, "--model", checkpoint(kind), "-o", f"{kind}-tiny").err
        assert "2 done" in said
        assert "licence" not in said
        (tmp_path / kind / "card.json").unlink()
        said = run_cli("generate", manifest, "--model", tmp_path / kind, "-o", f"{kind}-out").err
        assert "2 done" in said
        assert said.count(f"{licence} licence") == (licence == "non-commercial")
        config = RunConfig(OutputConfig(tmp_path), model=ModelChoice(model=str(tmp_path / kind)))
        assert f"licence: {licence}" in image_checkpoint(config).found


def test_a_model_that_does_not_fit_is_told_the_flag_that_helps(
    run_cli: Any, released: Any, tmp_path: Path
) -> None:
    """By a recipe's memory, before anything is loaded."""
    model, recipe = "Qwen/Qwen-Image-Edit-2511", tmp_path / "card.toml"
    for gb, helps in (
        (24, "--cpu-offload group"),
        (41, "--cpu-offload model"),
        (2, "use a machine"),
    ):
        recipe.write_text(f"[batch]\nmemory_gb = {gb}\n")
        code, flags = MachineError.exit_code, (*GPU, "--no-auto-fit", "--recipe", str(recipe))
        plan = plan_of(run_cli, released(model), CHECKPOINTS[model][0], *flags, code=code)
        (said,) = plan["too_large"].values()
        assert helps in said


def test_the_text_encoder_is_gone_before_the_transformer_is_read(
    run_cli: Any, write_manifest: Any, checkpoint: Any, sources: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Of two jobs: both are encoded first."""
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    found = list[tuple[str, list[str]]]()
    for origin in ("load_weights", "load_network"):
        load = getattr(loaded, origin)

        def watched(part: Any, *given: Any, load: Any = load, **named: Any) -> Any:
            found.append((part.name, sorted(one.part for one in alive)))
            module = load(part, *given, **named)
            module.part = part.name
            alive.add(module)
            return module

        monkeypatch.setattr(loaded, origin, watched)
    one = {"task": "it2i", "images": sources[:1], "size": "96x64", "num_inference_steps": 2}
    manifest = write_manifest(*(one | {"custom_id": text, "prompt": text} for text in ("a", "b")))
    said = run_cli("generate", manifest, "--model", checkpoint("klein"), "-o", "out").err
    assert "2 done" in said
    names = [name for name, _ in found]
    assert sorted(names) == ["text_encoder", "transformer", "vae"]
    assert "text_encoder" not in dict(found)["transformer"]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
