"""Files of strangers by chance: none may end in a traceback, hang, or reach the terminal raw.

    python tests/fuzz.py --lines 100000 --others 60 --seed 1

Each case is a command line run in this process on files that were made for it. What went wrong is
printed with the seed that makes it again.
"""

import argparse
import contextlib
import io
import json
import os
import random
import re
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from PIL import Image, PngImagePlugin
from special import within

from hyimg_cli.cli import app, replay
from hyimg_cli.errors import UsageError
from hyimg_cli.models import registry

LIMIT_S = 60
# The first check of each kind of file: that it has its format at all.
UNREADABLE = {
    *("manifest.bad-json", "manifest.not-utf8", "manifest.bad-csv", "manifest.no-pictures"),
    *("checkpoint.json", "checkpoint.header", "checkpoint.truncated", "checkpoint.missing-file"),
    *("output.damaged-journal", "output.damaged-manifest", "recipe.not-toml", "source.truncated"),
    *("metadata.none", "metadata.not-ours", "metadata.damaged"),
}
# Whether what the checkpoints of a case can still do is done.
DRAWS = False
EVIL = "a\nerror[x]: y\x1b]0;t\x07\x9b2J\u202e\u2028\x85"
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 0.5, -0.0, 1e308, 10**12, 10**30, 10**400, 2**63),
    *("", " ", "\0", "x" * 300, "x" * 5000, EVIL, "\ud800", "[red]:cat:", "٣", "1", "NaN", "é"),
    *("../../etc/passwd", "/etc/passwd", "~nouser/x", "~", ".", "..", "a/b", "s3://b/c", "a\\b"),
    *("HTTP://x/y.png", "file:///x.png", "data:,", "{stem}-{seed}", "{", "auto", "16:9", "64x64"),
    *([], [[]], [None], [EVIL], ["a"] * 50, {}, {"a": 1}, {"": {}}, [1, "a", None], {"path": "/"}),
)
BYTES = (
    *(b"\0", b"\xff", b"\x1b[2J", b"\xe2\x80\xae", b"\xc2\x9b", b'"', b"\r"),
    *(b"{" * 300, b"[" * 3000),
)
LINES: tuple[dict[str, Any], ...] = (
    {"custom_id": "a", "prompt": "a red circle", "seed": 1, "size": "64x64"},
    {"custom_id": "b", "task": "it2i", "prompt": "make it blue", "images": ["in.png"], "n": 2},
    {"custom_id": "c", "task": "t2v", "prompt": "a dog", "num_frames": 5, "fps": 8},
    {"prompt": "x", "cot_text": "<think>a</think>", "ratio_index": 16, "metadata": {"a": [1]}},
    {"prompt": "x", "matrix": {"seed": [1, 2], "guidance_scale": [1, 2.5]}, "model": "tiny-image"},
    {"custom_id": "d", "method": "POST", "url": "/v1/images/edits", "body": {"prompt": "x"}},
    {"prompt": "x", "bot_task": "recaption", "temperature": 1, "top_k": 5, "ar_seed": 3, "x_a": 1},
    {"prompt": "x", "name": "{custom_id}-{seed}", "format": "jpeg", "quality": 90},
)
RESULT: dict[str, Any] = {
    "custom_id": "a", "status": "done", "key": "k", "attempt": 1, "denoise_steps": 2,
    "outputs": [{"path": "outputs/a.png", "sha256": "0" * 64, "pixel_sha256": "1" * 64,
                 "width": 64, "height": 64, "seed": 1}],
    "cot_text": "<think>a</think>", "cot_token_ids": [1, 2], "timings_s": {"total": 1.5},
    "share_s": {"total": 1.0}, "kv_reuse": {"status": "hit", "branches": [{"reused": 1}]},
    "cache": {"a": {"hits": 1}}, "batch": {"think": 1}, "warnings": ["w"], "metadata": None,
    "error": {"code": "c", "message": "m", "hint": "h", "retryable": False},
    "parallel": {"branch_ranks": 1, "decode": {"ranks": [{"rank": 0}], "total_s": 1.0}},
}  # fmt: skip
RUN = {
    "versions": {"python": "3"}, "hardware": {"cpu": "c", "cores": 2, "gpus": ["g"]},
    "flags": {"seed": {"value": 1, "origin": "flag"}}, "models": {"tiny-image": "f"},
    "manifest": {"name": "jobs.jsonl", "digest": "d"},
}  # fmt: skip
RECORD: dict[str, Any] = {
    "format": 2, "version": "1.0", "model_fingerprint": "f", "size": "64x64", "bot_task": "none",
    "job": {"custom_id": "a", "task": "it2i", "prompt": "x", "images": ["in.png"], "seed": 1,
            "model": "tiny-image", "size": "64x64", "num_inference_steps": 1},
    "settings": {"device": "cpu", "dtype": "float32"}, "packages": {"torch": "2"},
    "source_sha256": ["0" * 64], "pixel_sha256": "1" * 64, "cot_text": None,
}  # fmt: skip
RECIPE = """
[sampling]
seed = 1
size = "64x64"
num_inference_steps = 2
[model]
model = "tiny-image"
device = "cpu"
allow_model = ["a/b"]
[output]
format = "jpeg"
name = "{custom_id}"
output_dir = "out"
[batch]
batching_max_size = 4
"""
CSV = 'custom_id,prompt,images,seed,x_note\na,"a ""red"" circle",in.png,1,n\nb,"two\nlines",,2,\n'


