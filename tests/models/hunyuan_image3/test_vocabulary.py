"""Tokens that are only in tokenizer_config.json, as transformers reads them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from hyimg_cli.errors import CheckpointError
from hyimg_cli.models.hunyuan_image3.vocabulary import Vocabulary

CHECKPOINT = Path(__file__).parents[2] / "parity" / "tiny" / "checkpoint"
TEXT = "a cat <think> on <boi>a chair</think>\n<img_ratio_3>"


@pytest.fixture
def moved(tmp_path: Path) -> Path:
    """The tokenizer's files with every added token moved from the one to the other."""
    table = json.loads((CHECKPOINT / "tokenizer.json").read_text())
    added = {str(token.pop("id")): token for token in table["added_tokens"]}
    table["added_tokens"] = []
    (tmp_path / "tokenizer.json").write_text(json.dumps(table))
    shutil.copy(CHECKPOINT / "tokenizer_config.json", tmp_path)
    _rewrite(tmp_path, added_tokens_decoder=added)
    return tmp_path


def _rewrite(folder: Path, **changes: Any) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _words(folder: Path) -> Vocabulary:
    return Vocabulary.from_folder(folder, base_size=256, ratio_count=37)


def test_added_tokens_may_stand_beside_the_tokenizer(moved: Path) -> None:
    words, whole = _words(moved), _words(CHECKPOINT)
    theirs = PreTrainedTokenizerFast.from_pretrained(moved)
    assert words.encode(TEXT) == theirs.encode(TEXT, add_special_tokens=False)
    assert words.encode(TEXT) == whole.encode(TEXT)
    assert (words.control, words.ratios) == (whole.control, whole.ratios)


def test_a_token_that_would_get_another_id_is_refused(moved: Path) -> None:
    path = moved / "tokenizer_config.json"
    added = json.loads(path.read_text())["added_tokens_decoder"]
    first = min(added, key=int)
    _rewrite(moved, added_tokens_decoder={k: v for k, v in added.items() if k != first})
    with pytest.raises(CheckpointError, match=r"is 317 in tokenizer_config.json, but 316 in"):
        _words(moved)


@pytest.mark.parametrize("table", [[], {"x": {}}, {"5": {"content": 1}}, {"5": 1}, None])
def test_a_broken_table_is_a_fault_of_the_checkpoint(moved: Path, table: Any) -> None:
    _rewrite(moved, added_tokens_decoder=table)
    with pytest.raises(CheckpointError, match="tokenizer"):
        _words(moved)
