"""The tokenizer and its control tokens, looked up by name; no torch."""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from hyimg_cli.errors import CheckpointError
from hyimg_cli.loading.checkpoint import read_json
from hyimg_cli.models.common.tokenizer import ControlTokenizer, read_tokenizer

_BASE_HINT = (
    'for a tokenizer of the base model, set "model_version": "HunyuanImage-3.0" in config.json'
)
RATIO_COUNT_BASE = 33
RATIO_COUNT_INSTRUCT = 37


class Vocabulary(ControlTokenizer):
    """Text to ids and back, and the ids of every control token.

    `base_size` names the `<img_size_*>` token; `ratio_count` is 33 for the base model, 37 for
    Instruct.
    """

    def __init__(self, tokenizer: Tokenizer, *, base_size: int, ratio_count: int) -> None:
        super().__init__(tokenizer)
        self.bos = self.id_of("<|startoftext|>")
        self.eos = self.id_of("<|endoftext|>")
        self.boi = self.id_of("<boi>")
        self.eoi = self.id_of("<eoi>")
        self.img = self.id_of("<img>")
        self.cfg = self.id_of("<cfg>")
        self.timestep = self.id_of("<timestep>")
        self.joint_img_sep = self.id_of("<joint_img_sep>")
        self.think = self.id_of("<think>")
        self.end_think = self.id_of("</think>")
        self.recaption = self.id_of("<recaption>")
        self.end_recaption = self.id_of("</recaption>")
        self.answer = self.id_of("<answer>")
        self.end_answer = self.id_of("</answer>")
        self.img_size = self.id_of(f"<img_size_{base_size}>")
        self.ratios = tuple(self.id_of(f"<img_ratio_{k}>", _BASE_HINT) for k in range(ratio_count))
        # Only the distilled checkpoints use these two; an older tokenizer may lack them.
        self.guidance = tokenizer.token_to_id("<guidance>")
        self.timestep_r = tokenizer.token_to_id("<timestep_r>")
        distilled = (self.guidance, self.timestep_r)
        self.control.update(id_ for id_ in distilled if id_ is not None)
        # Opening and closing tags of the reasoning, and of the description of the picture.
        self.pairs = ((self.think, self.end_think), (self.recaption, self.end_recaption))
        self.tags = frozenset(id_ for pair in self.pairs for id_ in pair)
        added = self.added.items()
        sizes = (id_ for id_, token in added if token.content.startswith("<img_size_"))
        # Tokens that only start a picture.
        self.openers = frozenset((self.answer, self.boi, self.img_size, *sizes, *self.ratios))

    @classmethod
    def from_folder(cls, folder: Path, *, base_size: int, ratio_count: int) -> "Vocabulary":
        """Read `tokenizer.json` and added tokens of `tokenizer_config.json` in `folder`.

        Raises CheckpointError if the first is missing, or either is damaged.
        """
        tokenizer = read_tokenizer(folder)
        _add_tokens(tokenizer, folder)
        return cls(tokenizer, base_size=base_size, ratio_count=ratio_count)


def _add_tokens(tokenizer: Tokenizer, folder: Path) -> None:
    """Add tokens found only in `tokenizer_config.json`, in id order, as transformers does.

    Raises CheckpointError if one would get another id.
    """
    path = folder / "tokenizer_config.json"
    table = read_json(path).get("added_tokens_decoder", {}) if path.exists() else {}
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    try:
        listed = sorted((int(id_), AddedToken(**entry)) for id_, entry in table.items())
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"added_tokens_decoder cannot be read: {error}",
            where=f"{folder.name}/tokenizer_config.json",
            code="checkpoint.tokenizer",
        ) from None
    for id_, token in listed:
        if token.content not in known:
            add = tokenizer.add_special_tokens if token.special else tokenizer.add_tokens
            add([token])
        found = tokenizer.token_to_id(token.content)
        if found != id_:
            raise CheckpointError(
                f"token {token.content} is {id_} in tokenizer_config.json, but {found} in "
                "tokenizer.json",
                where=folder,
                hint="use the files of one checkpoint together",
                code="checkpoint.tokenizer",
            )
