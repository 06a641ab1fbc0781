"""BAGEL-7B-MoT as a family; no torch until it is loaded."""

from pathlib import Path
from typing import TYPE_CHECKING

from hyimg_cli.errors import require
from hyimg_cli.loading import checkpoint
from hyimg_cli.models.bagel.config import FAMILY as NAME
from hyimg_cli.models.bagel.config import VAE_WEIGHTS, WEIGHTS
from hyimg_cli.models.bagel.prompter import BagelPrompter
from hyimg_cli.models.family import Family
from hyimg_cli.settings.run import ModelChoice
from hyimg_cli.spec import digest

if TYPE_CHECKING:
    from hyimg_cli.models.bagel.family import Bagel
    from hyimg_cli.parallel.ranks import RankPool


class BagelCheckpoint(BagelPrompter):
    """One checkpoint. Raises CheckpointError if its files are incomplete."""

    def load(
        self, choice: ModelChoice, *, is_batch_invariant: bool, pool: "RankPool | None"
    ) -> "Bagel":
        assert pool is None, "refused before"
        require("diffusers")
        self.refuse_other_vocabulary()
        from hyimg_cli.models.bagel.family import load_family  # imports torch

        return load_family(self, choice, is_batch_invariant=is_batch_invariant)


def _refuse_wrong(folder: Path) -> None:
    require("diffusers")
    from hyimg_cli.models.bagel.weights import checked  # imports torch

    BagelCheckpoint(folder, "").refuse_other_vocabulary()
    checked(folder)


FAMILY = Family(
    name=NAME,
    makes="pictures",
    # What other families do not have.
    marks=lambda folder: any(
        (folder / name).is_file() for name in ("llm_config.json", f"{WEIGHTS}.safetensors")
    ),
    open=BagelCheckpoint,
    fingerprint=lambda folder: digest.of_json(
        [checkpoint.fingerprint(folder, stem) for stem in (WEIGHTS, VAE_WEIGHTS)]
    ),
    tensors=lambda folder: {
        "model": checkpoint.tensor_index(folder, WEIGHTS),
        "vae": checkpoint.tensor_index(folder, VAE_WEIGHTS),
    },
    weights=lambda folder: [(folder, WEIGHTS), (folder, VAE_WEIGHTS)],
    refuse_wrong=_refuse_wrong,
    follows=frozenset({"vae_dtype=float32", "keep_quantized", "require_kv_reuse"}),
)
