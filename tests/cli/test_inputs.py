"""Pictures and prompts in place of a manifest: what runs, by which names, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import processor_s

from hyimg_cli.journal.journal import RunFolder

Run = Callable[..., Any]
Write = Callable[..., Path]


@pytest.fixture
def photos(tmp_path: Path, write_picture: Write) -> Path:
    (tmp_path / "photos" / "sub").mkdir(parents=True)
    for name in ("cat.jpg", "cat.png", "Foto ä (1).jpg", "sub/dog.jpg"):
        write_picture(f"photos/{name}")
    (tmp_path / "photos" / "notes.txt").write_text("x")
    return tmp_path / "photos"


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_folder_is_edited_and_goes_on_when_files_come(
    run_cli: Run, photos: Path, write_picture: Write, fake_session: Any
) -> None:
    ran = run_cli("generate", "photos/", "--prompt", "x", "--recursive", "--seed", "7")
    assert ran.code == 0
    assert "1 file is no picture: photos/notes.txt" in ran.err
    assert sorted(fake_session.ran) == ["Foto-a-1-b9b0f196c0", "cat", "cat-png", "sub/dog"]
    (folder,) = Path("runs").iterdir()
    assert folder.name.startswith("photos-")
    assert (folder / "outputs" / "sub" / "dog.png").is_file()
    assert {line["outputs"][0]["seed"] for line in RunFolder(folder).results().values()} == {7}
    write_picture("photos/another.jpg")
    write_picture("photos/Foto a (1).jpg")
    fake_session.ran.clear()
    assert run_cli("generate", "photos", "--prompt", "x", "--recursive", "--seed", "7").code == 0
    assert len(fake_session.ran) == 2


def test_the_manifest_written_is_the_one_that_runs(
    run_cli: Run, photos: Path, fake_session: Any, tmp_path: Path
) -> None:
    arguments = ("photos", "--prompt", "x", "--prompt", "y", "--recursive")
    ran = run_cli("manifest", *arguments)
    (tmp_path / "jobs.jsonl").write_text(ran.out)
    (tmp_path / "deep").mkdir()
    assert run_cli("manifest", *arguments, "-o", "deep/jobs.jsonl", "-q").code == 0
    written = lines(ran.out)
    assert len(written) == 8
    assert {line["prompt"] for line in written} == {"x", "y"}
    assert lines(Path("deep/jobs.jsonl").read_text())[0]["images"] == ["../photos/cat.jpg"]
    assert run_cli("generate", *arguments, "-o", "out").code == 0
    assert len(fake_session.ran) == 8
    for manifest in ("jobs.jsonl", "deep/jobs.jsonl"):
        assert run_cli("generate", manifest, "-o", "out").code == 0
    assert len(fake_session.ran) == 8


def test_a_prompt_that_comes_later_renames_nothing(run_cli: Run, photos: Path) -> None:
    one = lines(run_cli("manifest", "photos", "--prompt", "x").out)
    two = lines(run_cli("manifest", "photos", "--prompt", "x", "--prompt", "y").out)
    more = [part for prompt in "xzy" for part in ("--prompt", prompt)]
    three = lines(run_cli("manifest", "photos", *more).out)
    assert [line for line in two if line in one] == one
    assert [line for line in three if line in two] == two


def test_prompts_from_a_file_and_prompts_alone(run_cli: Run, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("\ufeffa red circle\n\n a cat \na red circle\n")
    jobs = lines(run_cli("manifest", "--prompt", "p.txt", "--prompt", "a dog").out)
    assert [job["prompt"] for job in jobs] == ["a red circle", "a cat", "a dog"]
    assert not any("images" in job for job in jobs)
    assert run_cli("check", "--prompt", "a dog").code == 0


def test_a_manifest_that_is_there_is_not_replaced(run_cli: Run, photos: Path) -> None:
    Path("jobs.jsonl").write_text("edited")
    arguments = ("manifest", "photos", "--prompt", "x", "-o", "jobs.jsonl")
    ran = run_cli(*arguments)
    assert (ran.code, Path("jobs.jsonl").read_text()) == (2, "edited")
    assert run_cli(*arguments, "--force").code == 0
    assert run_cli("check", "jobs.jsonl").code == 0


def test_a_name_like_a_flag(run_cli: Run, write_picture: Write, fake_session: Any) -> None:
    write_picture("-o.jpg")
    ran = run_cli("generate", "--prompt", "fail", "--seed", "1", "--", "-o.jpg")
    assert (ran.code, fake_session.ran) == (1, ["-o"])
    assert "--retry-failed -- -o.jpg" in ran.err


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("generate photos", "manifest.no-prompt"),
        ("generate photos/cat.jpg", "manifest.no-prompt"),
        ("generate photos/cat.jpg photos/cat.png", "manifest.no-prompt"),
        ("generate photos/*.jpg", "manifest.no-prompt"),
        ("generate", "usage.no-manifest"),
        ("generate jobs.jsonl --prompt x", "usage.prompt-and-manifest"),
        ("generate - --prompt x", "usage.prompt-and-manifest"),
        ("generate photos nowhere --prompt x", "manifest.missing"),
        ("generate empty --prompt x", "manifest.no-pictures"),
        ("generate photos --prompt nowhere.txt", "manifest.unreadable"),
        ("generate photos --prompt photos/cat.jpg.txt", "manifest.unreadable"),
        ("generate photos --prompt binary.txt", "manifest.unreadable"),
        ("generate photos --prompt blank.txt", "manifest.empty"),
        ("manifest photos", "manifest.no-prompt"),
    ],
)
def test_what_is_refused(
    run_cli: Run, photos: Path, write_manifest: Write, arguments: str, code: str
) -> None:
    write_manifest({"prompt": "x"})
    Path("empty").mkdir()
    Path("binary.txt").write_bytes(b"\xff\n")
    Path("blank.txt").write_text(" \n")
    ran = run_cli(*arguments.split())
    assert (ran.code, f"error[{code}]" in ran.err) == (2, True)
    assert not Path("runs").exists()


def test_a_folder_with_a_packaged_name_is_a_folder_with_a_prompt(
    run_cli: Run, write_picture: Write, tmp_path: Path
) -> None:
    (tmp_path / "quickstart").mkdir()
    write_picture("quickstart/a.jpg")
    assert "9 jobs" in run_cli("check", "quickstart").err
    assert "1 job," in run_cli("check", "quickstart", "--prompt", "x").err


def test_ten_thousand_pictures_are_a_manifest_in_two_seconds(run_cli: Run, tmp_path: Path) -> None:
    (tmp_path / "many").mkdir()
    for number in range(10_000):
        (tmp_path / "many" / f"IMG_{number}.jpg").touch()
    run_cli("manifest", "--prompt", "warm")

    def listed() -> None:
        assert run_cli("manifest", "many", "--prompt", "x").out.count("\n") == 10_000

    assert processor_s(listed, 2) < 2