def changed(value: Any, r: random.Random) -> Any:
    """A JSON value in which one place, at any depth, is another."""
    if isinstance(value, dict) and value and r.random() < 0.9:
        name = r.choice(list(value))
        match r.randrange(8):
            case 0:
                return {k: v for k, v in value.items() if k != name}
            case 1:
                return value | {r.choice([EVIL, "sed", "", "x_a", "k" * 300, "é", "strength"]): 1}
            case _:
                return value | {name: changed(value[name], r)}
    if isinstance(value, list) and value and r.random() < 0.6:
        place = r.randrange(len(value))
        return [*value[:place], changed(value[place], r), *value[place + 1 :]]
    if isinstance(value, int | float) and abs(value) < 1e20 and r.random() < 0.3:
        return value * r.choice([-1, 1000, 10**9, 1e40, 0])
    return r.choice(ODD)


def mangled(data: bytes, r: random.Random) -> bytes:
    """Bytes with one stretch cut, doubled, or replaced."""
    if not data:
        return data
    start = r.randrange(len(data))
    end = min(len(data), start + r.choice([1, 1, 2, 8, 100, len(data)]))
    match r.randrange(5):
        case 0:
            return data[:start]
        case 1:
            return data[:start] + data[end:]
        case 2:
            return data[:end] + data[start:]
        case 3:
            return data[:start] + r.randbytes(end - start) + data[end:]
    return data[:start] + r.choice(BYTES) + data[end:]


def as_text(value: Any, r: random.Random) -> bytes:
    """JSON, mostly: now and then with bytes that are none."""
    data = json.dumps(value, ensure_ascii=r.random() < 0.3).encode("utf-8", "backslashreplace")
    return mangled(data, r) if r.random() < 0.2 else data


def a_line(r: random.Random) -> bytes:
    value: Any = r.choice(LINES)
    for _ in range(r.choice([0, 1, 1, 2, 5])):
        value = changed(value, r)
    return as_text(value, r).replace(b"\n", b" ")


def manifests(r: random.Random, home: Path) -> Iterator[list[str]]:
    """Of a hundred lines each."""
    (home / "jobs.jsonl").write_bytes(b"\n".join(a_line(r) for _ in range(100)))
    yield ["check", "jobs.jsonl", *r.choice([[], ["--json"], ["-v"], ["--allow-model", "a"]])]


def sources(r: random.Random, home: Path) -> Iterator[list[str]]:
    made = io.BytesIO()
    picture = Image.new(r.choice(["RGB", "RGBA", "P", "L", "I;16", "1"]), (40, 30))
    picture.save(made, r.choice(["PNG", "TIFF"]))
    data = made.getvalue()
    for _ in range(r.randrange(4)):
        data = mangled(data, r)
    name = r.choice(["in.png", f"{EVIL}.png", "in.gif", "\udcff.png", "in.webp", "in"])
    (home / name).write_bytes(data)
    (home / "jobs.jsonl").write_bytes(as_text({"prompt": "x", "images": [name]}, r))
    yield ["check", "jobs.jsonl"]
    yield ["plan", name, "--prompt", "x"]
    yield ["info", name, "--json"]
    yield ["eval", "psnr", name, name]


