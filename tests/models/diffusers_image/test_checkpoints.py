"""Checkpoints that are not what their index says: exit 3, by name, before a weight is read."""

import json
import math
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import model_files
import pytest
import torch
from models.diffusers_image.classic import Checkpoint, line
from safetensors.torch import load_file, save_file

from hyimg_cli.cache.disk import CHECKED_CHECKPOINTS, DiskStore
from hyimg_cli.errors import CheckpointError
from hyimg_cli.kernels.offload import Offload
from hyimg_cli.models import registry
from hyimg_cli.models.diffusers_image.record import read_layout
from hyimg_cli.models.diffusers_video.weights import LoadTarget, empty_module, load_weights
from hyimg_cli.settings.run import ModelChoice

Change = Callable[[Path], object]
WEIGHTS = "diffusion_pytorch_model.safetensors"


def in_json(name: str, **changes: Any) -> Change:
    """Other values in a JSON file."""

    def change(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def in_weights(name: str, change: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    """Other tensors in a file of weights."""

    def rewrite(folder: Path) -> None:
        tensors = load_file(folder / name)
        change(tensors)
        save_file(tensors, folder / name, metadata={"format": "pt"})

    return rewrite


def as_pickle(folder: Path) -> None:
    path = folder / "transformer" / WEIGHTS
    path.with_suffix(".bin").write_bytes(pickle.dumps({"a": 1}))
    path.unlink()


def with_own_code(folder: Path) -> None:
    (folder / "transformer" / "mine.py").write_text("raise SystemExit('it ran')\n")
    in_json("transformer/config.json", auto_map={"AutoModel": "mine.Transformer"})(folder)


AT_CHECK: dict[str, tuple[Change, str]] = {
    "another pipeline": (in_json("model_index.json", _class_name="FluxFillPipeline"), "Fill"),
    "a pipeline of its own": (in_json("model_index.json", _class_name=["mine", "P"]), "_class"),
    "a part of its own": (in_json("model_index.json", vae=["mine", "Vae"]), "mine"),
    "code of its own": (with_own_code, "needs its own code"),
    "another text encoder": (
        in_json("model_index.json", text_encoder=["transformers", "LlamaModel"]), "LlamaModel",
    ),
    "another scheduler": (
        in_json("model_index.json", scheduler=["diffusers", "DDIMScheduler"]), "DDIMScheduler",
    ),
    "a folder missing": (lambda folder: shutil.rmtree(folder / "tokenizer"), "tokenizer/"),
    "a part missing": (in_json("model_index.json", tokenizer=None), "tokenizer"),
    "pickles": (as_pickle, "safetensors"),
    "stored quantized": (
        in_json("text_encoder/config.json", quantization_config={"quant_method": "awq"}), "awq",
    ),
    "positions of another width": (
        in_json("transformer/config.json", axes_dims_rope=[2, 2, 2]), "axes_dims_rope",
    ),
}  # fmt: skip
TEXT = "text_encoder/config.json"


def as_eights(name: str, dtype: torch.dtype) -> Change:
    """Weights cast to 8 bits, without scales."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({name: one.clamp(0, 1).to(dtype) for name, one in tensors.items()})

    return in_weights(name, change)


def as_pointer(name: str) -> Change:
    text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{0:064}\nsize 4978\n"
    return lambda folder: (folder / name).write_text(text)


def renamed(name: str, other: str) -> Change:
    return lambda folder: (folder / name).rename(folder / Path(name).parent / other)


def with_far_token(path: Path) -> None:
    values = json.loads(path.read_text())
    values["model"]["vocab"]["<far>"] = 1 << 20
    path.write_text(json.dumps(values))


# By kind: faults that `check` finds from JSON files and headers, without torch.
AT_HEADERS: dict[str, tuple[str, Change, str]] = {
    **{
        f"{part} as {dtype}": ("klein", as_eights(f"{part}/{stem}.safetensors", dtype), "stored as")
        for part, stem, dtype in (
            ("vae", "diffusion_pytorch_model", torch.int8),
            ("text_encoder", "model", torch.uint8),
            ("transformer", "diffusion_pytorch_model", torch.float8_e4m3fn),
            ("vae", "diffusion_pytorch_model", torch.bool),
        )
    },
    "no tokenizer.json": (
        "z-image", lambda folder: (folder / "tokenizer/tokenizer.json").unlink(), "every text",
    ),
    "an empty vocabulary": (
        "klein",
        lambda folder: (folder / "tokenizer/tokenizer.json").write_text(
            '{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}'
        ),
        "different texts as the same tokens",
    ),
    "a processor of a larger model": (
        "qwen-image-2.1", lambda folder: with_far_token(folder / "processor/tokenizer.json"),
        "the tokenizer has a token 1048576, and the text_encoder only 263 rows",
    ),
    "a pointer for a tokenizer": ("klein", as_pointer("tokenizer/tokenizer.json"), "Git LFS"),
    "a pointer for weights": ("klein", as_pointer(f"vae/{WEIGHTS}"), "git lfs pull"),
    "a pointer for a configuration": ("klein", as_pointer("vae/config.json"), "Git LFS"),
    "a variant": (
        "klein",
        renamed(f"transformer/{WEIGHTS}", "diffusion_pytorch_model.fp16.safetensors"),
        "diffusion_pytorch_model.fp16.safetensors",
    ),
    "no weights": ("klein", lambda folder: (folder / f"vae/{WEIGHTS}").unlink(), "neither"),
    "a processor without its configuration": (
        "longcat-edit",
        lambda folder: [one.unlink() for one in (folder / "text_processor").glob("*config.json")],
        "processor_config.json is missing",
    ),
    "a shallow text encoder": ("klein", in_json(TEXT, num_hidden_layers=4), "reads 28"),
    "a wide text encoder": ("z-image", in_json(TEXT, hidden_size=32), "cap_feat_dim"),
    "a VAE of other latents": (
        "z-image", in_json("vae/config.json", latent_channels=16), "latent_channels",
    ),
    "one mean for all channels": (
        "qwen-image", in_json("vae/config.json", latents_mean=[0.0]), "latents_mean",
    ),
    "few positions": (
        "z-image", in_json("transformer/config.json", axes_lens=[64, 8, 8]), "axes_lens",
    ),
    "two axes of positions": (
        "z-image", in_json("transformer/config.json", axes_lens=[1024, 512]), "axes_lens",
    ),
    "another projection": (
        "kontext", in_json("transformer/config.json", pooled_projection_dim=32), "hidden_size",
    ),
    "more blocks than weights": (
        "qwen-image", in_json("transformer/config.json", num_layers=3), "missing: transformer_bl",
    ),
    "a tensor missing in a block": (
        "z-image",
        in_weights("text_encoder/model.safetensors",
                   lambda t: t.pop(next(n for n in sorted(t) if "layers.1." in n))),
        "1 missing: ",
    ),
}  # fmt: skip
AT_LOAD: dict[str, tuple[Change, str]] = {
    "a tensor missing": (
        in_weights(f"transformer/{WEIGHTS}", lambda tensors: tensors.pop(min(tensors))), "missing",
    ),
    "a tensor more": (
        in_weights(f"vae/{WEIGHTS}", lambda tensors: tensors.update(a=torch.zeros(1))), "a",
    ),
    "a tensor of another shape": (
        in_weights(
            f"transformer/{WEIGHTS}",
            lambda tensors: tensors.update({min(tensors): torch.zeros(1, 2, 3)}),
        ),
        "1, 2, 3",
    ),
    "no weights": (
        lambda folder: (folder / "text_encoder" / "model.safetensors").unlink(), "text_encoder",
    ),
    "an encoder of pictures that has no name": (
        in_json("text_encoder/config.json", vision_config={"model_type": {}}), "model_type",
    ),
    "half a file": (
        lambda folder: (folder / "vae" / WEIGHTS).write_bytes(
            (folder / "vae" / WEIGHTS).read_bytes()[:1000]
        ),
        "vae",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["kontext", "longcat-edit"])
@pytest.mark.parametrize("wrong", [*AT_CHECK, *AT_LOAD])
def test_a_checkpoint_that_is_wrong_is_refused_by_name(
    run_cli: Any, write_manifest: Any, tmp_path: Path, checkpoint: Checkpoint, sources: list[str],
    kind: str, wrong: str,
) -> None:  # fmt: skip
    folder = tmp_path / "wrong"
    shutil.copytree(checkpoint(kind), folder)
    change, named = (AT_CHECK | AT_LOAD)[wrong]
    change(folder)
    manifest = str(write_manifest(line("a", "red", "s0.png", size="auto")))
    command = ("plan",) if wrong in AT_CHECK else ("generate", "-o", str(tmp_path / "out"))
    ran = run_cli(command[0], manifest, *command[1:], "--model", str(folder))
    assert ran.code == 3, ran.err
    assert "error[checkpoint." in ran.err, ran.err
    assert named in ran.err
    assert "\n  hint: " in ran.err


FEW_AT_HEADERS = (
    "a processor of a larger model",
    "vae as torch.int8",
    "an empty vocabulary",
    "a variant",
    "a shallow text encoder",
)


@pytest.mark.parametrize(
    "wrong",
    [pytest.param(one, marks=() if one in FEW_AT_HEADERS else pytest.mark.thorough)
     for one in AT_HEADERS],
)  # fmt: skip
def test_check_finds_wrong_files_from_their_headers(
    run_cli: Any, write_manifest: Any, tmp_path: Path, checkpoint: Checkpoint, sources: list[str],
    wrong: str,
) -> None:  # fmt: skip
    kind, change, named = AT_HEADERS[wrong]
    folder = tmp_path / "wrong"
    shutil.copytree(checkpoint(kind), folder)
    images = ["s0.png"] if kind == "longcat-edit" else []
    manifest = str(write_manifest(line("a", "red", *images, size="auto")))
    assert run_cli("check", manifest, "--model", str(checkpoint(kind))).code == 0
    change(folder)
    ran = run_cli("check", manifest, "--model", str(folder))
    assert ran.code == 3, ran.err
    assert "error[checkpoint." in ran.err, ran.err
    assert named in ran.err


OTHER_TENSORS: dict[str, Change] = {
    "one more beside the blocks": in_weights(
        f"transformer/{WEIGHTS}", lambda tensors: tensors.update({"extra.weight": torch.ones(2)})
    ),
    "one less beside the blocks": in_weights(
        f"transformer/{WEIGHTS}", lambda tensors: tensors.pop("proj_out.weight")
    ),
    "another name": in_weights(
        f"vae/{WEIGHTS}",
        lambda tensors: tensors.update({"decoder.in.bias": tensors.pop("decoder.conv_in.bias")}),
    ),
    "another shape": in_weights(
        "text_encoder/model.safetensors", lambda tensors: tensors.update({"norm.weight": ONE})
    ),
    "a word for a number": in_json("vae/config.json", norm_num_groups="two"),
    "a word for the scheduler's number": in_json("scheduler/scheduler_config.json", shift="two"),
}
ONE = torch.ones(1)


@pytest.mark.parametrize("wrong", OTHER_TENSORS)
def test_check_refuses_what_the_library_would_not_load(
    run_cli: Any, write_manifest: Any, tmp_path: Path, checkpoint: Checkpoint, wrong: str
) -> None:
    folder = tmp_path / "wrong"
    shutil.copytree(checkpoint("klein"), folder)
    OTHER_TENSORS[wrong](folder)
    manifest = str(write_manifest(line("a", "red")))
    ran = run_cli("check", manifest, "--model", str(folder))
    assert (ran.code, "error[checkpoint." in ran.err) == (3, True), ran.err


@pytest.mark.thorough  # starts a process that imports torch
def test_a_whole_checkpoint_is_compared_once_in_another_process(
    tmp_path: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process without torch asks another one, and keeps only that a checkpoint was whole."""
    folder, store = tmp_path / "own", DiskStore(tmp_path / "kept", 1 << 20)
    shutil.copytree(checkpoint("klein"), folder)
    monkeypatch.delitem(sys.modules, "torch")
    registry.check_headers([str(folder)], ModelChoice(), store)
    (kept,) = store.entries()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    registry.check_headers([str(folder)], ModelChoice(), store)
    assert kept.kind == CHECKED_CHECKPOINTS
    in_json("vae/config.json", norm_num_groups="two")(folder)
    with pytest.raises(FileNotFoundError):
        registry.check_headers([str(folder)], ModelChoice(), store)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="norm_num_groups"):
        registry.check_headers([str(folder)], ModelChoice(), store)


def test_heads_of_another_width_are_read(tmp_path: Path, checkpoint: Checkpoint) -> None:
    """As in Qwen3-VL-4B: 32 heads of 128, where the hidden width is 2560."""
    folder = tmp_path / "own"
    shutil.copytree(checkpoint("qwen-image-2.1"), folder)
    path = folder / TEXT
    values = json.loads(path.read_text())
    values["text_config"] |= {"head_dim": 16}
    values["text_config"]["rope_parameters"]["mrope_section"] = [4, 2, 2]
    path.write_text(json.dumps(values))
    part = read_layout(folder).components["text_encoder"]
    shapes = {name: one.shape for name, one in empty_module(part).state_dict().items()}
    assert any(name.endswith("q_proj.weight") and shape[0] == 32 for name, shape in shapes.items())
    values["text_config"]["rope_parameters"]["mrope_section"] = [2, 1, 1]
    path.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="add up to 8"):
        empty_module(part)


