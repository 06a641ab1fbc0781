"""The dataset's card: a README.md in the Hub's form that describes how the rows were made."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hyimg_cli.export.columns import DEFAULT, FOLDERS, Kind, columns_of, pictures_in
from hyimg_cli.export.dataset import DatasetShard, Info
from hyimg_cli.export.formats import FORMATS
from hyimg_cli.spec.printed import printable

_TEMPLATE = Path(__file__).with_name("card.md")


def write_card(info: Info, shards: Sequence[DatasetShard]) -> str:
    """Return the card of a dataset, from its dataset.json; `shards`: whose columns it declares."""
    import jinja2
    import yaml

    configs = dict.fromkeys(shard.config for shard in shards)
    tasks = {row.columns["task"] for shard in shards for row in shard.rows}
    names = {
        "it2i": "image-to-image",
        "t2i": "text-to-image",
        "i2t": "visual-question-answering",
        "t2t": "text-generation",
    }
    front: Info = {
        "license": "unknown",
        "task_categories": sorted(names[task] for task in tasks & names.keys()),
        "tags": ["synthetic", "hyimg"],
    }
    # How `datasets` reads a folder's lines depends on which columns are empty.
    if info["format"] != "folder":
        front["configs"] = [_config(name, shards, info) for name in configs]
        front["dataset_info"] = [
            {"config_name": name, "features": _features(name, shards, info["format"])}
            for name in configs
        ]
    head = yaml.safe_dump(front, sort_keys=False, allow_unicode=True, width=1000)
    text = jinja2.Environment(
        undefined=jinja2.ChainableUndefined, finalize=lambda value: printable(str(value))
    ).from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return f"---\n{head}---\n\n{text.render(info, configs=configs)}"


def _config(name: str, shards: Iterable[DatasetShard], info: Info) -> Info:
    own = [shard for shard in shards if shard.config == name]
    ending = FORMATS[info["format"]]
    paths = [
        {"split": split, "path": f"{FOLDERS[name]}/{split}-*{ending}"}
        for split in dict.fromkeys(shard.rows[0].split for shard in own)
    ]
    return {"config_name": name, "data_files": paths} | (
        {"default": True} if name == DEFAULT else {}
    )


def _features(config: str, shards: Iterable[DatasetShard], form: str) -> list[Info]:
    """Return the columns as the `datasets` library finds them in a format."""
    every = [row for shard in shards for row in shard.rows]
    rows = [row for row in every if row.config == config]
    kinds = columns_of(config, [row.columns for row in every])
    if form != "webdataset":
        return [_feature(name, kind) for name, kind in kinds.items()]
    facts: dict[str, Any] = {n: k for n, k in kinds.items() if k not in ("image", ["image"])}
    members = {
        f"{name}.{file.suffix}" for row in rows for name, _, file in pictures_in(row.columns)
    }
    keys = [_feature(name, "string") for name in ("__key__", "__url__")]
    return [_feature("json", facts), *(_feature(one, "image") for one in sorted(members)), *keys]


def _feature(name: str, kind: Kind) -> Info:
    if isinstance(kind, list):
        return {"name": name, "sequence": kind[0]}
    if isinstance(kind, dict):
        return {"name": name, "struct": [_feature(*one) for one in kind.items()]}
    return {"name": name, "dtype": kind}
