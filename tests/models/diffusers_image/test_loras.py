"""LoRA files of other makers: every tensor is applied, zero or named, and so is every alpha."""

import json
import logging
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError
from models.diffusers_image.classic import Checkpoint, line
from safetensors.torch import save_file
from torch import Tensor

from hyimg_cli.errors import CheckpointError
from hyimg_cli.models import lora_files
from hyimg_cli.models.diffusers_image.record import read_layout
from hyimg_cli.models.diffusers_video.lora_pairs import LoraPairs, read_pairs
from hyimg_cli.pipelines.failures import machine_fault
from hyimg_cli.spec.options import Lora

RANK = 4
# By kind of checkpoint: a layer of its authors' names, and the next block's.
LAYERS = {
    "qwen-image": "diffusion_model.transformer_blocks.0.attn.to_q",
    "z-image": "diffusion_model.layers.0.attention.to_out.0",
    "klein": "diffusion_model.double_blocks.0.img_attn.proj",
    "kontext": "diffusion_model.double_blocks.0.img_attn.proj",
}
# What other makers' files have beside pairs of matrices.
ODD = {
    "a bias's difference": ".diff_b",
    "a weight's difference": ".diff",
    "a modulation's difference": ".diff_m",
    "a new weight": ".set_weight",
    "a reshaped weight": ".reshape_weight",
    "a third matrix": ".lora_C.weight",
    "a norm": ".w_norm",
}
Read = Callable[[str, Mapping[str, Tensor]], LoraPairs]


def shape_of(folder: Path, layer: str) -> tuple[int, int]:
    """Of the layer that a file's pair changes: every one of these is square."""
    part = read_layout(folder).components["transformer"]
    names = {"img_attn.proj": "attn.to_out.0", "attention.": "attention."}
    stem = layer.removeprefix("diffusion_model.").replace("double_blocks", "transformer_blocks")
    for theirs, ours in names.items():
        stem = stem.replace(theirs, ours)
    rows, columns = part.tensors()[f"{stem}.weight"].shape
    return rows, columns


def pair(folder: Path, layer: str, *, is_down: bool = True) -> dict[str, Tensor]:
    rows, columns = shape_of(folder, layer)
    names = ("lora_down", "lora_up") if is_down else ("lora_A", "lora_B")
    shapes = ((RANK, columns), (rows, RANK))
    return {
        f"{layer}.{name}.weight": torch.full(shape, 0.5)
        for name, shape in zip(names, shapes, strict=True)
    }


@pytest.fixture
def read(checkpoint: Checkpoint, tmp_path: Path) -> Callable[..., LoraPairs]:
    def of(kind: str, tensors: Mapping[str, Tensor], **header: str) -> LoraPairs:
        file = tmp_path / "style.safetensors"
        save_file(dict(tensors), file, header or None)
        layout = read_layout(checkpoint(kind))
        return read_pairs(file, layout.components["transformer"], layout.family)

    return of


# Whether the library converts its authors' names with lora_down and lora_up, or lora_A and lora_B.
SPELLINGS = [
    (kind, is_down)
    for kind in LAYERS
    for is_down in (True, False)
    if (kind, is_down) not in (("klein", True), ("kontext", False))
]


@pytest.mark.parametrize(("kind", "is_down"), SPELLINGS)
@pytest.mark.parametrize("odd", ODD)
def test_each_tensor_is_applied_or_named(
    checkpoint: Checkpoint, read: Any, kind: str, odd: str, is_down: bool
) -> None:
    layer = LAYERS[kind]
    whole = pair(checkpoint(kind), layer, is_down=is_down)
    found = read(kind, whole)
    assert len(found.pairs) == 2
    assert found.unapplied == ()
    name = layer + ODD[odd]
    refused = None
    try:
        found = read(kind, whole | {name: torch.ones(RANK)})
    except CheckpointError as error:
        refused = error
    if refused:
        assert refused.code == "lora.no-match"
        assert len(refused.what) < 600
        return
    applied = any(one.endswith(".bias") for one in found.pairs)
    assert applied or found.unapplied == (name,)
    # Files of some makers have zeros for what they did not train.
    assert read(kind, whole | {name: torch.zeros(RANK)}).unapplied == ()