def test_a_vae_that_is_not_finite_is_refused(tmp_path: Path, checkpoint: Checkpoint) -> None:
    folder = tmp_path / "nan"
    shutil.copytree(checkpoint("klein"), folder)

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["decoder.conv_in.weight"].view(-1)[0] = float("nan")

    in_weights(f"vae/{WEIGHTS}", spoil)(folder)
    place = LoadTarget(Offload(torch.device("cpu")), torch.float32)
    with pytest.raises(CheckpointError, match="not finite"):
        load_weights(read_layout(folder).components["vae"], place)


def test_latents_that_are_not_finite_fail_their_job(
    run_cli: Any, write_manifest: Any, tmp_path: Path, checkpoint: Checkpoint
) -> None:
    folder = tmp_path / "nan"
    shutil.copytree(checkpoint("klein"), folder)
    in_weights(f"transformer/{WEIGHTS}", lambda t: t["proj_out.weight"].fill_(math.nan))(folder)
    manifest = write_manifest(line("a", "red", size="64x64", num_inference_steps=1))
    ran = run_cli("generate", manifest, "-o", tmp_path / "out", "--model", folder, "--no-report")
    (result,) = map(json.loads, (tmp_path / "out" / "results.jsonl").read_text().splitlines())
    found = result["error"]["code"], result["error"]["message"]
    assert (ran.code, *found) == (1, "output-image.not-finite", "the latents are not finite")


