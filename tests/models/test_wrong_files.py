"""Faults of a checkpoint's files: found before a run, in the words with which loading fails."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import tiny_bagel
import tiny_editors
import torch
from conftest import thorough_but
from safetensors.torch import load_file, save_file
from tiny_checkpoints import lingbot_world
from tiny_video import TINY_VIDEO, write_wan

from hyimg_cli.cache.disk import DiskStore
from hyimg_cli.errors import HyimgError
from hyimg_cli.models import registry
from hyimg_cli.settings.run import ModelChoice

SMALL = Path(__file__).parents[1] / "parity" / "tiny" / "checkpoint"
DIFFUSERS, TRANSFORMERS = "diffusion_pytorch_model.safetensors", "model.safetensors"
POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{0:064}\nsize 4978\n"
EMPTY = '{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}'


@dataclass(frozen=True)
class Checkpoint:
    """How a family's tiny checkpoint is written, and where its files are.

    `depth`: the key of a number of blocks in `config`. `others`: files of weights, with the key of
    a width in the configuration beside each.
    """

    write: Callable[[Path], object]
    weights: str
    config: str
    depth: str
    tokenizer: str
    others: tuple[tuple[str, str, str], ...]
    is_video: bool = False
    components: str | None = None


_VAE = f"vae/{DIFFUSERS}", "vae/config.json"
WAN = Checkpoint(
    write_wan, f"transformer/{DIFFUSERS}", "transformer/config.json", "num_layers",
    "tokenizer/tokenizer.json",
    ((*_VAE, "base_dim"), (f"text_encoder/{TRANSFORMERS}", "text_encoder/config.json", "d_ff")),
    is_video=True,
)  # fmt: skip
CHECKPOINTS = {
    "hunyuan-image": Checkpoint(
        partial(shutil.copytree, SMALL, dirs_exist_ok=True), TRANSFORMERS, "config.json",
        "num_hidden_layers", "tokenizer.json", (),
    ),
    "bagel": Checkpoint(
        tiny_bagel.write, "ema.safetensors", "llm_config.json", "num_hidden_layers",
        "tokenizer.json", (("ae.safetensors", "", ""),),
    ),
    "lingbot": replace(
        WAN, write=lingbot_world.write, weights="",
        config="lingbot_world_fast/config.json", tokenizer="components/tokenizer/tokenizer.json",
        others=tuple((f"components/{a}", f"components/{b}", c) for a, b, c in WAN.others),
        components="components",
    ),
    "lingbot-converted": replace(
        WAN, write=partial(lingbot_world.write, converted=True), weights="",
    ),
    "wan": WAN,
    "hunyuan-video": replace(
        WAN, write=partial(shutil.copytree, TINY_VIDEO, dirs_exist_ok=True),
        others=((*_VAE, "layers_per_block"),
                (f"text_encoder_2/{TRANSFORMERS}", "text_encoder_2/config.json", "d_ff")),
    ),
    "klein": replace(
        WAN, write=partial(tiny_editors.write, kind="klein"), is_video=False,
        others=((*_VAE, "layers_per_block"),
                (f"text_encoder/{TRANSFORMERS}", "text_encoder/config.json", "intermediate_size")),
    ),
}  # fmt: skip
Change = Callable[[Path], object]


def in_json(name: str, change: Callable[[dict[str, Any]], object]) -> Change:
    def rewrite(folder: Path) -> None:
        values = json.loads((folder / name).read_text())
        change(values)
        (folder / name).write_text(json.dumps(values))

    return rewrite


def in_weights(name: str, change: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    def rewrite(folder: Path) -> None:
        tensors = load_file(folder / name)
        change(tensors)
        save_file(tensors, folder / name, {"format": "pt"})

    return rewrite


def empty_half(path: Path) -> None:
    """As a download leaves a file that was made at its full size."""
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    kept = begin + (len(data) - begin) // 2
    path.write_bytes(data[:kept] + bytes(len(data) - kept))


def cast(tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    tensors.update({name: one.float().clamp(-9, 9).to(dtype) for name, one in tensors.items()})


def widest(tensors: dict[str, torch.Tensor]) -> str:
    return max(tensors, key=lambda name: (tensors[name].dim(), name))


def with_far_token(values: dict[str, Any]) -> None:
    one = {"special": True, "single_word": False, "lstrip": False, "rstrip": False}
    one |= {"normalized": False, "content": "<far>", "id": 1 << 20}
    values["added_tokens"] = [*values["added_tokens"], one]
    vocabulary = values["model"]["vocab"]
    if isinstance(vocabulary, dict):
        vocabulary["<far>"] = 1 << 20
    else:
        vocabulary.extend([f"far{number}", -9.0] for number in range(1 << 12))


def faults_of(one: Checkpoint) -> dict[str, Change]:
    """Changes that make the checkpoint one that cannot be loaded."""
    shards = "-of-00002.safetensors"
    transformer = one.config.rpartition("/")[0]
    weights = one.weights or f"{transformer}/diffusion_pytorch_model-00002{shards}"
    found: dict[str, Change] = {
        "depth": in_json(one.config, lambda v: v.update({one.depth: v[one.depth] + 1})),
        "word for a number": in_json(one.config, lambda v: v.update({one.depth: "two"})),
        "pointer for a configuration": lambda f: (f / one.config).write_text(POINTER),
        "no configuration": lambda f: (f / one.config).unlink(),
        "no tokenizer": lambda f: (f / one.tokenizer).unlink(),
        "empty tokenizer": lambda f: (f / one.tokenizer).write_text(EMPTY),
        "pointer for a tokenizer": lambda f: (f / one.tokenizer).write_text(POINTER),
        "tokenizer of a larger model": in_json(one.tokenizer, with_far_token),
    }
    for file, config, width in ((weights, "", ""), *one.others):
        own: dict[str, Change] = {
            "gone": lambda f, file=file: (f / file).unlink(),
            "pointer": lambda f, file=file: (f / file).write_text(POINTER),
            "cut": lambda f, file=file: os.truncate(f / file, (f / file).stat().st_size - 9),
            "half zeros": lambda f, file=file: empty_half(f / file),
            "header cut": lambda f, file=file: os.truncate(f / file, 100),
            "tensor less": in_weights(file, lambda t: t.pop(widest(t))),
            "tensor more": in_weights(file, lambda t: t.update(extra=torch.ones(2, 3))),
            "other shape": in_weights(file, lambda t: t.update({widest(t): torch.ones(2, 3)})),
            "int8": in_weights(file, lambda t: cast(t, torch.int8)),
            "fp8": in_weights(file, lambda t: cast(t, torch.float8_e4m3fn)),
        }
        if config:
            own["other width"] = in_json(config, lambda v, w=width: v.update({w: v[w] * 2}))
            own["word"] = in_json(config, lambda v, w=width: v.update({w: "two"}))
        found |= {f"{file}: {name}": change for name, change in own.items()}
    return found


FAULTS = {(kind, name): change for kind, one in CHECKPOINTS.items()
          for name, change in faults_of(one).items()}  # fmt: skip
# Families whose tokenizers are read with the other small files.
OURS = ("hunyuan-image", "bagel")
# The others are marked thorough.
FEW = {
    ("bagel", "ae.safetensors: tensor less"),
    ("bagel", "tokenizer of a larger model"),
    ("hunyuan-image", "depth"),
    ("hunyuan-image", f"{TRANSFORMERS}: half zeros"),
    ("wan", f"vae/{DIFFUSERS}: half zeros"),
    ("hunyuan-image", f"{TRANSFORMERS}: int8"),
    ("hunyuan-video", f"text_encoder_2/{TRANSFORMERS}: gone"),
    ("lingbot", f"components/vae/{DIFFUSERS}: tensor less"),
    ("lingbot", f"components/text_encoder/{TRANSFORMERS}: other width"),
    ("lingbot", "empty tokenizer"),
    ("wan", f"vae/{DIFFUSERS}: word"),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("right")

    @cache
    def of(kind: str) -> Path:
        CHECKPOINTS[kind].write(root / kind)
        return root / kind

    return of


def choice_of(kind: str, folder: Path) -> ModelChoice:
    one = CHECKPOINTS[kind]
    components = str(folder / one.components) if one.components else None
    return ModelChoice(model=str(folder), video_components=components, device="cpu")


def check(kind: str, folder: Path) -> None:
    """As `check` and `plan`: the small files, then the headers."""
    registry._opened.cache_clear()
    choice, store = choice_of(kind, folder), DiskStore(None, 0)
    if CHECKPOINTS[kind].is_video:
        registry.video_card(choice.model, None, choice.video_components)
    else:
        registry.model_card(choice.model)
    assert registry.check_headers([choice.model], choice, store) == []


def load(kind: str, folder: Path) -> Any:
    registry._opened.cache_clear()
    choice = choice_of(kind, folder)
    return (registry.load_video if CHECKPOINTS[kind].is_video else registry.load)(choice)


@pytest.mark.parametrize("kind", thorough_but(("bagel", "lingbot"), CHECKPOINTS))
def test_a_whole_checkpoint_is_accepted(kind: str, written: Any) -> None:
    check(kind, written(kind))


@pytest.mark.parametrize(
    ("kind", "name"),
    [pytest.param(*key, marks=() if key in FEW else pytest.mark.thorough)
     for key in FAULTS],
)  # fmt: skip
def test_check_says_what_loading_would_say(
    kind: str, name: str, written: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "wrong"
    shutil.copytree(written(kind), folder)
    FAULTS[kind, name](folder)
    with pytest.raises(HyimgError) as before:
        check(kind, folder)
    assert before.value.exit_code == 3
    if "tokenizer" in name and kind not in OURS:
        return  # it is read with the first text
    with pytest.raises(HyimgError) as then:
        load(kind, folder)
    assert (then.value.code, then.value.what) == (before.value.code, before.value.what)
