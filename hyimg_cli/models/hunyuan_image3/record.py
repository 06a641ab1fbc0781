"""HunyuanImage-3 as a family; no torch until it is loaded."""

from pathlib import Path
from typing import TYPE_CHECKING

from hyimg_cli.loading.checkpoint import parts_index
from hyimg_cli.loading.packed import stored_index
from hyimg_cli.models.family import Family
from hyimg_cli.models.hunyuan_image3.card import FAMILY as NAME
from hyimg_cli.models.hunyuan_image3.card import reading
from hyimg_cli.models.hunyuan_image3.prompter import Prompter
from hyimg_cli.settings.run import ModelChoice

if TYPE_CHECKING:
    from hyimg_cli.models.hunyuan_image3.family import HunyuanImage3
    from hyimg_cli.parallel.ranks import RankPool


class HunyuanCheckpoint(Prompter):
    """One checkpoint. Raises CheckpointError if its files are incomplete."""

    def load(
        self, choice: ModelChoice, *, is_batch_invariant: bool, pool: "RankPool | None"
    ) -> "HunyuanImage3":
        from hyimg_cli.models.hunyuan_image3.family import load_family  # imports torch

        self.refuse_other_vocabulary()
        return load_family(self, choice, is_batch_invariant=is_batch_invariant, pool=pool)


def _refuse_wrong(folder: Path) -> None:
    from hyimg_cli.models.hunyuan_image3.weights import checked  # imports torch

    HunyuanCheckpoint(folder, "").refuse_other_vocabulary()
    checked(folder)


FAMILY = Family(
    name=NAME,
    makes="pictures",
    # A single network; diffusers' pipelines have an index of several.
    marks=lambda folder: not parts_index(folder).is_file(),
    open=HunyuanCheckpoint,
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