# The library's converter for klein takes no alpha of these names, and such files are refused.
@pytest.mark.parametrize(("kind", "is_down"), [one for one in SPELLINGS if one[0] != "klein"])
def test_a_tensors_alpha_is_applied(
    checkpoint: Checkpoint, read: Any, kind: str, is_down: bool
) -> None:
    whole = pair(checkpoint(kind), LAYERS[kind], is_down=is_down)
    plain, strong = (
        read(kind, whole | {f"{LAYERS[kind]}.alpha": torch.tensor(alpha)})
        for alpha in (float(RANK), 2.0 * RANK)
    )
    assert strong.unapplied == ()
    for one, factor in ((plain, 1), (strong, 2)):
        down, up = one.pairs.values()
        rows, columns = shape_of(checkpoint(kind), LAYERS[kind])
        assert torch.equal(up @ down, torch.full((rows, columns), factor * RANK * 0.25))


@pytest.mark.parametrize(
    ("header", "beside", "named"),
    [
        ({"lora_alpha": "8"}, None, "lora_alpha in its header"),
        ({"network_alpha": "8.0"}, None, "network_alpha in its header"),
        ({"ss_network_alpha": "8", "ss_network_dim": "4"}, None, "ss_network_alpha in its header"),
        ({"transformer.lora_alpha": "8"}, None, "transformer.lora_alpha in its header"),
        ({"lora_alpha": "4", "use_rslora": "true"}, None, "a strength of 2 "),
        ({"lora_config": '{"lora_alpha": 8, "r": 4}'}, None, "lora_alpha in lora_config in its"),
        ({}, {"r": 4, "lora_alpha": 8}, "lora_alpha in adapter_config.json beside it"),
        ({}, {"r": 4, "lora_alpha": 4, "alpha_pattern": {"to_q": 12}}, "a strength of 3 "),
        # Where it is the strength that is applied, nothing is wrong.
        ({"lora_alpha": "4"}, {"r": 4, "lora_alpha": 4}, ""),
        ({"ss_network_alpha": "None", "ss_network_dim": "4"}, None, ""),
    ],
)
def test_an_alpha_that_the_library_does_not_read_is_refused(
    checkpoint: Checkpoint, read: Any, tmp_path: Path,
    header: dict[str, str], beside: dict[str, Any] | None, named: str,
) -> None:  # fmt: skip
    whole = pair(checkpoint("qwen-image"), LAYERS["qwen-image"], is_down=False)
    if beside is not None:
        (tmp_path / "adapter_config.json").write_text(json.dumps(beside))
    if not named:
        assert read("qwen-image", whole, **header).unapplied == ()
        return
    with pytest.raises(CheckpointError, match=re.escape(named)) as caught:
        read("qwen-image", whole, **header)
    assert "@" in caught.value.hint
    # A tensor takes precedence: kohya's files say it twice.
    alpha = {f"{LAYERS['qwen-image']}.alpha": torch.tensor(8.0)}
    assert read("qwen-image", whole | alpha, **header).unapplied == ()


