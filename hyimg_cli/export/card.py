"""The dataset's card: a README.md as the Hub reads it, which says how the rows came about."""

from collections.abc import Iterable, Sequence
from typing import Any

from hyimg_cli.export.columns import DEFAULT, FOLDERS, Kind, columns_of
from hyimg_cli.export.dataset import Info, Shard
from hyimg_cli.export.formats import FORMATS
from hyimg_cli.spec.printed import printable

_COLUMNS = {
    "id": "the job's custom_id",
    "candidate_of": "the manifest line that asked for several candidates; null for a single result",
    "source": "source pictures, in order, byte for byte as the model was given them",
    "instruction": "the prompt",
    "result": "the picture, byte for byte as it was written, with its metadata",
    "mask": "where an edit changed its source, for edits that kept the rest",
    "text": "what the model wrote before the picture",
    "scores": "values by scorer",
    "accepted, reasons, rank": "what the rule decided, and why",
    "source_sha256, pixel_sha256, model_sha256": "digests of source files, of the result's pixels "
    "and of the checkpoint",
    "licences": "of the checkpoint, and of the source pictures",
    "record": "the resolved job and what its result line notes, as JSON",
    "row_sha256": "digest of the row",
}


def write_card(info: Info, shards: Sequence[Shard]) -> str:
    """The card of a dataset by its dataset.json; `shards`: whose columns it declares."""
    import yaml

    configs = dict.fromkeys(shard.rows[0].config for shard in shards)
    tasks = {row.columns["task"] for shard in shards for row in shard.rows}
    names = {"it2i": "image-to-image", "t2i": "text-to-image"}
    front: Info = {
        "license": "unknown",
        "task_categories": sorted(names[task] for task in tasks),
        "tags": ["synthetic", "hyimg"],
    }
    # What `datasets` makes of a folder's lines depends on which of their columns are empty.
    if info["format"] != "folder":
        front["configs"] = [_config(name, shards, info) for name in configs]
        front["dataset_info"] = [
            {"config_name": name, "features": _features(name, shards, info["format"])}
            for name in configs
        ]
    head = yaml.safe_dump(front, sort_keys=False, allow_unicode=True, width=1000)
    return f"---\n{head}---\n\n" + "".join(f"{printable(line)}\n" for line in _text(info))


def _config(name: str, shards: Iterable[Shard], info: Info) -> Info:
    own = [shard for shard in shards if shard.rows[0].config == name]
    ending = FORMATS[info["format"]].suffix
    paths = [
        {"split": split, "path": f"{FOLDERS[name]}/{split}-*{ending}"}
        for split in dict.fromkeys(shard.rows[0].split for shard in own)
    ]
    return {"config_name": name, "data_files": paths} | (
        {"default": True} if name == DEFAULT else {}
    )


def _features(config: str, shards: Iterable[Shard], form: str) -> list[Info]:
    """The columns as the `datasets` library finds them in a format."""
    rows = [row for shard in shards for row in shard.rows if row.config == config]
    kinds = columns_of(config, {name for row in rows for name in row.columns["scores"]})
    if form != "webdataset":
        return [_feature(name, kind) for name, kind in kinds.items()]
    facts: dict[str, Any] = {n: k for n, k in kinds.items() if k not in ("image", ["image"])}
    members = {
        f"{column}{index if isinstance(kinds[column], list) else ''}.{file.suffix}"
        for row in rows
        for column, files in row.files.items()
        for index, file in enumerate(files)
    }
    keys = [_feature(name, "string") for name in ("__key__", "__url__")]
    return [_feature("json", facts), *(_feature(one, "image") for one in sorted(members)), *keys]


def _feature(name: str, kind: Kind) -> Info:
    if isinstance(kind, list):
        return {"name": name, "sequence": kind[0]}
    if isinstance(kind, dict):
        return {"name": name, "struct": [_feature(*one) for one in kind.items()]}
    return {"name": name, "dtype": kind}


def _text(info: Info) -> Iterable[str]:
    licences = info["licences"]
    yield from ("# Pictures made by hyimg", "")
    yield "Made by models: every picture's own metadata says so, and how it was made."
    yield from ("", "| rows | |", "|---|--:|")
    yield from (f"| {name} | {count} |" for name, count in info["counts"].items())
    yield from (
        "",
        f"Dataset hash: `{info['dataset_sha256']}`. Check it: `hyimg export --verify .`",
    )
    yield from ("", "## Licences", "")
    yield from (f"- model `{name}`: {word}" for name, word in licences["models"].items())
    for word, why in licences["allowed"].items():
        yield f"- **allowed by `--allow-licence {word}`**, since otherwise refused: {why}"
    yield from (f"- {count} rows with sources: {w}" for w, count in licences["sources"].items())
    yield "- of this dataset: not chosen by hyimg; `license:` above is for you to fill in"
    yield from ("", "This is no legal advice.", "", "## How rows were chosen", "")
    if not info["rules"]:
        yield "Every finished picture was accepted; none was scored."
    for rule in info["rules"]:
        limits = [
            f"{k} of {name}: {v}" for k in ("min", "max") for name, v in (rule.get(k) or {}).items()
        ]
        yield f"- {', '.join(limits)}; keep {rule.get('keep')} of each line"
    for name, scorer in info["scorers"].items():
        facts = ", ".join(f"{k} {v}" for k, v in scorer.items() if v not in (None, "", []))
        yield f"- scorer `{name}`: {facts}"
    if info["rules"]:
        yield from ("", "Accepted means higher by these scorers, not better.")
    yield from (f"- rejected, {why}: {count}" for why, count in info["rejected"].items())
    yield from ("", "## Columns", "")
    yield from (f"- `{names}`: {what}" for names, what in _COLUMNS.items())
