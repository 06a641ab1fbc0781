"""Whether a checkpoint's files are all there, and its tokenizers read texts; no torch.

Names and shapes of tensors are compared with the library's empty networks (`models/whole`).

transformers makes an empty tokenizer of a folder without the files of one. It reads every text as
the same tokens, so every prompt would give the same picture.
"""

from functools import lru_cache
from itertools import chain
from pathlib import Path

from hyimg_cli.loading import checkpoint
from hyimg_cli.models.common.tokenizer import read_tokenizer
from hyimg_cli.models.diffusers_video.layout import CheckpointLayout, Component

# Sets of files, each enough for a tokenizer.
_ENOUGH = (("vocab.json", "merges.txt"), ("spiece.model",), ("tokenizer.model",))
_OF_PROCESSOR = ("preprocessor_config.json", "processor_config.json")
# It reads bytes, without a vocabulary.
_OF_BYTES = "ByT5Tokenizer"
_HINT = "download the tokenizer's folder again with all its files, or copy the missing ones"


def check_headers(layout: CheckpointLayout) -> None:
    """Raise CheckpointError for files that are missing or damaged."""
    layout.tensors()
    for part in layout.components.values():
        refuse_unreadable(part)


def refuse_unreadable(component: Component) -> None:
    """Raise CheckpointError for a tokenizer, or a processor with one, that cannot read texts."""
    folder, name = component.folder, component.name
    if not name.startswith("tokenizer") and not component.class_name.endswith("Processor"):
        return
    if component.class_name.endswith(("ImageProcessor", "FeatureExtractor")):
        return
    for one in ("tokenizer.json", *_OF_PROCESSOR, *chain.from_iterable(_ENOUGH)):
        checkpoint.refuse_dead_link(folder / one)
    if name.endswith("processor") and not any((folder / one).is_file() for one in _OF_PROCESSOR):
        what = f"{name}/preprocessor_config.json is missing"
        raise checkpoint.fault("missing-file", what, folder, _HINT)
    for names in _ENOUGH:
        for one in names:
            if (folder / one).is_file():
                checkpoint.refuse_pointer(folder / one)
    if (folder / "tokenizer.json").is_file():
        read_tokenizer(folder)
    elif component.class_name != _OF_BYTES and not any(
        all((folder / one).is_file() for one in names) for names in _ENOUGH
    ):
        what = f"{name}/tokenizer.json is missing, so every text would be read as the same tokens"
        raise checkpoint.fault("tokenizer", what, folder, _HINT)


def count_beyond(folder: Path, text: str, most: int) -> int:
    """Return the number of a text's tokens if there are more than `most`, else 0.

    A template adds a few, so a text that is barely too long is found as it is encoded. Also 0 for a
    tokenizer in another form than `tokenizer.json`.
    """
    # A token has one byte or more.
    if len(text.encode()) <= most or not (folder / "tokenizer.json").is_file():
        return 0
    count = len(_tokenizer(folder).encode(text, add_special_tokens=False).ids)
    return count if count > most else 0


_tokenizer = lru_cache(maxsize=4)(read_tokenizer)
