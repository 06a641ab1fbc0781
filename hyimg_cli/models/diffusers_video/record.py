"""HunyuanVideo-1.5 and Wan, in diffusers' layout, as a family."""

from functools import cached_property, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from hyimg_cli.errors import CheckpointError, JobError, require
from hyimg_cli.files import TABLE_BYTES, bytes_of
from hyimg_cli.loading.checkpoint import file_digest, readable
from hyimg_cli.models.diffusers_video.card import video_card
from hyimg_cli.models.diffusers_video.layout import (
    HUNYUAN_VIDEO15,
    INDEX,
    CheckpointLayout,
    is_video_checkpoint,
    read_layout,
)
from hyimg_cli.models.family import Family
from hyimg_cli.settings.run import ModelChoice
from hyimg_cli.spec.card import VideoCard
from hyimg_cli.spec.job import VideoJob

if TYPE_CHECKING:
    from hyimg_cli.models.latent_video import LatentVideoModel


class DiffusersFolder:
    """A checkpoint folder, its weights unread."""

    def __init__(self, folder: Path, model: str) -> None:
        self.folder = folder
        self.card = video_card(folder, model)

    @cached_property
    def layout(self) -> CheckpointLayout:
        return read_layout(self.folder)

    def check(self, job: VideoJob) -> None:
        check_texts(job, self.folder, self.card)
        if job.lora and find_spec("diffusers"):
            from hyimg_cli.models.diffusers_video.lora import check_loras  # imports torch

            check_loras(job, self.layout)

    def load(self, choice: ModelChoice) -> "LatentVideoModel":
        """Float32 on the CPU, bfloat16 on a GPU by default. Every file is checked; weights are read
        when they are needed, the encoders' apart from the network's, so that both need not fit at
        once. Raises CheckpointError, or MachineError.
        """
        require("diffusers", "av")
        from hyimg_cli.models.diffusers_video.weights import check_weights, load_target

        target, parts = load_target(choice), self.layout.components.values()
        count = sum(check_weights(part) for part in parts if part.has_weights)
        if self.layout.family == HUNYUAN_VIDEO15:
            from hyimg_cli.models.diffusers_video.hunyuan_video15 import HunyuanVideo15

            return HunyuanVideo15(self.card, self.layout, target, count, choice)
        from hyimg_cli.models.diffusers_video.wan import Wan

        return Wan(self.card, self.layout, target, count, choice)


def check_texts(job: VideoJob, folder: Path, card: VideoCard) -> None:
    """Passes a job whose texts its checkpoint can read to their ends, by the tokenizer's file.
    Raises JobError.

    A template adds a few tokens of its own, so what is refused here is surely too long; what is
    only just too long is cut, and noted in its line.
    """
    tokenizer = _tokenizer(folder)
    if tokenizer is None:
        return
    for name, text in zip(("prompt", "negative_prompt"), job.texts, strict=False):
        count = len(tokenizer.encode(text, add_special_tokens=False).ids)
        if count > card.max_prompt_tokens:
            raise JobError(
                f"the text is {count:,} tokens long; its encoder reads {card.max_prompt_tokens:,}",
                where=name,
                hint="shorten it: what stands behind would be lost",
                code="job.prompt-too-long",
            )


@lru_cache(maxsize=4)
def _tokenizer(folder: Path) -> Tokenizer | None:
    """The main text encoder's; None where the checkpoint keeps it in another form."""
    file = folder / "tokenizer" / "tokenizer.json"
    if not file.exists():
        return None
    with readable(file):
        data = bytes_of(file, TABLE_BYTES)
    try:
        return Tokenizer.from_buffer(data)
    except Exception as error:  # the library raises no other
        what = f"tokenizer/tokenizer.json cannot be read: {error}"
        raise CheckpointError(what, where=folder, code="checkpoint.tokenizer") from None


FAMILY = Family(
    name="diffusers_video",
    makes="videos",
    marks=is_video_checkpoint,
    open=DiffusersFolder,
    fingerprint=lambda folder: read_layout(folder).fingerprint(file_digest(folder / INDEX)),
    tensors=lambda folder: read_layout(folder).tensors(),
    follows=frozenset({"quantization", "attention_backend", "compile_blocks", "cpu_offload=group"}),
)
