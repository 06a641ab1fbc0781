"""Refuse texts that are longer than their encoder reads, by the tokenizer's file alone; no torch.

A template adds a few tokens of its own, so what is refused here is surely too long; what is only
just too long is cut, and noted in its line.
"""

from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer

from hyimg_cli.errors import CheckpointError, JobError
from hyimg_cli.files import TABLE_BYTES, bytes_of
from hyimg_cli.loading.checkpoint import readable
from hyimg_cli.spec.card import VideoCard
from hyimg_cli.spec.job import VideoJob


def check_texts(job: VideoJob, folder: Path, card: VideoCard) -> None:
    """Passes a job whose texts its checkpoint can read to their ends. Raises JobError."""
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
