"""BAGEL-7B-MoT as a family."""

from pathlib import Path

from hyimg_cli.errors import require
from hyimg_cli.loading import checkpoint
from hyimg_cli.loading.checkpoint import TensorInfo
from hyimg_cli.models.bagel.config import FAMILY as NAME
from hyimg_cli.models.bagel.config import VAE_WEIGHTS, WEIGHTS
from hyimg_cli.models.bagel.prompter import BagelPrompter
from hyimg_cli.models.family import Family
from hyimg_cli.spec import digest


def _has_its_files(folder: Path) -> bool:
    """True for what no other family has."""
    return (folder / "llm_config.json").is_file() or (folder / f"{WEIGHTS}.safetensors").is_file()


def _fingerprint(folder: Path) -> str:
    parts = [checkpoint.fingerprint(folder, stem) for stem in (WEIGHTS, VAE_WEIGHTS)]
    return digest.of_json(parts)


def _tensors(folder: Path) -> dict[str, dict[str, TensorInfo]]:
    stems = {"model": WEIGHTS, "vae": VAE_WEIGHTS}
    return {name: checkpoint.tensor_index(folder, stem) for name, stem in stems.items()}


def _refuse_wrong(folder: Path) -> None:
    require("diffusers")
    from hyimg_cli.models.bagel.weights import checked  # imports torch

    checked(folder)


FAMILY = Family(
    name=NAME,
    makes="pictures",
    marks=_has_its_files,
    open=BagelPrompter,
    fingerprint=_fingerprint,
    tensors=_tensors,
    refuse_wrong=_refuse_wrong,
)