def in_header(**values: Any) -> str:
    return json.dumps({f"transformer.{name}": value for name, value in values.items()})


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"r": 8, "lora_alpha": 8, "target_modules": ["to_q"]}, "other ranks than its matrices"),
        ({"r": 4, "lora_alpha": 8}, "does not name its layers"),
        ({"r": 4, "lora_alpha": 8, "target_modules": []}, "does not name its layers"),
        ({"r": 4, "lora_alpha": 8, "target_modules": ["to_zz"]}, "does not name its layers"),
        ({"r": 4, "lora_alpha": 8, "target_modules": "x.*"}, "does not name its layers"),
        ({"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}, "does not name its layers"),
        ({"r": 4, "lora_alpha": 8, "r0": 1}, "does not describe a LoRA"),
        ({"r": 4, "lora_alpha": 8, "alpha": True}, "does not describe a LoRA"),
    ],
)
def test_a_header_that_does_not_describe_its_matrices_is_refused(
    checkpoint: Checkpoint, read: Any, values: dict[str, Any], named: str
) -> None:
    pytest.importorskip("peft")
    whole = pair(checkpoint("qwen-image"), LAYERS["qwen-image"], is_down=False)
    with pytest.raises(CheckpointError, match=named):
        read("qwen-image", whole, lora_adapter_metadata=in_header(**values))
    good = in_header(r=RANK, lora_alpha=8, target_modules=["to_q"])
    assert read("qwen-image", whole, lora_adapter_metadata=good).options["metadata"]
    # Both would be applied, one after the other.
    alpha = {f"{LAYERS['qwen-image']}.alpha": torch.tensor(8.0)}
    with pytest.raises(CheckpointError, match="its alpha is in tensors and in lora_adapter"):
        read("qwen-image", whole | alpha, lora_adapter_metadata=good)


@pytest.mark.parametrize("code", ["lora.no-match", "lora.missing", "checkpoint.mismatch"])
def test_a_lora_fails_the_jobs_that_name_it_and_a_checkpoint_ends_the_run(code: str) -> None:
    fault = CheckpointError("it does not fit", code=code)
    assert machine_fault(fault) is (None if code.startswith("lora.") else fault)


KINDS = {
    "lokr_w1": "a LoKr", "hada_w1_a": "a LoHa", "oft_blocks": "an OFT", "dora_scale": "a DoRA",
    "lora_magnitude_vector": "a DoRA", "lora_mid.weight": "a LoCon",
}  # fmt: skip


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("mark", KINDS)
def test_other_kinds_of_adapters_are_named(
    checkpoint: Checkpoint, read: Any, kind: str, mark: str
) -> None:
    tensors = {f"{LAYERS[kind]}.{mark}": torch.ones(2, 2)}
    for more in ({}, pair(checkpoint(kind), LAYERS[kind])):
        with pytest.raises(CheckpointError, match=f"it is {KINDS[mark]}"):
            read(kind, tensors | more)


def test_what_does_not_fit_is_said_by_the_files_own_names(
    checkpoint: Checkpoint, read: Any
) -> None:
    layer = LAYERS["qwen-image"]
    whole = pair(checkpoint("qwen-image"), layer, is_down=False)
    peft = {f"base_model.model.{name.removeprefix('diffusion_model.')}": one
            for name, one in whole.items()}  # fmt: skip
    own = {f"transformer.{name.removeprefix('diffusion_model.')}": one
           for name, one in whole.items()}  # fmt: skip
    half = {name: one for name, one in own.items() if "lora_A" in name}
    text = pair(checkpoint("kontext"), LAYERS["kontext"]) | {
        f"lora_te1_text_model_encoder_layers_0_mlp_fc1.lora_{side}.weight": torch.ones(shape)
        for side, shape in (("down", (RANK, 16)), ("up", (32, RANK)))
    }
    for kind, tensors, words in (
        ("qwen-image", peft, ("PEFT's own", "base_model.model.")),
        ("qwen-image", half, ("lora_B, the other half of a pair, is missing", "to_q.lora_A")),
        ("qwen-image", {"a.weight": torch.ones(2, 2)}, ("no pairs of LoRA matrices", "a.weight")),
        ("kontext", text, ("a text encoder, too (2 entries)", "lora_te1_text_model")),
    ):
        with pytest.raises(CheckpointError) as caught:
            read(kind, tensors)
        assert all(word in caught.value.what for word in words), caught.value.what


# What trainers write before and after the name of a layer.
AROUND = ("{}.lora_A.weight", "unet.{}.lora_A.weight", "module.{}.lora_A.weight",
          "transformer.{}.lora_A.default_0.weight", "transformer.{}.lora.down.weight")  # fmt: skip


