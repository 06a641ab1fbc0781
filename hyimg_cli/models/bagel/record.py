"""BAGEL-7B-MoT as a family."""

from pathlib import Path

from hyimg_cli.errors import require
from hyimg_cli.loading import checkpoint
from hyimg_cli.models.bagel.config import FAMILY as NAME
from hyimg_cli.models.bagel.config import VAE_WEIGHTS, WEIGHTS
from hyimg_cli.models.bagel.prompter import BagelPrompter
from hyimg_cli.models.family import Family
from hyimg_cli.spec import digest


def _refuse_wrong(folder: Path) -> None:
    require("diffusers")
    from hyimg_cli.models.bagel.weights import checked  # imports torch

    checked(folder)


FAMILY = Family(
    name=NAME,
    makes="pictures",
    # What no other family has.
    marks=lambda folder: any(
        (folder / name).is_file() for name in ("llm_config.json", f"{WEIGHTS}.safetensors")
    ),
    open=BagelPrompter,
    fingerprint=lambda folder: digest.of_json(
        [checkpoint.fingerprint(folder, stem) for stem in (WEIGHTS, VAE_WEIGHTS)]
    ),
    tensors=lambda folder: {
        "model": checkpoint.tensor_index(folder, WEIGHTS),
        "vae": checkpoint.tensor_index(folder, VAE_WEIGHTS),
    },
    refuse_wrong=_refuse_wrong,
    follows=frozenset({"vae_dtype=float32", "keep_quantized", "require_kv_reuse"}),
)
