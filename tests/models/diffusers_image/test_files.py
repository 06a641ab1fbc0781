"""A transformer that is one file, with the other parts in a folder: check, keys, names, words."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import model_files
import pytest

from hyimg_cli.errors import CheckpointError
from hyimg_cli.manifest.resolved import public_model
from hyimg_cli.models import registry
from hyimg_cli.models.licences import UNKNOWN

Checkpoint = Callable[[str], Path]
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
LINE = {"custom_id": "a", "prompt": "red", "size": "64x64", "num_inference_steps": 1}
CASES = ("klein", "qwen-image-edit-plus")


@pytest.fixture
def parts(checkpoint: Checkpoint, tmp_path: Path) -> Path:
    """The other parts of a klein, whose transformer's weights are `klein.safetensors`."""
    folder = Path(shutil.copytree(checkpoint("klein"), tmp_path / "parts"))
    (folder / WEIGHTS).rename(tmp_path / "klein.safetensors")
    return folder


@pytest.fixture
def named(parts: Path, tmp_path: Path) -> str:
    return f"{tmp_path}/klein.safetensors+{parts}"


@pytest.mark.parametrize("spelling", ["flags", "flag", "line", "lines", "recipe", "home"])
def test_check_takes_a_file_however_it_is_named(
    run_cli: Any, write_manifest: Any, parts: Path, tmp_path: Path, spelling: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("HOME", str(tmp_path))
    file = {"model": "klein.safetensors", "components": "./parts"}
    lines = {"line": {"model": "./klein.safetensors+./parts"}, "lines": file}
    flags = {
        "flags": ["--model", "klein.safetensors", "--components", "parts"],
        "flag": ["--model", "klein.safetensors+parts"],
        "home": ["--model", "~/klein.safetensors", "--components", "~/parts"],
        "recipe": ["--recipe", "r.toml"],
    }
    (tmp_path / "r.toml").write_text(
        '[model]\nmodel = "./klein.safetensors"\ncomponents = "./parts"\n'
    )
    manifest = write_manifest(LINE | lines.get(spelling, {}))
    ran = run_cli("check", manifest, *flags.get(spelling, []))
    assert ran.code == 0, ran.err
    how = "klein.safetensors (safetensors: F32 33), drawn as parts (Flux2KleinPipeline)"
    assert f"the transformer is {how} by --components" in ran.err
    assert "the licence of klein.safetensors is not known" in ran.err


def test_a_file_without_its_parts_says_where_they_are(
    run_cli: Any, write_manifest: Any, parts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = tmp_path / "hub" / "models--Tongyi-MAI--Z-Image"
    (cached / "snapshots" / "a1").mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("a1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    manifest = write_manifest(LINE)
    stored = ["layers.0.adaLN_modulation.0.weight", "cap_embedder.1.weight", "noise_refiner.0.x"]
    model_files.gguf(tmp_path / "z_image_turbo-Q4_K_M.gguf", stored)
    for model, said in (
        ("klein.safetensors", "hf download black-forest-labs/FLUX.2-klein-4B --exclude"),
        ("z_image_turbo-Q4_K_M.gguf", "add --components Tongyi-MAI/Z-Image"),
        ("none.gguf", "model file not found: none.gguf"),
        ("m" * 5000 + ".gguf", "model file not found: mmm"),
    ):
        for command in ("check", "plan", "generate"):
            ran = run_cli(command, manifest, "--model", model, "-o", "out")
            assert (ran.code, said in ran.err) == (3, True), ran.err
            assert not (tmp_path / "out").exists()


@pytest.fixture
def cache(tmp_path: Path, parts: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache, with acme/files/sub/klein.safetensors and acme/parts."""
    home = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(home))
    for name in ("files", "parts"):
        (home / f"models--acme--{name}" / "refs").mkdir(parents=True)
        (home / f"models--acme--{name}" / "refs" / "main").write_text("a1")
        (home / f"models--acme--{name}" / "snapshots").mkdir()
    (home / "models--acme--files" / "snapshots" / "a1" / "sub").mkdir(parents=True)
    file = home / "models--acme--files" / "snapshots" / "a1" / "sub" / "klein.safetensors"
    file.symlink_to(tmp_path / "klein.safetensors")
    (home / "models--acme--parts" / "snapshots" / "a1").symlink_to(parts)
    return home


def test_a_file_of_the_hub_is_named_as_the_hub_names_it(
    run_cli: Any, write_manifest: Any, tmp_path: Path, cache: Path, named: str
) -> None:
    """It is drawn from the cache, recorded by that name, and replayed without naming it again."""
    name = "acme/files/sub/klein.safetensors"
    assert registry.fingerprint(f"{name}+{tmp_path / 'parts'}") == registry.fingerprint(named)
    manifest = write_manifest(LINE)
    ran = run_cli("generate", manifest, "--model", name, "--components", "acme/parts", "-o", "out")
    assert "1 done" in ran.err, ran.err
    (line,) = (tmp_path / "out" / "manifest.resolved.jsonl").read_text().splitlines()
    assert json.loads(line)["model"] == f"{name}+acme/parts"
    replayed = run_cli("replay", "out/outputs/a.png", "--expect-equal", "-o", "again")
    assert replayed.code == 0, replayed.err


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("acme/files/sub/none.gguf", "fetch it with: hyimg pull acme/files sub/none.gguf"),
        ("nobody/files/a b.gguf", "fetch it with: hyimg pull nobody/files 'a b.gguf'"),
        ("acme/files/../sub/klein.safetensors", "neither here nor in the hub's cache"),
        ("./acme/files/klein.gguf", "give the path of a file"),
    ],
)
def test_a_file_of_the_hub_that_is_not_here_is_to_be_pulled(
    run_cli: Any, write_manifest: Any, cache: Path, name: str, said: str
) -> None:
    for command in ("check", "generate"):
        given = ("--model", name, "--components", "acme/parts")
        ran = run_cli(command, write_manifest(LINE), *given)
        assert (ran.code, said in ran.err) == (3, True), ran.err


def test_components_for_a_folder_have_no_effect(
    run_cli: Any, write_manifest: Any, checkpoint: Checkpoint, parts: Path
) -> None:
    model = str(checkpoint("klein"))
    flags = ("--model", model, "--components", str(parts))
    ran = run_cli("check", write_manifest(LINE), *flags)
    said = "--components applies to models as one file; no job has one"
    assert (ran.code, said in ran.err) == (0, True), ran.err
    ran = run_cli("check", write_manifest(LINE | {"model": model, "components": "./parts"}))
    assert (ran.code, "it has no effect: the model is not one file" in ran.err) == (2, True)


@pytest.mark.parametrize("value", ["tiny-image", "bagel", "none/of/these", "klein.safetensors"])
def test_other_components_are_refused(
    run_cli: Any, write_manifest: Any, parts: Path, checkpoint: Checkpoint, value: str
) -> None:
    flags = ("--model", "klein.safetensors", "--components", value)
    ran = run_cli("check", write_manifest(LINE), *flags)
    assert ran.code == 3, ran.err


def test_components_of_another_network_are_refused_by_name(
    run_cli: Any, write_manifest: Any, parts: Path, checkpoint: Checkpoint
) -> None:
    manifest = write_manifest(LINE)
    flags = ("--model", "klein.safetensors", "--components", str(checkpoint("z-image")))
    for command in ("check", "generate"):
        ran = run_cli(command, manifest, *flags)
        assert ran.code == 3
        assert (
            "error[checkpoint.components]: klein.safetensors is a transformer of FLUX.2" in ran.err
        )
        assert "the components are for a ZImageTransformer2DModel" in ran.err


def test_a_key_follows_the_bytes_and_the_parts_and_no_name(
    named: str, parts: Path, tmp_path: Path, checkpoint: Checkpoint
) -> None:
    first = registry.fingerprint(named)
    assert first != registry.fingerprint(str(checkpoint("klein")))
    shutil.copy(tmp_path / "klein.safetensors", tmp_path / "other.safetensors")
    assert registry.fingerprint(named.replace("klein.s", "other.s")) == first
    data = bytearray((tmp_path / "klein.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "flipped.safetensors").write_bytes(data)
    assert registry.fingerprint(named.replace("klein.s", "flipped.s")) != first
    whole = f"{tmp_path}/klein.safetensors+{checkpoint('klein')}"
    assert registry.fingerprint(whole) == first
    scheduler = parts / "scheduler" / "scheduler_config.json"
    scheduler.write_text(scheduler.read_text() + " ")
    registry._fingerprint.cache_clear()
    assert registry.fingerprint(named) != first


def test_the_licence_of_a_file_is_unknown(named: str, tmp_path: Path, parts: Path) -> None:
    (parts / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    assert registry.licence(named) == registry.model_card(named).licence == UNKNOWN


@pytest.mark.parametrize(
    ("file", "folder", "said"),
    [
        ("Qwen-Image-Edit-2509-Q4_K_M", "Qwen-Image-Edit-2511", "2509"),
        ("qwen_image_edit_2511_bf16", "Qwen-Image-Edit-2511", ""),
        ("qwen-image-edit-plus-v2", "Qwen-Image-Edit-2511", ""),
        ("qwen-image-layered", "Qwen-Image-Edit-2511", "layered"),
        ("my-finetune", "parts", ""),
        ("qwen-image-edit-2511", "parts", ""),
    ],
)
def test_a_file_that_is_named_like_another_release_is_doubted(
    checkpoint: Checkpoint, tmp_path: Path, file: str, folder: str, said: str
) -> None:
    there = tmp_path / folder
    there.symlink_to(checkpoint("qwen-image-edit-plus"))
    path = tmp_path / f"{file}.safetensors"
    os.link(there / WEIGHTS, path)
    job = registry.sequences(f"{path}+{there}")
    found = job.advice(_job(f"{path}+{there}"))
    doubt = f"the file's name says {said}; it is drawn as {folder}, by --components"
    assert (doubt in found) == bool(said)
    assert any("is drawn as" in one for one in found) == bool(said)


def _job(model: str) -> Any:
    from hyimg_cli.spec.job import ImageJob, SizeRequest
    from hyimg_cli.spec.options import TextSampling

    return ImageJob(
        custom_id="a", task="t2i", prompt="red", model=model, size=SizeRequest(64, 64),
        text=TextSampling(), num_inference_steps=1, guidance_scale=1.0, flow_shift=1.0, seed=1,
        images=(),
    )  # fmt: skip


def test_a_flags_parts_are_found_from_the_run(
    run_cli: Any, write_manifest: Any, parts: Path, tmp_path: Path
) -> None:
    flags = ("--model", "klein.safetensors", "--components", "parts", "--no-report")
    ran = run_cli("generate", write_manifest(LINE), *flags, "-o", "out")
    assert ran.code == 0, ran.err
    (line,) = (tmp_path / "out" / "manifest.resolved.jsonl").read_text().splitlines()
    assert json.loads(line)["model"] == "../klein.safetensors+../parts"
    (result,) = (tmp_path / "out" / "results.jsonl").read_text().splitlines()
    assert any("drawn as parts" in one for one in json.loads(result)["notes"])


def test_names_lose_their_folders() -> None:
    cache = "/h/models--Qwen--Qwen-Image/snapshots/a1"
    for name, public in (
        ("/a/b/x.gguf+/c/parts", "x.gguf+parts"),
        ("x.gguf+Qwen/Qwen-Image", "x.gguf+Qwen/Qwen-Image"),
        (f"{cache}/x.gguf+{cache}", "Qwen/Qwen-Image/x.gguf+Qwen/Qwen-Image"),
        ("/h/models--Qwen--Qwen-Image", "Qwen/Qwen-Image"),
        ("models/x.gguf", "x.gguf"),
        ("./a/b/x.gguf", "x.gguf"),
        ("acme/files/sub/x.gguf", "acme/files/sub/x.gguf"),
        (f"{cache}/sub/x.gguf+parts", "Qwen/Qwen-Image/sub/x.gguf+parts"),
    ):
        assert public_model(name) == public


def test_a_line_may_name_only_allowed_files_and_parts(
    run_cli: Any, write_manifest: Any, parts: Path, tmp_path: Path
) -> None:
    shutil.copytree(parts, tmp_path / "others")
    line = LINE | {"model": "./klein.safetensors"}
    manifest = write_manifest(line | {"components": "./parts"})
    for allowed, code in (
        ("./klein.safetensors+./parts", 0),
        ("klein.safetensors,parts", 0),
        ("klein.safetensors,others", 2),
        ("klein.safetensors", 2),
        ("parts", 2),
    ):
        ran = run_cli("check", manifest, "--allow-model", allowed)
        assert ran.code == code, ran.err
    ran = run_cli(
        "check", write_manifest(line), "--allow-model", "klein.safetensors",
        "--components", "parts",
    )  # fmt: skip
    assert ran.code == 0, ran.err


def test_parts_without_a_transformer_need_its_configuration(named: str, parts: Path) -> None:
    (parts / "transformer" / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"transformer/config\.json is missing"):
        registry.model_card(named)
    (parts / "transformer").rmdir()
    with pytest.raises(CheckpointError, match="the folder transformer/ is missing"):
        registry.model_card(named)


def test_plan_counts_the_file(run_cli: Any, write_manifest: Any, parts: Path) -> None:
    flags = ("--model", "klein.safetensors", "--components", "parts", "--json")
    ran = run_cli("plan", write_manifest(LINE), *flags)
    assert ran.code == 0, ran.err
    facts = json.loads(ran.out.splitlines()[0])
    assert facts["groups"][0]["model"] == "klein.safetensors+parts"
