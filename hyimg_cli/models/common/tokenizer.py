"""Encode texts as ids and back, with control tokens that texts must not contain; no torch."""

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from hyimg_cli.cache.memo import Memo
from hyimg_cli.errors import CheckpointError, JobError
from hyimg_cli.files import TABLE_BYTES, bytes_of
from hyimg_cli.loading.checkpoint import fault, refuse_pointer

# Ids of recently encoded sections: system prompts, role strings, users' prompts.
_TOKEN_BYTES = 64_000_000
# Texts that every vocabulary tells apart.
_WORDS = ("a red circle", "two blue birds")


class ControlTokenizer:
    """A checkpoint's tokenizer.

    `control`: ids of tokens that the file marks as special, and of tokens that were looked up by
    name. They give a sequence its structure.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # One object per id, in however many sequences.
        self._ids: dict[int, int] = {}
        self._encoded: Memo[str, tuple[int, ...]] = Memo(
            _TOKEN_BYTES, lambda ids: 256 + 8 * len(ids)
        )
        self.added = tokenizer.get_added_tokens_decoder()
        self.control = {id_ for id_, token in self.added.items() if token.special}

    def encode(self, text: str) -> list[int]:
        """Return the ids of one section of text, recognising control tokens spelled out in it."""

        def made() -> tuple[int, ...]:
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
            return tuple([self._ids.setdefault(id_, id_) for id_ in ids])

        return list(self._encoded.get(text, made))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, with control tokens spelled out."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def memo_counts(self) -> dict[str, int]:
        """Count how often a section's ids were cached, and how often they were made."""
        return self._encoded.counts()

    def name(self, id_: int) -> str:
        """Return the spelling of a single token."""
        return str(self._tokenizer.id_to_token(id_))

    def id_of(self, token: str, hint: str = "use the files of one checkpoint together") -> int:
        """Return a control token's id. Raises CheckpointError if the tokenizer does not have it."""
        id_ = self._tokenizer.token_to_id(token)
        if id_ is None:
            raise CheckpointError(
                f"the tokenizer has no token {token}",
                where="tokenizer.json",
                hint=hint,
                code="checkpoint.tokenizer",
            )
        self.control.add(id_)
        return int(id_)

    def refuse_beyond(self, rows: int, where: Path) -> None:
        """Raise CheckpointError for a token without a row in the network's table of `rows`."""
        refuse_beyond(rows, self._tokenizer.get_vocab().values(), where)

    def refuse_control(
        self, field: str, ids: Iterable[int], *, allowed: Collection[int] = ()
    ) -> None:
        """Raise JobError if a job's text has control tokens that are not `allowed`."""
        found = {self.name(id_) for id_ in ids if id_ in self.control and id_ not in allowed}
        if found:
            raise JobError(
                f"{field} contains the model's control token {min(found)}",
                where=field,
                hint="remove it: control tokens would change the structure of the sequence",
                code="job.control-token",
            )


def refuse_beyond(rows: int, ids: Iterable[int], where: Path, network: str = "network") -> None:
    """Raise CheckpointError for a token's id without a row in a network's table of `rows`."""
    if (last := max(ids, default=0)) >= rows:
        what = f"the tokenizer has a token {last}, and the {network} only {rows} rows"
        raise fault("tokenizer", what, where, "use the files of one checkpoint together")


def read_tokenizer(folder: Path) -> Tokenizer:
    """Read `folder/tokenizer.json`.

    Raises CheckpointError if it is missing or damaged, or reads different texts as the same tokens:
    then every prompt would give the same picture.
    """
    path = folder / "tokenizer.json"
    try:
        if path.is_file():
            refuse_pointer(path)
        tokenizer = Tokenizer.from_buffer(bytes_of(path, TABLE_BYTES))
        # A file may contain truncation and padding from its training; transformers turns them off
        # too.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        read = [tokenizer.encode(text, add_special_tokens=False).ids for text in _WORDS]
    except FileNotFoundError:
        hint = "download it from the source of the checkpoint"
        raise fault("missing-file", "tokenizer.json is missing", folder, hint) from None
    except CheckpointError:
        raise
    except Exception as error:  # the library raises bare Exception
        said = " ".join(str(error).split())[:120]
        raise fault("tokenizer", f"tokenizer.json cannot be read: {said}", folder) from None
    if read[0] == read[1]:
        what = "tokenizer.json reads different texts as the same tokens"
        raise fault("tokenizer", what, folder)
    return tokenizer


def refuse_unknown_ids(ids: Iterable[int], vocab_size: int) -> None:
    """Raise JobError for ids that the model does not have.

    `cot_token_ids` may contain any other id: a result line can hold whatever was sampled.
    """
    unknown = [id_ for id_ in ids if not 0 <= id_ < vocab_size]
    if unknown:
        raise JobError(
            f"the model has no token {unknown[0]}",
            where="cot_token_ids",
            hint=f"use tokens from 0 to {vocab_size - 1}",
            code="job.unknown-token",
        )