@pytest.mark.parametrize("around", AROUND)
def test_names_are_at_fault_where_the_shapes_are_right(read: Any, around: str) -> None:
    down = around.format("transformer_blocks.0.attn.to_q")
    up = down.replace("lora_A", "lora_B").replace("down", "up")
    pairs = {down: torch.ones(RANK, 48), up: torch.ones(48, RANK)}
    with pytest.raises(CheckpointError, match="does not read the names of 2 of its 2") as caught:
        read("qwen-image", pairs)
    assert "rename them as transformer.LAYER.lora_A.weight" in caught.value.hint


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda one: (one * 9).to(torch.int8), "are integers"),
        (lambda one: one > 0, "are integers"),
        (lambda one: one * torch.nan, "are not finite"),
        (lambda one: (one * 1e6).half(), "are not finite"),
        (lambda one: one[:0] if len(one) == RANK else one[:, :0], "are empty"),
    ],
)
def test_tensors_that_are_no_weights_are_refused(
    checkpoint: Checkpoint, read: Any, change: Callable[[Tensor], Tensor], why: str
) -> None:
    for kind, layer in LAYERS.items():
        whole = pair(checkpoint(kind), layer, is_down=kind == "kontext")
        with pytest.raises(CheckpointError, match=f"some of its tensors {why}"):
            read(kind, {name: change(one).contiguous() for name, one in whole.items()})


@pytest.mark.parametrize("kind", LAYERS)
def test_8_bit_floats_are_converted_as_others(checkpoint: Checkpoint, read: Any, kind: str) -> None:
    whole = pair(checkpoint(kind), LAYERS[kind], is_down=kind == "kontext")
    if kind != "klein":
        whole[f"{LAYERS[kind]}.alpha"] = torch.tensor(2.0)
    narrow = {name: one.to(torch.float8_e4m3fn) for name, one in whole.items()}
    found = read(kind, narrow).pairs
    for name, one in read(kind, whole).pairs.items():
        assert torch.equal(found[name], one)


def test_whatever_a_converter_raises_is_a_misfit(checkpoint: Checkpoint, read: Any) -> None:
    """FLUX.1's asserts the height of a fused layer, and says nothing."""
    name = "lora_unet_single_blocks_0_linear1"
    tensors = {
        f"{name}.lora_down.weight": torch.ones(RANK, 32),
        f"{name}.lora_up.weight": torch.ones(99, RANK),
    }
    with pytest.raises(CheckpointError, match=r"cannot convert its names \(AssertionError\)"):
        read("kontext", tensors)


def test_check_plan_and_the_result_line_name_what_is_not_applied(
    run_cli: Any, write_manifest: Any, checkpoint: Checkpoint, sources: list[str], tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    folder, layer = checkpoint("kontext"), LAYERS["kontext"]
    tensors = pair(folder, layer) | {f"{layer}.diff_b": torch.ones(32)}
    save_file(tensors, tmp_path / "style.safetensors")
    job = line("a", "red", "s0.png", size="64x64", num_inference_steps=1, lora="style.safetensors")
    write_manifest(job)
    for command in ("check", "plan", "generate"):
        words = ("-o", "out") if command == "generate" else ()
        ran = run_cli(command, "jobs.jsonl", *words, "--model", str(folder))
        assert ran.code == 0, ran.err
        said = f"style.safetensors was applied without 1 of its tensors.*{layer}.diff_b"
        assert re.search(f"note: .*{said}", ran.err), ran.err
    (result,) = (tmp_path / "out" / "results.jsonl").read_text().splitlines()
    assert any(re.search(said, one) for one in json.loads(result)["warnings"])
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]


