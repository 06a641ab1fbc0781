"""Output files: formats, names and records, from `generate` to `replay`."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from hyimg_cli.cli import app
from hyimg_cli.media.images import pixel_digest, read_image
from hyimg_cli.media.recorded import read_described
from hyimg_cli.report.run_page import RunPage
from hyimg_cli.spec import digest

Run = Callable[..., Any]
STEPS = {"num_inference_steps": 2, "max_new_tokens": 12}
EDIT = {"prompt": "make it blue", "seed": 2} | STEPS
JOBS = [
    {"custom_id": "png", "images": ["in/red.png"]} | EDIT,
    {"custom_id": "jpeg", "images": ["in/red.png"], "format": "jpeg"} | EDIT,
    {"custom_id": "low", "images": ["in/red.png"], "format": "jpg", "quality": 5} | EDIT,
    {"custom_id": "webp", "images": ["in/red.png"], "format": "webp"} | EDIT,
    {"custom_id": "lossless", "images": ["in/red.png"], "format": "webp", "lossless": True} | EDIT,
    {"custom_id": "drawn", "prompt": "a red circle", "seed": 3, "format": "webp"} | STEPS,
]
FILM = {"custom_id": "film", "task": "t2v", "prompt": "a dog", "size": "64x64", "seed": 1}
FILM |= {"num_frames": 5, "num_inference_steps": 2}
NAME = "{folder}/{stem}-{custom_id}-{seed}"
FLAGS = ("--device", "cpu", "--no-prewarm", "-q")
SOURCE_TYPES = "http://cv.iptc.org/newscodes/digitalsourcetype/"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that is only read; its source picture is in `in`."""
    home = tmp_path_factory.mktemp("made")
    (home / "in").mkdir()
    Image.new("RGB", (64, 48), (220, 30, 30)).save(home / "in" / "red.png")
    lines = "".join(json.dumps(job) + "\n" for job in (*JOBS, FILM))
    (home / "jobs.jsonl").write_text(lines)
    command = ["generate", str(home / "jobs.jsonl"), "-o", str(home / "run"), "--name", NAME]
    assert app.run([*command, *FLAGS, "--cache-dir", str(home / "c")]) == 0
    return home / "run"


@pytest.fixture
def results(made: Path) -> dict[str, dict[str, Any]]:
    lines = map(json.loads, (made / "results.jsonl").read_text().splitlines())
    return {line["custom_id"]: line["outputs"][0] for line in lines}


def test_files_have_the_names_that_were_asked_for(
    made: Path, results: dict[str, dict[str, Any]]
) -> None:
    suffixes = {"png": "png", "jpeg": "jpg", "low": "jpg", "webp": "webp", "lossless": "webp"}
    found = {name: entry["path"] for name, entry in results.items()}
    assert found == {
        name: f"outputs/in/red-{name}-2.{suffix}" for name, suffix in suffixes.items()
    } | {
        "drawn": "outputs/drawn-drawn-3.webp",
        "film": "outputs/film-film-1.mp4",
    }
    assert {digest.of_file(made / entry["path"]) for entry in results.values()} == {
        entry["sha256"] for entry in results.values()
    }


def test_a_format_changes_a_files_bytes_and_not_what_was_drawn(
    made: Path, results: dict[str, dict[str, Any]]
) -> None:
    names = ("png", "jpeg", "low", "webp", "lossless")
    assert len({results[name]["pixel_sha256"] for name in names}) == 1
    decoded = {name: pixel_digest(read_image(made / results[name]["path"]).pixels)
               for name in names}  # fmt: skip
    assert {n for n in names if decoded[n] == results[n]["pixel_sha256"]} == {"png", "lossless"}


@pytest.mark.parametrize("name", ["jpeg", "low", "webp", "lossless", "drawn", "film"])
def test_info_and_replay_work_on_all_of_them(
    run_cli: Run, made: Path, results: dict[str, dict[str, Any]], name: str
) -> None:
    file = made / results[name]["path"]
    told = run_cli("info", file).out.splitlines()
    assert [line.split(":")[0].strip() for line in told[1:3]] == ["prompt", "seed"]
    edited = "compositeWithTrained" if name not in ("drawn", "film") else "trained"
    assert told[-1] == f"  digital source type: {SOURCE_TYPES}{edited}AlgorithmicMedia"
    ran = run_cli("replay", file, "--expect-equal", "--json")
    assert ran.code == 0, ran.err
    verdict = ran.json_lines[-1]["replay"]
    lossy = "pixels before compression"
    compared = {"lossless": "pixels", "film": "frames before compression"}
    assert verdict["compared"] == compared.get(name, lossy)
    assert digest.of_file(Path(verdict["made"])) == results[name]["sha256"]