def checkpoints(r: random.Random, home: Path) -> Iterator[list[str]]:
    kind = r.choice(["tiny-image", "tiny-image", "tiny-video"])
    source = registry.resolve_model(kind)
    files = [path.relative_to(source) for path in sorted(source.rglob("*")) if path.is_file()]
    for file in files:
        (home / "model" / file).parent.mkdir(parents=True, exist_ok=True)
        (home / "model" / file).symlink_to(source / file)
    config = [file for file in files if file.name.endswith("config.json")]
    chosen = home / "model" / r.choice([*files, *config, *config])
    data = chosen.read_bytes()
    chosen.unlink()
    if chosen.suffix == ".json" and chosen.name != "tokenizer.json" and r.random() < 0.8:
        chosen.write_bytes(json.dumps(changed(json.loads(data), r)).encode())
    elif chosen.suffix == ".safetensors" and r.random() < 0.7:
        length = int.from_bytes(data[:8], "little")
        header = json.dumps(changed(json.loads(data[8 : 8 + length]), r)).encode()
        chosen.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
    elif r.random() < 0.9:
        chosen.write_bytes(mangled(data, r))
    flag = "--model" if kind == "tiny-image" else "--video-model"
    line = {"prompt": "x", "size": "1:1"} if kind == "tiny-image" else LINES[2]
    (home / "jobs.jsonl").write_text(json.dumps(line | {"num_inference_steps": 1}))
    # By a name of its own: what was read once is not read again.
    model = str(home / "model")
    yield ["check", "jobs.jsonl", flag, model]
    yield ["plan", "jobs.jsonl", flag, model]
    if DRAWS:
        yield ["generate", "jobs.jsonl", flag, model, "--device", "cpu", "--no-prewarm"]


def records(r: random.Random, home: Path) -> Iterator[list[str]]:
    record: Any = RECORD
    for _ in range(r.randrange(4)):
        record = changed(record, r)
    text = as_text(record, r).decode("latin-1")
    Image.new("RGB", (40, 30)).save(home / "in.png")
    chunks = PngImagePlugin.PngInfo()
    chunks.add_itxt("hyimg", text)
    chunks.add_itxt("parameters", r.choice(["x", EVIL, "x\nSteps: 1"]))
    name = r.choice(["a.png", f"{EVIL}.png"])
    Image.new("RGB", (64, 64)).save(home / name, pnginfo=chunks)
    (home / "film.json").write_bytes(as_text(record, r))
    for file in (name, "film.json"):
        yield ["info", file]
        yield ["info", file, "--json"]
        yield ["replay", file, *r.choice([[], ["--allow-changed"]])]


def journals(r: random.Random, home: Path) -> Iterator[list[str]]:
    out = home / "out"
    (out / "outputs").mkdir(parents=True)
    Image.new("RGB", (64, 64)).save(out / "outputs" / "a.png")
    results, resolved, run = RESULT, dict(LINES[1]), RUN
    chosen = r.choice(["results", "results", "results", "resolved", "run"])
    for _ in range(r.randrange(1, 4)):
        results = changed(results, r) if chosen == "results" else results
        resolved = changed(resolved, r) if chosen == "resolved" else resolved
        run = changed(run, r) if chosen == "run" else run
    lines = [as_text(one, r) for one in (RESULT, results, RESULT | {"custom_id": "b"})]
    (out / "results.jsonl").write_bytes(b"\n".join(lines) + r.choice([b"", b"\n"]))
    (out / "manifest.resolved.jsonl").write_bytes(as_text(resolved, r))
    (out / "run.json").write_bytes(as_text(run, r))
    (home / "jobs.jsonl").write_text(json.dumps(LINES[0]))
    yield ["plan", "jobs.jsonl", "-o", "out", *r.choice([[], ["--force"], ["--retry-failed"]])]
    yield ["check", "jobs.jsonl", "-o", "out"]
    yield ["report", "out", *r.choice([[], ["--single-file"]])]
    yield ["eval", "psnr", "out", "out", "--json"]


