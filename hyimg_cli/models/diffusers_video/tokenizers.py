"""Whether a checkpoint's tokenizers read texts; no torch.

transformers makes an empty tokenizer of a folder without the files of one. It reads every text as
the same tokens, so every prompt would give the same picture.
"""

from pathlib import Path

from tokenizers import Tokenizer

from hyimg_cli.files import TABLE_BYTES, text_of
from hyimg_cli.loading import checkpoint
from hyimg_cli.models.diffusers_video.layout import Component

# Sets of files, each enough for a tokenizer.
_ENOUGH = (("vocab.json", "merges.txt"), ("spiece.model",), ("tokenizer.model",))
# It reads bytes, without a vocabulary.
_OF_BYTES = "ByT5Tokenizer"
_HINT = "download the tokenizer's folder again with all its files, or copy the missing ones"
# Texts that every vocabulary tells apart.
_WORDS = ("a red circle", "two blue birds")


def refuse_unreadable(component: Component) -> None:
    """Raise CheckpointError for a tokenizer, or a processor with one, that cannot read texts."""
    folder, name = component.folder, component.name
    if not name.startswith("tokenizer") and not component.class_name.endswith("Processor"):
        return
    if component.class_name.endswith(("ImageProcessor", "FeatureExtractor")):
        return
    if name.endswith("processor") and not any(
        (folder / one).is_file() for one in ("preprocessor_config.json", "processor_config.json")
    ):
        what = f"{name}/preprocessor_config.json is missing"
        raise checkpoint.fault("missing-file", what, folder, _HINT)
    for names in (("tokenizer.json",), *_ENOUGH):
        for one in names:
            if (folder / one).is_file():
                checkpoint.refuse_pointer(folder / one)
    own = folder / "tokenizer.json"
    if own.is_file():
        _refuse_empty(own, name)
    elif component.class_name != _OF_BYTES and not any(
        all((folder / one).is_file() for one in names) for names in _ENOUGH
    ):
        what = f"{name}/tokenizer.json is missing, so every text would be read as the same tokens"
        raise checkpoint.fault("tokenizer", what, folder, _HINT)


def _refuse_empty(path: Path, name: str) -> None:
    with checkpoint.readable(path):
        data = text_of(path, TABLE_BYTES)
    try:
        tokenizer = Tokenizer.from_str(data)
        read = [tokenizer.encode(text, add_special_tokens=False).ids for text in _WORDS]
    except Exception as error:  # the library raises bare exceptions
        said = " ".join(str(error).split())[:120]
        what = f"{name}/{path.name} cannot be read: {said}"
        raise checkpoint.fault("tokenizer", what, path, _HINT) from None
    if read[0] == read[1]:
        what = f"{name}/{path.name} reads different texts as the same tokens"
        raise checkpoint.fault("tokenizer", what, path, _HINT)
