"""An embedding is what the pipeline would compute; its key holds what shapes it, and no more."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from library_weights import copy_weights
from safetensors.torch import load_file, save, save_file

from hyimg_cli.kernels.offload import Offload
from hyimg_cli.models import registry
from hyimg_cli.models.diffusers_video import encoders, layout
from hyimg_cli.models.diffusers_video.encoders import HunyuanPrompts, WanPrompts
from hyimg_cli.models.diffusers_video.layout import read_layout
from hyimg_cli.models.diffusers_video.model import DiffusersVideo
from hyimg_cli.models.diffusers_video.record import HUNYUAN_MAX_TOKENS, WAN_MAX_TOKENS
from hyimg_cli.models.diffusers_video.weights import LoadTarget
from hyimg_cli.settings.run import ModelChoice
from hyimg_cli.spec.job import VideoJob

CPU = torch.device("cpu")
QUOTED = 'a sign that says "HELLO" and "BYE"'


def encoder(folder: Path, dtype: torch.dtype = torch.float32) -> HunyuanPrompts | WanPrompts:
    layout = read_layout(folder)
    if "text_encoder_2" in layout.components:
        return HunyuanPrompts(layout, LoadTarget(Offload(CPU), dtype), HUNYUAN_MAX_TOKENS)
    return WanPrompts(layout, LoadTarget(Offload(CPU), dtype), WAN_MAX_TOKENS)


@pytest.mark.parametrize("text", [QUOTED, "a red ball", "", "ein Bär “läuft”", "'single'"])
def test_hunyuan_embeddings_are_the_pipelines(folders: dict[str, Path], text: str) -> None:
    from diffusers import HunyuanVideo15Pipeline

    pipeline = HunyuanVideo15Pipeline.from_pretrained(
        folders["hunyuan"], dtype=torch.float32, local_files_only=True
    )
    copy_weights(pipeline)
    with torch.no_grad():
        main, mask, glyph, glyph_mask = pipeline.encode_prompt(text, device=CPU)
    tensors = encoder(folders["hunyuan"]).encode(text).tensors
    assert torch.equal(tensors["text"], main[0][mask[0].bool()])
    assert not tensors["text"].requires_grad
    if "glyph" in tensors:
        assert torch.equal(tensors["glyph"], glyph[0][glyph_mask[0].bool()])
    else:
        assert not glyph_mask.any()
        assert not glyph.any()


@pytest.mark.parametrize("text", ["a  cat &amp; dog ", "", "x" * 700])
def test_wan_embeddings_are_the_pipelines(folders: dict[str, Path], text: str) -> None:
    from diffusers import WanPipeline

    pipeline = WanPipeline.from_pretrained(
        folders["wan"], dtype=torch.float32, local_files_only=True
    )
    copy_weights(pipeline)
    with torch.no_grad():
        states, _ = pipeline.encode_prompt(
            text, do_classifier_free_guidance=False, max_sequence_length=512
        )
    valid = encoder(folders["wan"]).encode(text).tensors["text"]
    assert torch.equal(valid, states[0, : len(valid)])
    assert not states[0, len(valid) :].any()


def test_only_the_encoders_that_a_text_needs_run(folders: dict[str, Path]) -> None:
    own = encoder(folders["hunyuan"])
    assert own.encoder_runs == {}
    for text in ("a ball", "a 'ball'", QUOTED, "“word”"):
        own.encode(text)
    assert own.encoder_runs == {"text_encoder": 4, "text_encoder_2": 2}
    assert set(own.encode("a ball").tensors) == {"text"}


def test_the_library_runs_its_networks_once_a_string(folders: dict[str, Path]) -> None:
    """The counter is the truth: hooks on the networks count the same."""
    own = encoder(folders["hunyuan"])
    own.encode(QUOTED)
    calls: list[str] = []
    for name, network in own._networks.items():
        network.register_forward_hook(lambda *_, name=name: calls.append(name))
    own.encode(QUOTED)
    own.encode("a ball")
    assert sorted(calls) == ["text_encoder", "text_encoder", "text_encoder_2"]
    assert own.encoder_runs == {"text_encoder": 3, "text_encoder_2": 2}


@pytest.mark.parametrize("name", ["hunyuan", "wan"])
def test_released_encoders_come_back_the_same(folders: dict[str, Path], name: str) -> None:
    own = encoder(folders[name])
    before = own.encode(QUOTED)
    own.release()
    assert own._networks == {}
    after = own.encode(QUOTED)
    assert after.key == before.key
    assert all(torch.equal(after.tensors[k], v) for k, v in before.tensors.items())


@pytest.mark.parametrize("name", ["hunyuan", "wan"])
def test_a_key_reads_no_weights(
    folders: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("weights were loaded")

    expected = encoder(folders[name]).encode(QUOTED).key
    monkeypatch.setattr(encoders, "load_weights", refuse)
    assert encoder(folders[name]).key(QUOTED) == expected


def test_the_model_keeps_its_encoders_and_networks_apart(folders: dict[str, Path]) -> None:
    model = registry.load_video(ModelChoice(str(folders["hunyuan"]), device="cpu"))
    model.prompts.encode("a ball")
    assert not {"networks", "vae"} & set(vars(model))


def other_weight(folder: Path) -> None:
    path = folder / "text_encoder" / "model.safetensors"
    tensors = load_file(path)
    next(iter(tensors.values())).view(-1)[0] += 1
    save_file(tensors, path, metadata={"format": "pt"})


def other_template(folder: Path) -> None:
    path = folder / "tokenizer" / "chat_template.jinja"
    path.write_text(path.read_text().replace("assistant", "Assistant"))


def other_vocabulary(folder: Path) -> None:
    path = folder / "tokenizer" / "tokenizer.json"
    path.write_text(path.read_text().replace('"A"', '"B"', 1))


def other_glyph_weight(folder: Path) -> None:
    path = folder / "text_encoder_2" / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


@pytest.mark.parametrize("change", [other_weight, other_template, other_vocabulary])
def test_other_files_are_another_key(
    folders: dict[str, Path], tmp_path: Path, change: Callable[[Path], None]
) -> None:
    copied = Path(shutil.copytree(folders["hunyuan"], tmp_path / "copied"))
    before = encoder(copied).key("a ball")
    assert before == encoder(folders["hunyuan"]).key("a ball")
    change(copied)
    assert encoder(copied).key("a ball") != before


def test_the_glyph_encoder_counts_only_for_quoted_text(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    copied = Path(shutil.copytree(folders["hunyuan"], tmp_path / "copied"))
    plain, quoted = encoder(copied).key("a ball"), encoder(copied).key(QUOTED)
    other_glyph_weight(copied)
    assert encoder(copied).key("a ball") == plain
    assert encoder(copied).key(QUOTED) != quoted


def test_hunyuan_keys_hold_what_the_pipeline_lets_one_change(folders: dict[str, Path]) -> None:
    def changed(**values: Any) -> str:
        own = encoder(folders["hunyuan"])
        for name, value in values.items():
            setattr(own, name, value)
        return own.key("a ball")

    keys = {
        changed(),
        changed(max_tokens=999),
        changed(system_message="Be brief."),
        encoder(folders["hunyuan"], torch.bfloat16).key("a ball"),
        encoder(folders["hunyuan"]).key("a ball "),
        encoder(folders["hunyuan"]).key("A ball"),
    }
    assert len(keys) == 6


def test_wan_keys(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    own = encoder(folders["wan"])
    assert own.key("a  cat ") == own.key("a cat")
    assert own.key("a &lt; b") == own.key("a < b")
    assert own.key("a cat") != own.key("a dog")
    shorter = encoder(folders["wan"])
    shorter.max_tokens = 226
    assert shorter.key("a cat") != own.key("a cat")
    before = own.key("a cat")
    monkeypatch.setattr(encoders, "installed_version", lambda _name: "6.3")
    assert own.key("a cat") != before


def test_keys_hold_library_versions_and_device(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = encoder(folders["hunyuan"])
    before = own.key("a ball")
    monkeypatch.setattr(layout, "_libraries", lambda: ["torch 1.0"])
    newer = encoder(folders["hunyuan"])
    versions = newer.key("a ball")
    monkeypatch.setattr(encoders, "device_class", lambda _device: "NVIDIA H200")
    assert len({before, versions, newer.key("a ball")}) == 3


@pytest.mark.parametrize(("count", "notes"), [(987, 0), (988, 1), (10_000, 1)])
def test_a_prompt_that_is_cut_says_so(folders: dict[str, Path], count: int, notes: int) -> None:
    """1000 tokens of prompt and closing turn; a byte is a token, the closing turn is 13."""
    found = encoder(folders["hunyuan"]).encode("x" * count)
    assert len(found.notes) == notes
    assert len(found.tensors["text"]) == min(count + 13, 1000)
    if notes:
        assert f"{count + 13} tokens" in found.notes[0]


def test_the_template_is_cropped_exactly(folders: dict[str, Path]) -> None:
    """An empty prompt is a space, behind it the closing turn."""
    assert len(encoder(folders["hunyuan"]).encode("").tensors["text"]) == 1 + 13


def test_quoted_text_that_is_cut_says_so(folders: dict[str, Path]) -> None:
    found = encoder(folders["hunyuan"]).encode(f'"{"x" * 300}"')
    assert len(found.tensors["glyph"]) == 256
    assert [note for note in found.notes if "quoted" in note]


def test_a_long_wan_prompt_says_so(folders: dict[str, Path]) -> None:
    found = encoder(folders["wan"]).encode("x" * 600)
    assert len(found.notes) == 1
    assert len(found.tensors["text"]) == 512


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["hunyuan", "wan"])
def test_packed_embeddings_come_back_to_the_bit(
    folders: dict[str, Path], name: str, dtype: torch.dtype
) -> None:
    own = encoder(folders[name], dtype)
    embedding = own.encode(QUOTED + "x" * 1200)
    back = own.unpack(own.pack(embedding), embedding.key)
    assert (back.key, back.notes) == (embedding.key, embedding.notes)
    assert embedding.notes
    assert set(back.tensors) == set(embedding.tensors)
    for tensor_name, tensor in embedding.tensors.items():
        assert back.tensors[tensor_name].dtype == dtype
        assert torch.equal(back.tensors[tensor_name], tensor)


def test_other_bytes_are_not_an_embedding(folders: dict[str, Path]) -> None:
    own = encoder(folders["hunyuan"])
    embedding = own.encode("a ball")
    data = own.pack(embedding)
    for bytes_ in (b"", b"\0" * 64, data[:-4], data[:40], save({"text": torch.zeros(2, 2)})):
        with pytest.raises(ValueError, match="packed"):
            own.unpack(bytes_, embedding.key)
    with pytest.raises(ValueError, match="another key"):
        own.unpack(data, own.key("a cube"))


def test_texts_of_a_job(models: dict[str, DiffusersVideo], job: VideoJob) -> None:
    unguided = replace(job, guidance_scale=1.0)
    for model in models.values():
        assert model.texts(job) == (job.prompt, job.negative_prompt)
        assert model.texts(unguided) == (job.prompt,)
