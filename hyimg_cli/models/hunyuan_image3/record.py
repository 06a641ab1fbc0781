"""HunyuanImage-3 as a family."""

from pathlib import Path

from hyimg_cli.loading.packed import stored_index
from hyimg_cli.models.family import Family
from hyimg_cli.models.hunyuan_image3.card import FAMILY as NAME
from hyimg_cli.models.hunyuan_image3.card import reading
from hyimg_cli.models.hunyuan_image3.prompter import Prompter


def _refuse_wrong(folder: Path) -> None:
    from hyimg_cli.models.hunyuan_image3.weights import checked  # imports torch

    checked(folder)


FAMILY = Family(
    name=NAME,
    makes="pictures",
    # One network; diffusers' pipelines have an index of several.
    marks=lambda folder: not (folder / "model_index.json").is_file(),
    open=Prompter,
    tensors=lambda folder: {"model": stored_index(folder)},
    refuse_wrong=_refuse_wrong,
    reading=reading,
    follows=frozenset(
        {
            "device=balanced",
            "decode_graphs=on",
            "vae_dtype=float16",
            "vae_dtype=float32",
            "keep_quantized",
            "require_kv_reuse",
            "offload_experts",
        }
    ),
)