def test_paths_near_a_checkpoint_say_where_it_is(
    run_cli: Any, write_manifest: Any, tmp_path: Path, checkpoint: Checkpoint
) -> None:
    commit = tmp_path / "models--a--b" / "snapshots" / "a1"
    shutil.copytree(checkpoint("klein"), commit)
    (tmp_path / "one").mkdir()
    for part in ("transformer", "vae"):
        (tmp_path / "parts" / part).mkdir(parents=True)
        (tmp_path / "parts" / part / "config.json").write_text("{}")
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "config.json").write_text('{"_class_name": "ZImageTransformer2DModel"}')
    for name in ("one/model-Q4.gguf", "one.safetensors", "notes.txt"):
        (tmp_path / name).write_bytes(b"GGUF")
    model_files.safetensors(tmp_path / "comfy/models/vae/a.safetensors", ["decoder.conv_in.weight"])
    lora = ["transformer.a.lora_A.weight"]
    model_files.safetensors(tmp_path / "comfy/models/loras/b.safetensors", lora)
    shutil.copytree(tmp_path / "comfy", tmp_path / "comfy-2")
    stored = ["double_stream_modulation_img.lin.weight"]
    model_files.gguf(tmp_path / "comfy-2/models/unet/c/klein.gguf", stored)
    model_files.gguf(tmp_path / "comfy-2/models/unet/other.gguf", ["token_embd.weight"])
    shutil.copytree(commit, tmp_path / "models--a--c" / "snapshots" / "a1")
    shutil.copytree(commit, tmp_path / "models--a--c" / "snapshots" / "a2")
    shutil.copytree(commit, tmp_path / "two")
    (tmp_path / "two" / "model_index.json").unlink()
    (tmp_path / "cleaned").symlink_to("gone/a1")
    manifest = str(write_manifest(line("a", "red")))
    for path, named in (
        ("two", "two/model_index.json is missing"),
        ("cleaned", "restore what the link names: gone/a1"),
        ("models--a--c", "the checkpoint is in snapshots/a1, snapshots/a2"),
        ("models--a--c/snapshots", "the checkpoint is in a1, a2"),
        ("alone", "this is one part of a checkpoint, a ZImageTransformer2DModel"),
        ("comfy", "without a transformer: models/"),
        ("comfy/models/vae", "without a transformer: a.safetensors is a VAE"),
        ("comfy-2", "transformers in it: models/unet/c/klein.gguf (FLUX.2)"),
        ("comfy-2/models", "transformers in it: unet/c/klein.gguf (FLUX.2)"),
        ("comfy-2/models/unet", "transformers in it: c/klein.gguf (FLUX.2)"),
        ("comfy-2/models/unet", "--model {}/comfy-2/models/unet/c/klein.gguf, and its other parts"),
        ("parts", "model_index.json is missing"),
        ("models--a--b/snapshots/a1/vae", "this is the part vae of the checkpoint in"),
        ("models--a--b/snapshots/a1/tokenizer", "this is the part tokenizer"),
        ("models--a--b/snapshots/a1/model_index.json", "a checkpoint is a folder"),
        ("one", "without a transformer: model-Q4.gguf is damaged"),
        ("one/model-Q4.gguf", "is damaged: it ends in its header"),
        ("notes.txt", "is damaged: it ends in its header"),
    ):
        ran = run_cli("check", manifest, "--model", str(tmp_path / path))
        assert (ran.code, named.format(tmp_path) in ran.err) == (3, True), ran.err
    for path in ("models--a--b", "models--a--b/snapshots"):
        ran = run_cli("check", manifest, "--model", str(tmp_path / path))
        assert ran.code == 0, ran.err
    (tmp_path / "models--a--c" / "refs").mkdir()
    (tmp_path / "models--a--c" / "refs" / "main").write_text("a2")
    found = registry.resolve_model(str(tmp_path / "models--a--c"))
    assert found == tmp_path / "models--a--c" / "snapshots" / "a2"


@pytest.mark.parametrize("kind", ["qwen-image", "z-image"])
@pytest.mark.parametrize("value", [[[1, "x", None]], {"a": 1}, "wide", 1.5])
def test_a_size_that_is_no_number_is_refused(
    tmp_path: Path, checkpoint: Checkpoint, kind: str, value: Any
) -> None:
    folder = Path(shutil.copytree(checkpoint(kind), tmp_path / "model"))
    for name in ("attention_head_dim", "dim", "n_heads", "axes_lens"):
        path = folder / "transformer" / "config.json"
        kept = path.read_text()
        if name in json.loads(kept):
            in_json("transformer/config.json", **{name: value})(folder)
            with pytest.raises(CheckpointError, match=name):
                registry.model_card(str(folder))
            path.write_text(kept)
