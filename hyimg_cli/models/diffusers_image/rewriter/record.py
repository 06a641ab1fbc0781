"""Prompt rewriters: language models that write the prompt a picture model is drawn with; no torch.

FLUX.3's is a checkpoint of its own on the hub. It may also be in the picture model's folder:

    prompt_upsampler/              config.json + model.safetensors
    prompt_upsampler_processor/    or its files are in prompt_upsampler/, too
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from hyimg_cli.errors import CheckpointError, require
from hyimg_cli.loading import checkpoint, hub
from hyimg_cli.models.diffusers_video.layout import CheckpointLayout, Component
from hyimg_cli.models.diffusers_video.modular import place_of
from hyimg_cli.models.diffusers_video.tokenizers import refuse_unreadable
from hyimg_cli.models.family import Family
from hyimg_cli.spec import digest

# The part's name in a checkpoint, and its release.
_PART = "prompt_upsampler"
RELEASE = "black-forest-labs/flux-3-image-klein-pup"
_MODEL_TYPE = "qwen3_5"


@dataclass(frozen=True)
class RewriterFiles:
    """A rewriter's network, and the processor of its texts and pictures."""

    network: Component
    processor: Component

    @classmethod
    def of(cls, folder: Path, processor: Path | None = None) -> "RewriterFiles":
        """Return the files in a folder; `processor`: the folder of its processor, if another."""
        network = Component(folder, "transformers", "Qwen3_5ForConditionalGeneration")
        return cls(network, Component(processor or folder, "transformers", "Qwen3VLProcessor"))

    def fingerprint(self) -> str:
        """Return a digest of everything that decides the rewriter's texts."""
        own = self.processor.folder
        files = sorted(one for one in own.glob("*") if one.suffix in (".json", ".jinja", ".txt"))
        read = [[one.name, checkpoint.file_digest(one)] for one in files]
        return digest.of_json([self.network.identity(), read])


def find_rewriter(layout: CheckpointLayout) -> RewriterFiles:
    """Return the files of a checkpoint's rewriter: in its folder, or in the hub's cache.

    Raises CheckpointError if they are not here; nothing is fetched.
    """
    own = layout.folder / _PART
    if own.is_dir():
        processor = layout.folder / f"{_PART}_processor"
        return RewriterFiles.of(own, processor if processor.is_dir() else None)
    named = place_of(layout.index.values.get(_PART))
    model = named if hub.is_id(named) else RELEASE
    folder = hub.cached(model, None)
    if folder is None or not any(folder.glob("*.safetensors")):
        what = f"the prompt rewriter of {layout.folder.name} is not here"
        hint = f"get it with: hyimg pull {model}; or put its files into {_PART}/ of the checkpoint"
        raise checkpoint.fault("missing", what, layout.folder, hint)
    return RewriterFiles.of(folder)


def _is_rewriter(folder: Path) -> bool:
    try:
        return checkpoint.read_json(folder / "config.json").get("model_type") == _MODEL_TYPE
    except CheckpointError:
        return False


def _refuse(folder: Path, *_: Any) -> NoReturn:
    """Raise CheckpointError: a rewriter draws nothing."""
    what = "this is a language model, Qwen3.5: hyimg rewrites prompts of FLUX.3 with it"
    hint = "give FLUX.3's own checkpoint with --model; hyimg think finds the rewriter in the cache"
    raise checkpoint.fault("family", what, folder, hint)


def _check_headers(folder: Path) -> None:
    files = RewriterFiles.of(folder)
    files.network.tensors()
    refuse_unreadable(files.processor)


def refuse_wrong_rewriter(files: RewriterFiles) -> None:
    """Raise CheckpointError for weights and a tokenizer that are not the configuration's."""
    require("diffusers")
    from hyimg_cli.models.diffusers_video.weights import (  # imports torch
        check_weights,
        load_tokenizer,
    )

    check_weights(files.network)
    load_tokenizer(files.processor, files.network)


FAMILY = Family(
    name="prompt_rewriter",
    makes="pictures",
    marks=_is_rewriter,
    open=_refuse,
    check_headers=_check_headers,
    refuse_wrong=lambda folder: refuse_wrong_rewriter(RewriterFiles.of(folder)),
    helps="hyimg think prompts.txt -o texts.jsonl --model black-forest-labs/flux-3-image-klein",
)
