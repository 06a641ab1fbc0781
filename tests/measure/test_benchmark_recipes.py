"""The recipes for edit benchmarks, each as a command, with a stand-in for the judge."""

import base64
import hashlib
import importlib.util
import io
import json
import math
import os
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from made_runs import made_run
from PIL import Image

from hyimg_cli.journal.picks import ScoresFile

RECIPES = Path(__file__).parents[2] / "recipes" / "benchmarks"
TEMPLATE = '''
_context_no_delimit = """Context."""
_prompts_0shot_two_image_edit_rule = """Two images."""
_prompts_0shot_tie_rule_SC = """Instruction: <instruction>"""
_prompts_0shot_rule_PQ = """One image."""
'''
GROUPS = {"add": 4, "text_change": 3}


@dataclass
class Ran:
    code: int
    out: str
    err: str


def recipe(name: str, *words: str | Path) -> Ran:
    """Run a recipe's command in this process."""
    spec = importlib.util.spec_from_file_location(f"recipe_{Path(name).stem}", RECIPES / name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = module.main([*map(str, words)]) or 0
        except SystemExit as ended:
            code = 1
            err.write(str(ended.code))
    return Ran(code, out.getvalue(), err.getvalue())


def row(key: str, group: str, language: str, data: bytes) -> dict[str, Any]:
    picture = {"bytes": data, "path": None}
    return {
        "task_type": group,
        "key": key,
        "instruction": f"{group} {key} {language}",
        "instruction_language": language,
        "input_image": picture,
        "input_image_raw": picture,
        "Intersection_exist": True,
    }


@pytest.fixture
def gedit(tmp_path: Path) -> Path:
    """A folder like GEdit-Bench's: arrow streams, two languages of each picture."""
    pa = pytest.importorskip("pyarrow")
    rows = []
    for group, count in GROUPS.items():
        for n in range(count):
            data = io.BytesIO()
            Image.new("RGB", (24, 16), (n * 50, len(group) * 9, 0)).save(data, format="PNG")
            rows += [row(f"{group}{n:02}", group, lang, data.getvalue()) for lang in ("en", "cn")]
    table = pa.Table.from_pylist(rows)
    folder = tmp_path / "GEdit-Bench"
    folder.mkdir()
    path = str(folder / "data-00000-of-00001.arrow")
    with pa.OSFile(path, "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    return folder


def test_the_list_of_gedit_becomes_a_manifest(gedit: Path, tmp_path: Path) -> None:
    ran = recipe("lists.py", "gedit", gedit, "-o", tmp_path / "gedit/jobs.jsonl")
    assert ran.code == 0, ran.err
    assert "14 edits of 7 pictures: add 8, text_change 6" in ran.out
    lines = [json.loads(one) for one in (tmp_path / "gedit/jobs.jsonl").read_text().splitlines()]
    assert lines[0]["custom_id"] == "fullset/add/en/add00"
    assert lines[0]["x_group"] == "add"
    assert (tmp_path / "gedit" / lines[0]["images"][0]).is_file()
    one = recipe("lists.py", "gedit", gedit, "-o", tmp_path / "j.jsonl", "--language", "en")
    assert "7 edits" in one.out
    wrong = recipe("lists.py", "gedit", tmp_path / "nowhere", "-o", tmp_path / "j.jsonl")
    assert (wrong.code, "no .arrow" in wrong.err) == (1, True)


def test_the_list_of_imgedit_becomes_a_manifest(
    tmp_path: Path, write_picture: Callable[..., Path]
) -> None:
    picture = write_picture()
    entries = {
        "1": {"id": picture.name, "prompt": "make it red", "edit_type": "alter"},
        "2": {"id": "gone.jpg", "prompt": "remove it", "edit_type": "remove"},
    }
    (tmp_path / "basic_edit.json").write_text(json.dumps(entries))
    words = ("imgedit", tmp_path / "basic_edit.json", "-o", tmp_path / "jobs.jsonl")
    ran = recipe("lists.py", *words, "--images", picture.parent)
    assert ran.code == 0, ran.err
    assert "adjust 1, remove 1" in ran.out
    assert "1 pictures not found, such as gone.jpg" in ran.err


class Judge(BaseHTTPRequestHandler):
    """Two marks by the words and pictures that it is shown; noisy at each asking, but fixed."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        (message,) = body["messages"]
        text = "".join(part.get("text", "") for part in message["content"])
        shown = sum(part["type"] == "image_url" for part in message["content"])
        asked = self.server.asked  # type: ignore[attr-defined]
        asked.append((text, shown, body))
        count = sum(one[0] == text for one in asked)
        mark = (len(text) * 7 + count) % 6 + 3
        reply = json.dumps({"score": [mark, 10 - mark // 2], "reasoning": "seen"})
        for word, said in self.server.odd.items():  # type: ignore[attr-defined]
            reply = said if word in text else reply
        choice: dict[str, Any] = {"message": {"content": reply}}
        if reply == "refuse":
            choice = {"message": {"content": None, "refusal": "no"}}
        answer = {"model": "judge-1", "choices": [choice]}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: Any) -> None:
        return None


@pytest.fixture
def lab(
    gedit: Path, tmp_path: Path, run_cli: Any, monkeypatch: pytest.MonkeyPatch, serve: Any
) -> Callable[..., Any]:
    """Draws GEdit's list without a model, and scores it by viescore; returns `hyimg score`."""
    monkeypatch.chdir(tmp_path)
    server = serve(Judge)
    server.asked, server.odd = [], {}
    monkeypatch.setenv("HYIMG_JUDGE_URL", f"http://127.0.0.1:{server.server_port}/v1")
    (tmp_path / "vie_prompts.py").write_text(TEMPLATE)
    recipe("lists.py", "gedit", gedit, "-o", "gedit/jobs.jsonl")
    jobs = [json.loads(one) for one in Path("gedit/jobs.jsonl").read_text().splitlines()]
    for n, job in enumerate(jobs):
        job["images"] = [Path("gedit") / path for path in job["images"]]
        job["colour"] = (n * 15, 0, 90)

    def score(
        *options: str, repeat: int = 2, odd: Any = None, out: str = "out", **more: Any
    ) -> Any:
        made_run(tmp_path / out, [job | more.get(job["x_key"], {}) for job in jobs])
        server.odd = odd or {}
        given = ("viescore.model=m", "viescore.template=@vie_prompts.py", *options)
        words = [word for option in given for word in ("--score-option", option)]
        scorer = ("--score", f"{RECIPES}/viescore.py:viescore", "--repeat", str(repeat))
        return run_cli("score", out, *scorer, *words)

    score.server = server  # type: ignore[attr-defined]
    return score


@pytest.fixture
def serve() -> Iterator[Any]:
    servers = []

    def start(handler: type[BaseHTTPRequestHandler]) -> ThreadingHTTPServer:
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def scores_in(place: str) -> list[dict[str, Any]]:
    return [dict(one) for one in ScoresFile(Path(place)).scores.values()]


def test_viescore_asks_twice_and_takes_the_lower_marks(lab: Any) -> None:
    assert lab(repeat=1).code == 0
    scores = scores_in("out")
    assert len(scores) == 14
    assert len(lab.server.asked) == 28
    one = scores[0]
    assert one["value"] == math.sqrt(one["parts"]["SC"] * one["parts"]["PQ"])
    assert one["parts"]["SC"] == min(one["parts"]["SC1"], one["parts"]["SC2"])
    assert one["facts"]["model"] == "judge-1"
    assert len(one["facts"]["template_sha256"]) == 64
    shown = {text.split("\n")[1]: (count, body) for text, count, body in lab.server.asked}
    assert (shown["Two images."][0], shown["One image."][0]) == (2, 1)
    body = shown["One image."][1]
    assert "temperature" not in body
    assert body["max_tokens"] == 1400
    # As the official scripts do: JPEG, the result in the source's size.
    assert "image/jpeg" in json.dumps(body)
    assert any("Instruction: add add00 en" in text for text, *_ in lab.server.asked)
    # Another template, preparation or model: nothing is reused.
    Path("vie_prompts.py").write_text(TEMPLATE.replace("Context.", "Another context."))
    for option in ("viescore.prepare=official", "viescore.prepare=files", "viescore.temperature=0"):
        before = len(lab.server.asked)
        lab(option, repeat=1)
        assert len(lab.server.asked) == before + 28


UNREAD = "reply not readable: no two marks from 0 to 10 (SC)"
ODD = {
    "add add00 en": ("refuse", "refused: no (SC)"),
    "add add01 en": ("I would rather not.", UNREAD),
    "add add02 en": ('{"score": [12, 7]}', UNREAD),
    "text_change text_change00 en": ('{"score": [8]}', UNREAD),
    "text_change text_change01 en": ('{"score": [8, ', UNREAD),
}


def test_a_reply_without_marks_is_no_number(lab: Any) -> None:
    lab(repeat=1, odd={word: reply for word, (reply, _) in ODD.items()})
    ran = recipe("number.py", "write", "out", "--list", "GEdit-Bench", "-o", "benchmark.json")
    assert ran.code == 1
    record = json.loads(Path("benchmark.json").read_text())
    faults = {name.rpartition("/")[2]: why for name, why in record["missing"].items()}
    assert faults == {word.split()[1]: [fault] for word, (_, fault) in ODD.items()}
    assert f"missing: fullset/add/en/add00: {ODD['add add00 en'][1]}" in ran.err
    values = record["values"]["en"]["viescore"]
    assert values["as_worst"]["macro"]["mean"] < values["left_out"]["macro"]["mean"]
    # The other language has nothing missing.
    assert [*record["values"]["cn"]["viescore"]] == ["left_out"]


def test_a_list_of_marks_alone_is_read(lab: Any) -> None:
    lab(repeat=1, odd={"add add00 en": "[8, 7]"})
    assert all(one["fault"] is None for one in scores_in("out"))
    # Without its template the scorer stops at once.
    Path("vie_prompts.py").write_text("x = 1")
    ran = lab(repeat=1)
    assert ran.code == 3
    assert "the template has no _context_no_delimit" in ran.err


def official_means(layout: Path, scores: dict[str, dict[str, Any]], language: str) -> list[float]:
    """Means as the benchmark's scripts take them, written anew: of group means, of the pictures
    that are in the folder with their sources.
    """
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for picture in sorted(layout.glob(f"fullset/*/{language}/*.png")):
        if picture.stem.endswith("_SRCIMG"):
            continue
        assert picture.with_name(f"{picture.stem}_SRCIMG.png").is_file()
        name = str(picture.relative_to(layout).with_suffix(""))
        parts = scores[name]["parts"]
        found[picture.parts[-3]].append((parts["SC"], parts["PQ"]))
    columns = [
        [fmean(one[0] for one in some) for some in found.values()],
        [fmean(one[1] for one in some) for some in found.values()],
        [fmean(math.sqrt(sc * pq) for sc, pq in some) for some in found.values()],
    ]
    return [fmean(column) for column in columns]


def by_id(place: str) -> dict[str, dict[str, Any]]:
    results = [json.loads(one) for one in Path(place, "results.jsonl").read_text().splitlines()]
    of = {one["outputs"][0]["pixel_sha256"]: one["custom_id"] for one in results}
    return {of[one["pixel_sha256"]]: one for one in scores_in(place)}


def test_the_number_is_that_of_the_official_scripts_on_our_folder(lab: Any, tmp_path: Path) -> None:
    lab(repeat=1)
    ran = recipe("number.py", "layout", "out", "-o", "official/hyimg")
    assert "14 results" in ran.out, ran.err
    written = recipe("number.py", "write", "out", "--list", "GEdit-Bench", "-o", "benchmark.json")
    assert written.code == 0, written.err
    record = json.loads(Path("benchmark.json").read_text())
    for language in ("en", "cn"):
        values = record["values"][language]
        ours = [
            values[name]["left_out"]["macro"]["mean"]
            for name in ("viescore.SC", "viescore.PQ", "viescore")
        ]
        official = official_means(Path("official/hyimg"), by_id("out"), language)
        assert ours == pytest.approx(official, abs=1e-9)
    assert record["list"]["expected"] == record["list"]["judged"] == 14
    assert record["judge"]["answered"]["model"] == {"judge-1": 14}
    # Twice the same, but for the time.
    recipe("number.py", "write", "out", "--list", "GEdit-Bench", "-o", "again.json")
    again = json.loads(Path("again.json").read_text())
    assert again | {"written": ""} == record | {"written": ""}


class Marks(BaseHTTPRequestHandler):
    """Two marks by the pictures alone, whatever the words around them: of SC, or of PQ."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        parts = [part for one in body["messages"] for part in one["content"]]
        seen = b""
        for part in parts:
            if part["type"] == "image_url":
                data = base64.b64decode(part["image_url"]["url"].partition(",")[2])
                with Image.open(io.BytesIO(data)) as picture:
                    seen += picture.convert("RGB").tobytes()
        first, second, *_ = hashlib.sha256(seen).digest()
        marks = {"score": [first % 11, second % 11], "reasoning": "seen"}
        answer = {"model": "judge-1", "choices": [{"message": {"content": json.dumps(marks)}}]}
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        return None


# The groups of our list in place of the benchmark's, and the script's two commands after it.
OMNI = """
import sys
from benchmarks.accuracy.image_to_image import gedit_bench as script
script.GROUPS[:] = sys.argv[1].split(",")
name, data, url = sys.argv[2:]
given = ["--dataset-ref", data, "--output-root", "official", "--model-name", name]
judge = ["--judge-base-url", url, "--judge-model", "m", "--judge-api-key", "EMPTY"]
sys.exit(
    script.main(["evaluate", *given, "--save-dir", "marks", *judge])
    or script.main(["summarize", "--csv-path", f"marks/{name}_all_all_vie_score.csv"])
)
"""


def test_vllm_omnis_script_gives_our_number_on_our_folder(
    lab: Any, gedit: Path, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its `evaluate` and `summarize` as published, with a judge that sees pictures only."""
    omni = Path(os.environ.get("VLLM_OMNI", "nowhere"))
    if not (omni / "benchmarks/accuracy/image_to_image/gedit_bench.py").is_file():
        pytest.skip("VLLM_OMNI does not name a source distribution of vllm-omni, unpacked")
    server = serve(Marks)
    url = f"http://127.0.0.1:{server.server_port}/v1"
    monkeypatch.setenv("HYIMG_JUDGE_URL", url)
    ran = lab("viescore.prepare=files", repeat=1)
    assert ran.code == 0, ran.err
    recipe("number.py", "layout", "out", "-o", "official/hyimg")
    recipe("number.py", "write", "out", "--list", "GEdit-Bench", "-o", "benchmark.json")
    ours = json.loads(Path("benchmark.json").read_text())["values"]
    theirs = subprocess.run(
        [sys.executable, "-c", OMNI, ",".join(GROUPS), "hyimg", str(gedit), url],
        env=os.environ | {"PYTHONPATH": str(omni), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert theirs.returncode == 0, theirs.stderr
    (path,) = Path("marks").glob("*_summary.json")
    found = json.loads(path.read_text())["languages"]
    for language in ("en", "cn"):
        overall = found[language]["overall"]
        assert overall["count"] == 7
        names = {"Q_SC": "viescore.SC", "Q_PQ": "viescore.PQ", "Q_O": "viescore"}
        assert {name: overall[name] for name in names} == pytest.approx(
            {name: ours[language][of]["left_out"]["macro"]["mean"] for name, of in names.items()},
            abs=1e-9,
        )


def test_a_claim_is_checked_with_the_limit_of_two_runs(lab: Any) -> None:
    lab(repeat=3)
    recipe("number.py", "write", "out", "--list", "GEdit-Bench", "-o", "b.json")
    macro = json.loads(Path("b.json").read_text())["values"]["all"]["viescore"]["left_out"]["macro"]
    limit = macro["limits_of_two_runs"]["1"]
    for shift, code in ((0.9 * limit, 0), (1.1 * limit, 1)):
        claim = f"{macro['mean'] + shift:.6f}"
        ran = recipe("number.py", "check", "b.json", "--claim", claim)
        assert ran.code == code, ran.out + ran.err
        assert ("does not agree" in ran.out) is bool(code)
        assert "judged by judge-1" in ran.out


def test_two_runs_are_compared_by_group_means(lab: Any) -> None:
    lab(repeat=2)
    lab(repeat=2, out="other", add00={"failed": "no memory"})
    same = recipe("number.py", "compare", "out", "out")
    assert "macro +0.0000" in same.out
    assert "cannot be told apart" in same.out
    ran = recipe("number.py", "compare", "out", "other")
    assert ran.code == 1
    assert "missing in B: fullset/add/en/add00: failed: no memory" in ran.err
    assert ran.out.count("macro") == 2


def official_type_means(replies: dict[str, str], edits: dict[str, Any]) -> dict[str, float]:
    """Means of ImgEdit's two steps, written anew: whole marks after ": ", rounded twice."""
    found: dict[str, list[float]] = defaultdict(list)
    for key, text in replies.items():
        ends = [line.strip().split(": ") for line in text.splitlines()]
        marks = [int(one[1]) for one in ends if len(one) == 2 and one[1].isdigit()]
        if marks:
            found[edits[key]["edit_type"]].append(round(fmean(marks), 2))
    return {kind: round(fmean(some), 2) for kind, some in found.items()}


def test_imgedit_agrees_with_its_script_on_clean_replies_only(
    tmp_path: Path,
    run_cli: Any,
    monkeypatch: pytest.MonkeyPatch,
    serve: Any,
    write_picture: Callable[..., Path],
) -> None:
    monkeypatch.chdir(tmp_path)
    picture, kinds = write_picture(), ("add", "remove", "adjust")
    edits = {
        str(n): {"id": picture.name, "prompt": f"edit {n}.", "edit_type": kinds[n % 3]}
        for n in range(9)
    }
    Path("basic_edit.json").write_text(json.dumps(edits))
    prompts = {kind: f"{kind}: <edit_prompt>" for kind in kinds}
    Path("prompts.json").write_text(json.dumps(prompts))
    words = ("imgedit", "basic_edit.json", "--images", picture.parent, "-o", "jobs.jsonl")
    assert recipe("lists.py", *words).code == 0
    jobs = [json.loads(one) for one in Path("jobs.jsonl").read_text().splitlines()]
    made_run(Path("out"), [job | {"colour": (n, 0, 0)} for n, job in enumerate(jobs)])
    server = serve(Judge)
    server.asked = []
    monkeypatch.setenv("HYIMG_JUDGE_URL", f"http://127.0.0.1:{server.server_port}/v1")
    lines = "Reasoning: fine.\nPrompt Compliance: {}\nNaturalness: {}\nDetail Integrity: {}"
    replies = {n: lines.format(int(n) % 5 + 1, int(n) % 3 + 1, 2) for n in edits}
    server.odd = {f"edit {n}.": reply for n, reply in replies.items()}
    options = ("model=m", "prompts=@prompts.json", "list=@basic_edit.json")
    given = [word for one in options for word in ("--score-option", f"imgedit.{one}")]
    scorer = ("--score", f"{RECIPES}/imgedit.py:imgedit", *given)

    def groups() -> Any:
        ran = recipe("number.py", "write", "out", "--list", "ImgEdit", "-o", "b.json")
        return ran, json.loads(Path("b.json").read_text())["values"]["en"]["imgedit"]

    assert run_cli("score", "out", *scorer).code == 0
    ran, values = groups()
    assert ran.code == 0, ran.err
    ours = {kind: one["mean"] for kind, one in values["left_out"]["groups"].items()}
    assert ours == pytest.approx(official_type_means(replies, edits), abs=0.011)
    # A mark out of five, a refusal and prose: by the script these are other means, or nothing.
    Path("out/scores.jsonl").unlink()
    server.odd |= {"edit 0.": "**Prompt Compliance**: 1/5\nNaturalness: 5\nDetail Integrity: 5"}
    server.odd |= {"edit 1.": "refuse", "edit 2.": "Lovely!\nNaturalness: 5"}
    assert run_cli("score", "out", *scorer).code == 0
    ran, values = groups()
    assert ran.code == 1
    assert "missing: 1: refused: no" in ran.err
    assert "missing: 2: reply not readable: 1 marks from 1 to 5, not 3" in ran.err
    assert by_id("out")["0"]["value"] == pytest.approx(11 / 3)
