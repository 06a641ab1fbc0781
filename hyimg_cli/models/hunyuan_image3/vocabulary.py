"""The tokenizer and its control tokens, looked up by name; no torch."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from hyimg_cli.cache.memo import Memo
from hyimg_cli.errors import CheckpointError
from hyimg_cli.files import TABLE_BYTES, bytes_of
from hyimg_cli.loading.checkpoint import read_json

# Ids of the sections that were encoded last: system prompts, role strings, users' prompts.
_TOKEN_BYTES = 64_000_000

_BASE_HINT = (
    'it knows the base model\'s alone, whose config.json says "model_version": "HunyuanImage-3.0"'
)
RATIO_COUNT_BASE = 33
RATIO_COUNT_INSTRUCT = 37


class Vocabulary:
    """Text to ids and back, and the ids of every control token.

    `base_size` names the `<img_size_*>` token; `ratio_count` is 33 for the base model, 37 for
    Instruct.
    """

    def __init__(self, tokenizer: Tokenizer, *, base_size: int, ratio_count: int) -> None:
        self._tokenizer = tokenizer
        # A tokenizer.json may hold both from how it was made; transformers turns them off as well.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        # One object an id, however many sequences have it.
        self._ids: dict[int, int] = {}
        self._encoded: Memo[str, tuple[int, ...]] = Memo(
            _TOKEN_BYTES, lambda ids: 256 + 8 * len(ids)
        )
        self.bos = self._id("<|startoftext|>")
        self.eos = self._id("<|endoftext|>")
        self.boi = self._id("<boi>")
        self.eoi = self._id("<eoi>")
        self.img = self._id("<img>")
        self.cfg = self._id("<cfg>")
        self.timestep = self._id("<timestep>")
        self.joint_img_sep = self._id("<joint_img_sep>")
        self.think = self._id("<think>")
        self.end_think = self._id("</think>")
        self.recaption = self._id("<recaption>")
        self.end_recaption = self._id("</recaption>")
        self.answer = self._id("<answer>")
        self.end_answer = self._id("</answer>")
        self.img_size = self._id(f"<img_size_{base_size}>")
        self.ratios = tuple(self._id(f"<img_ratio_{k}>") for k in range(ratio_count))
        # Only the distilled checkpoints use these two; an older tokenizer may lack them.
        self.guidance = tokenizer.token_to_id("<guidance>")
        self.timestep_r = tokenizer.token_to_id("<timestep_r>")
        self.tags = frozenset((self.think, self.end_think, self.recaption, self.end_recaption))
        added = tokenizer.get_added_tokens_decoder().items()
        self.control = self._own() | {id_ for id_, token in added if token.special}
        sizes = (id_ for id_, token in added if token.content.startswith("<img_size_"))
        # What stands before a picture alone.
        self.openers = frozenset((self.answer, self.boi, self.img_size, *sizes, *self.ratios))

    @classmethod
    def from_folder(cls, folder: Path, *, base_size: int, ratio_count: int) -> "Vocabulary":
        """Read `folder/tokenizer.json`, and what `tokenizer_config.json` adds to it. Raises
        CheckpointError where the one is missing, or either is broken.
        """
        path = folder / "tokenizer.json"
        if not path.exists():
            raise CheckpointError(
                "tokenizer.json is missing",
                where=folder,
                hint="download it again from where the checkpoint is from",
                code="checkpoint.missing-file",
            )
        try:
            tokenizer = Tokenizer.from_buffer(bytes_of(path, TABLE_BYTES))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(
                f"tokenizer.json cannot be read: {error}",
                where=folder,
                code="checkpoint.tokenizer",
            ) from None
        _add_tokens(tokenizer, folder)
        return cls(tokenizer, base_size=base_size, ratio_count=ratio_count)

    def encode(self, text: str) -> list[int]:
        """Ids of one section of text; control tokens spelled out in it are recognised."""

        def made() -> tuple[int, ...]:
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
            return tuple([self._ids.setdefault(id_, id_) for id_ in ids])

        return list(self._encoded.get(text, made))

    def memo_counts(self) -> dict[str, int]:
        """Count how often a section's ids were there, and how often they were made."""
        return self._encoded.counts()

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, control tokens spelled out."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def name(self, id_: int) -> str:
        """How a single token is written."""
        return str(self._tokenizer.id_to_token(id_))

    def control_in(self, ids: Iterable[int], *, allowed: Iterable[int] = ()) -> list[str]:
        """Names of control tokens among `ids` that are not `allowed`."""
        permitted = frozenset(allowed)
        return sorted({self.name(i) for i in ids if i in self.control and i not in permitted})

    def _own(self) -> frozenset[int]:
        """The ids that give a sequence its structure, whether the file marks them or not."""
        images = (self.boi, self.eoi, self.img, self.timestep, self.joint_img_sep, self.img_size)
        texts = (self.bos, self.eos, self.cfg, self.answer, self.end_answer)
        distilled = (id_ for id_ in (self.guidance, self.timestep_r) if id_ is not None)
        return frozenset((*images, *texts, *distilled, *self.tags, *self.ratios))

    def _id(self, token: str) -> int:
        id_ = self._tokenizer.token_to_id(token)
        if id_ is None:
            is_ratio = token.startswith("<img_ratio_")
            raise CheckpointError(
                f"the tokenizer has no token {token}",
                where="tokenizer.json",
                hint=_BASE_HINT if is_ratio else "use the files of one checkpoint together",
                code="checkpoint.tokenizer",
            )
        return int(id_)


def _add_tokens(tokenizer: Tokenizer, folder: Path) -> None:
    """Add the tokens that stand in `tokenizer_config.json` alone, in order of their ids, as
    transformers does. Raises CheckpointError where one would get another id than it has there.
    """
    path = folder / "tokenizer_config.json"
    table = read_json(path).get("added_tokens_decoder", {}) if path.exists() else {}
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    try:
        listed = sorted((int(id_), AddedToken(**entry)) for id_, entry in table.items())
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"added_tokens_decoder is of the wrong kind: {error}",
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
                f"token {token.content} is {id_} in tokenizer_config.json, and {found} behind "
                "tokenizer.json",
                where=folder,
                hint="use the files of one checkpoint together",
                code="checkpoint.tokenizer",
            )