def test_a_lossy_replay_that_differs_is_told(
    run_cli: Run, made: Path, results: dict[str, dict[str, Any]]
) -> None:
    file = made / results["low"]["path"]
    ran = run_cli("replay", file, "--quantization", "nf4", "--expect-equal", "--json")
    assert ran.code == 1
    found = ran.json_lines[-1]["replay"]
    assert (found["equal"], found["compared"]) == (False, "pixels before compression")
    assert found["psnr"] > 5


def test_eval_pairs_formats_by_job(run_cli: Run, made: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    lines = [{**job, "format": "png"} for job in JOBS]
    for line in lines:
        line.pop("quality", None)
        line.pop("lossless", None)
    manifest = made.parent / "again.jsonl"
    manifest.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run_cli("generate", manifest, "-o", again, *FLAGS).code == 0
    ran = run_cli("eval", "psnr", made, again, "--json", "--allow-unpaired")
    assert ran.code == 0, ran.err
    values = {line["name"]: line["psnr"] for line in ran.json_lines if "name" in line}
    assert values["png"] == values["lossless"] == "inf"
    assert 20 < values["low"] < values["jpeg"]


def test_the_page_of_a_run_shows_all_of_them(made: Path) -> None:
    RunPage(made).refresh()
    page = (made / "report" / "data-0001.js").read_text(encoding="utf-8")
    assert page.count('"link":"outputs/') == len(JOBS) + 1
    assert page.count("KV reuse") == len(JOBS), "of a video it would say nothing"


def test_what_stands_beside_a_film_has_its_name(
    made: Path, results: dict[str, dict[str, Any]]
) -> None:
    film = made / results["film"]["path"]
    assert read_described(film.with_suffix(".json")).record == read_described(film).record


@pytest.mark.usefixtures("fake_session")
def test_a_used_folder_is_not_mixed(run_cli: Run, write_manifest: Callable[..., Path]) -> None:
    manifest = write_manifest({"id": "a", "prompt": "x"}, {"id": "b", "prompt": "x"})
    run = ("generate", manifest, "-o", "out", "-q", "--no-report")
    assert run_cli(*run).code == 0
    before = sorted(Path("out/outputs").iterdir())
    for flags, named in (
        (("--format", "webp", "--lossless"), "format: 2, lossless: 2"),
        (("--name", "{index}"), "name: 2"),
        (("--name", "{index}", "--steps", "3"), "num_inference_steps: 2, name: 2"),
    ):
        ran = run_cli(*run, *flags)
        assert ran.code == 2
        assert f"2 of 2 jobs differ ({named})" in ran.err
        assert sorted(Path("out/outputs").iterdir()) == before
    assert run_cli(*run, "--quality", "3").code == 0
    # Made again, they stand in their new places alone.
    assert run_cli(*run, "--name", "{index}/{custom_id}", "--format", "jpeg", "--force").code == 0
    found = [path for path in Path("out/outputs").rglob("*") if path.is_file()]
    assert sorted(map(str, found)) == ["out/outputs/1/a.jpg", "out/outputs/2/b.jpg"]


@pytest.mark.usefixtures("fake_session")
def test_leaving_out_the_mark_is_told_once(
    run_cli: Run, write_manifest: Callable[..., Path]
) -> None:
    manifest = write_manifest({"id": "a", "prompt": "x"}, {"id": "b", "prompt": "x"})
    run = ("generate", manifest, "--no-report")
    assert "AI Act" not in run_cli(*run).err
    ran = run_cli(*run, "--no-metadata", "-o", "bare")
    assert ran.err.count("article 50") == 1
    assert "note: --no-metadata" in ran.err


def test_without_metadata_a_file_says_nothing(run_cli: Run, made: Path, tmp_path: Path) -> None:
    lines = [job for job in (*JOBS, FILM) if job["custom_id"] in ("png", "jpeg", "webp", "film")]
    manifest = made.parent / "bare.jsonl"
    manifest.write_text("".join(json.dumps(line) + "\n" for line in lines))
    ran = run_cli("generate", manifest, "-o", "bare", "--no-metadata", *FLAGS)
    assert ran.code == 0, ran.err
    for path in Path("bare/outputs").iterdir():
        data = path.read_bytes()
        assert not any(word in data for word in (b"iptc", b"hyimg", b"make it", b"UNICODE"))
    assert not Path("bare/outputs/film.json").exists()
    shutil.rmtree("bare")
