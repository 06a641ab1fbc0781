"""Turn the list of an edit benchmark into a manifest, from where you have it.

    python recipes/benchmarks/lists.py gedit GEdit-Bench -o gedit/jobs.jsonl
    python recipes/benchmarks/lists.py imgedit basic_edit.json --images Benchmark/singleturn \
        -o imgedit/jobs.jsonl
    hyimg generate gedit/jobs.jsonl -o runs/gedit

GEdit-Bench is the folder of the data set (`stepfun-ai/GEdit-Bench`), with its arrow or parquet
files; it needs pyarrow (`pip install "hyimg-cli[export]"`). Its source pictures are written next to
the manifest. Ids are the paths that the official scripts read. `x_group` is the group over which
means are taken.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAGIC = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpg", b"RIFF": "webp"}
# `input_image` is the smaller copy that the official scripts show to the judge.
PICTURES = {"judged": "input_image", "raw": "input_image_raw"}
# Between May 27 and June 16, 2025 the list had another name for this group than the templates.
RENAMED = {"alter": "adjust"}


def main(words: list[str]) -> None:
    """Write the manifest and say how many edits each group has."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("benchmark", choices=["gedit", "imgedit"])
    parser.add_argument("path", type=Path, help="folder of GEdit-Bench, or basic_edit.json")
    parser.add_argument("-o", "--output", type=Path, required=True, help="manifest to write")
    parser.add_argument("--language", choices=["en", "cn", "all"], default="all")
    parser.add_argument("--picture", choices=[*PICTURES], default="judged", help="of GEdit-Bench")
    parser.add_argument("--images", type=Path, help="folder of ImgEdit's source pictures")
    given = parser.parse_args(words)
    given.output.parent.mkdir(parents=True, exist_ok=True)
    try:
        lines = [*(gedit if given.benchmark == "gedit" else imgedit)(given)]
    except (OSError, KeyError, ValueError) as error:
        sys.exit(f"error: {given.path} cannot be read: {type(error).__name__}: {error}")
    if not lines:
        sys.exit(f"error: {given.path} has no edit for --language {given.language}")
    names = Counter(line["custom_id"] for line in lines)
    if twice := [name for name, count in names.items() if count > 1]:
        sys.exit(f"error: {twice[0]} is listed twice")
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    given.output.write_text(text, encoding="utf-8")
    groups = Counter(line["x_group"] for line in lines)
    said = ", ".join(f"{name} {count}" for name, count in sorted(groups.items()))
    print(f"{given.output}: {len(lines)} edits of {len(sources(lines))} pictures: {said}")


def sources(lines: list[dict[str, Any]]) -> set[str]:
    return {path for line in lines for path in line["images"]}


def gedit(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a line for each edit and language; its picture is written as the data set has it."""
    folder = given.output.parent / "sources"
    folder.mkdir(exist_ok=True)
    for row in rows_in(given.path):
        language = row["instruction_language"]
        if given.language not in ("all", language):
            continue
        data = row[PICTURES[given.picture]]["bytes"]
        kind = next((kind for magic, kind in MAGIC.items() if data.startswith(magic)), None)
        if kind is None:
            raise ValueError(f"the picture of {row['key']} is neither PNG, JPEG nor WebP")
        # One file for both languages, because they edit one picture.
        path = folder / f"{row['key']}.{kind}"
        if not path.exists() or path.read_bytes() != data:
            path.write_bytes(data)
        yield {
            "custom_id": f"fullset/{row['task_type']}/{language}/{row['key']}",
            "prompt": row["instruction"],
            "images": [f"sources/{path.name}"],
            "x_group": row["task_type"],
            "x_language": language,
            "x_key": row["key"],
            "x_intersection": bool(row["Intersection_exist"]),
        }


def rows_in(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a data set's files: arrow streams, arrow files or parquet."""
    import pyarrow as pa
    from pyarrow import parquet

    files = sorted([*path.rglob("*.arrow"), *path.rglob("*.parquet")])
    if not files:
        raise OSError("it has no .arrow and no .parquet file")
    # `datasets` keeps copies of filtered sets in files of this name.
    for file in (file for file in files if not file.name.startswith("cache-")):
        if file.suffix == ".parquet":
            yield from parquet.read_table(file).to_pylist()
            continue
        with pa.memory_map(str(file)) as data:
            is_file = data.read(6) == b"ARROW1"
            data.seek(0)
            open_it = pa.ipc.open_file if is_file else pa.ipc.open_stream
            for batch in open_it(data).read_all().to_batches(max_chunksize=8):
                yield from batch.to_pylist()


def imgedit(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a line for each edit of basic_edit.json."""
    if given.images is None:
        sys.exit("error: --images FOLDER: where the source pictures of ImgEdit are")
    entries, missing = json.loads(given.path.read_text(encoding="utf-8")), []
    for key, entry in entries.items():
        picture = (given.images / entry["id"]).absolute()
        missing += [] if picture.is_file() else [entry["id"]]
        group = RENAMED.get(entry["edit_type"], entry["edit_type"])
        yield {
            "custom_id": key,
            "prompt": entry["prompt"],
            "images": [str(picture)],
            "x_group": group,
            "x_language": "en",
            "x_key": key,
        }
    if missing:
        print(f"warning: {len(missing)} pictures not found, such as {missing[0]}", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