def test_loras_that_the_run_will_fetch_are_named_in_one_note(
    run_cli: Any, write_manifest: Any, checkpoint: Checkpoint, sources: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    loras = ("own/style/a.safetensors", "own/style/b.safetensors", "own/style/a.safetensors")
    jobs = [
        line(f"{number}", "red", "s0.png", size="64x64", num_inference_steps=1, lora=lora)
        for number, lora in enumerate(loras)
    ]
    write_manifest(*jobs)
    for offline, then in (("", "the run fetches them"), ("1", "jobs with them will fail")):
        monkeypatch.setenv("HF_HUB_OFFLINE", offline)
        ran = run_cli("check", "jobs.jsonl", "--model", str(checkpoint("kontext")))
        assert ran.code == 0, ran.err
        (said,) = [one for one in ran.err.splitlines() if "hub's cache" in one]
        assert f"{loras[0]}, {loras[1]};" in said
        assert then in ran.err


def test_a_weight_that_is_written_in_another_way_is_explained(
    run_cli: Any, write_manifest: Any
) -> None:
    for written in ("a.safetensors:0.5", "a.safetensors @ 0.5", "a.pt"):
        write_manifest({"prompt": "red", "lora": written})
        ran = run_cli("check", "jobs.jsonl")
        assert ran.code == 2
        assert "write the weight as @0.5, without spaces; only safetensors files" in ran.err
    write_manifest({"prompt": "red", "lora": "A.SAFETENSORS@0.5"})
    assert "only safetensors" not in run_cli("check", "jobs.jsonl").err


def test_a_pointer_of_git_lfs_is_named(checkpoint: Checkpoint, tmp_path: Path) -> None:
    file = tmp_path / "style.safetensors"
    file.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{0:064}\nsize 4978\n")
    layout = read_layout(checkpoint("qwen-image"))
    with pytest.raises(CheckpointError, match="is a Git LFS pointer") as caught:
        read_pairs(file, layout.components["transformer"], layout.family)
    assert "git lfs pull" in caught.value.hint


def test_the_key_of_a_file_whose_strength_was_not_read_is_a_new_one(tmp_path: Path) -> None:
    for name, has_header in (("diffusion_model.a", True), ("transformer.a", True),
                             ("diffusion_model.a", False)):  # fmt: skip
        file = tmp_path / f"{name}{has_header}.safetensors"
        header = {"lora_adapter_metadata": in_header(r=4, lora_alpha=8)} if has_header else None
        save_file({f"{name}.lora_A.weight": torch.ones(2, 2)}, file, header)
        is_new = has_header and not name.startswith("transformer")
        assert lora_files.in_key((Lora(str(file)),)).endswith("+metadata@1") == is_new


def test_a_lora_of_the_hub_brings_the_configuration_beside_it(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The strength that it states is not what the library applies."""
    hub, kept = tmp_path / "hub", tmp_path / "kept"
    whole = pair(checkpoint("qwen-image"), LAYERS["qwen-image"], is_down=False)
    for folder in ("plain", "said", "said/deep"):
        (hub / "own" / folder).mkdir(parents=True, exist_ok=True)
        save_file(whole, hub / "own" / folder / "style.safetensors")
    config = {"r": RANK, "lora_alpha": 2 * RANK}
    (hub / "own" / "said" / lora_files.CONFIG).write_text(json.dumps(config))

    def fetch(repository: str, file: str) -> str:
        if not (hub / repository / file).is_file():
            raise EntryNotFoundError(file)
        (kept / repository / file).parent.mkdir(parents=True, exist_ok=True)
        return str(shutil.copy(hub / repository / file, kept / repository / file))

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    layout = read_layout(checkpoint("qwen-image"))
    network = layout.components["transformer"]
    for name in ("own/plain/style.safetensors", "own/said/deep/style.safetensors"):
        assert read_pairs(lora_files.lora_file(name), network, layout.family).unapplied == ()
    found = lora_files.lora_file("own/said/style.safetensors")
    with pytest.raises(CheckpointError, match="asks for a strength of 2"):
        read_pairs(found, network, layout.family)