def settings(r: random.Random, home: Path) -> Iterator[list[str]]:
    text = RECIPE
    if r.random() < 0.7:
        old = r.choice(["1", '"64x64"', "2", '"cpu"', '["a/b"]', '"jpeg"', '"out"', "4", "[model]"])
        odd = r.choice(ODD)
        text = text.replace(old, str(odd) if r.random() < 0.3 else json.dumps(odd), 1)
    data = text.encode("utf-8", "backslashreplace")
    data = mangled(data, r) if r.random() < 0.5 else data
    (home / "jobs.jsonl").write_text(json.dumps(LINES[0]))
    (home / "recipe.toml").write_bytes(data)
    yield ["check", "jobs.jsonl", "--recipe", "recipe.toml"]
    (home / "hyimg.toml").write_bytes(data.replace(b"output_dir", b"#").replace(b"\nmodel", b"\n#"))
    yield ["plan", "jobs.jsonl"]


def tables(r: random.Random, home: Path) -> Iterator[list[str]]:
    data = CSV.encode()
    for _ in range(r.randrange(1, 4)):
        data = mangled(data, r)
    (home / "hyimg.csv").write_bytes(data)
    (home / "prompts.txt").write_bytes(mangled(data, r))
    yield ["check", "hyimg.csv"]
    yield ["check", "prompts.txt"]


KINDS: dict[str, Callable[[random.Random, Path], Iterator[list[str]]]] = {
    one.__name__: one
    for one in (manifests, sources, checkpoints, records, journals, settings, tables)
}


def wrong(code: int, out: str, err: str) -> str:
    """What is wrong with how a command ended, or nothing."""
    if code not in (0, 1, 2, 3):
        return f"exit code {code}"
    raw = {c for c in out + err if not (c.isprintable() or c == "\n")}
    if raw:
        return f"raw {sorted(map(ascii, raw))}"
    return "a forged line" if "\nerror[x]" in f"\n{out}\n{err}" else ""


def reached(err: str) -> tuple[int, int]:
    """How many of a command's answers came from behind the first check of a file, and how many
    there are: each error is one, and so is a command without any.
    """
    codes = re.findall(r"^error\[([a-z0-9.-]+)\]", err, re.M)
    return sum(code not in UNREADABLE for code in codes) or not codes, max(1, len(codes))


def _not_run(*_: object, **__: object) -> int:
    raise UsageError("not run here")


def tried(kind: str, seed: int, depth: Counter[str] | None = None) -> list[str]:
    """What is wrong with the commands of one case; `depth` counts what they `reached`."""
    found = []
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        try:
            for words in KINDS[kind](random.Random(seed), Path(place)):
                out, err = io.StringIO(), io.StringIO()
                try:
                    with (
                        contextlib.redirect_stdout(out),
                        contextlib.redirect_stderr(err),
                        within(LIMIT_S),
                    ):
                        code = app.run(words)
                    why = wrong(code, out.getvalue(), err.getvalue())
                    if depth is not None:
                        deep, every = reached(err.getvalue())
                        depth.update(deep=int(deep), every=every)
                except BaseException:  # a hang, or what even the border lets through
                    why = traceback.format_exc(limit=-3)
                if why:
                    found.append(f"{kind} {seed}: {words}: {why}\n{err.getvalue()[-1500:]}")
        finally:
            os.chdir(before)
    return found


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Nothing is drawn, or fetched, and nothing of this machine's own is read or kept."""
    former, kept = replay.show_run, dict(os.environ)
    replay.show_run = _not_run
    with tempfile.TemporaryDirectory() as cache:
        os.environ |= {"HF_HUB_OFFLINE": "1", "HYIMG_CACHE_DIR": cache, "COLUMNS": "200"}
        try:
            yield
        finally:
            replay.show_run = former
            os.environ.clear()
            os.environ.update(kept)


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=3000, help="manifest lines, 100 a case")
    parser.add_argument("--others", type=int, default=60, help="cases of each other kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS, help="only this one")
    parser.add_argument("--draw", action="store_true", help="run the checkpoints that load")
    given = parser.parse_args()
    globals()["DRAWS"] = given.draw
    counts, depth, failures = Counter[str](), Counter[str](), 0
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    with alone():
        for kind in KINDS if given.kind is None else [given.kind]:
            for number in range(given.lines // 100 if kind == "manifests" else given.others):
                counts[kind] += 1
                for text in tried(kind, given.seed * 1_000_000 + number, depth):
                    failures += 1
                    say(ascii(text).replace("\\n", "\n"))
            share = f"{depth['deep']:,} of {depth['every']:,} answers from behind the first check"
            say(f"{kind}: {counts[kind]} cases, {share}")
            depth.clear()
    say(f"{failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
