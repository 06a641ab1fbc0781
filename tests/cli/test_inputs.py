"""Pictures and prompts in place of a manifest: jobs, their names, and refusals."""

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
    assert "1 file that is not an image: photos/notes.txt" in ran.err
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


def outputs(folder: Path) -> list[str]:
    top = folder / "outputs"
    return sorted(str(path.relative_to(top)) for path in top.rglob("*.*"))


def test_results_are_called_as_the_pictures(
    run_cli: Run, photos: Path, write_picture: Write, fake_session: Any
) -> None:
    arguments = ("generate", "photos", "--prompt", "x", "--recursive", "-o", "out")
    assert run_cli(*arguments).code == 0
    assert outputs(Path("out")) == ["Foto ä (1).png", "cat-png.png", "cat.png", "sub/dog.png"]
    (Path("photos") / "cat.jpg").unlink()
    write_picture("photos/sub/dog.png")
    fake_session.ran.clear()
    assert run_cli(*arguments).code == 0
    assert fake_session.ran == ["sub/dog-png"], "the others keep their names"
    assert "sub/dog-png.png" in outputs(Path("out"))
    assert run_cli(*arguments, "--n", "2", "-o", "two").code == 0
    assert outputs(Path("two"))[:2] == ["Foto ä (1)-0.png", "Foto ä (1)-1.png"]


def test_a_picture_that_comes_later_does_not_take_anothers_name(
    run_cli: Run, write_picture: Write, fake_session: Any
) -> None:
    arguments = ("generate", "photos", "--prompt", "x", "-o", "out")
    Path("photos").mkdir()
    write_picture("photos/cat.png")
    assert run_cli(*arguments).code == 0
    write_picture("photos/cat.jpg")
    assert run_cli(*arguments).code == run_cli("check", *arguments[1:]).code == 0
    assert fake_session.ran == ["cat-png", "cat"]
    assert outputs(Path("out")) == ["cat-jpg.png", "cat.png"]


def test_a_folder_that_an_earlier_version_began_keeps_its_names(
    run_cli: Run, photos: Path, fake_session: Any
) -> None:
    """Those of results, and those that were only planned."""
    old = lines(run_cli("manifest", "photos", "--prompt", "x").out)
    for job in old:
        job.pop("name", None)
    Path("old.jsonl").write_text("".join(json.dumps(job) + "\n" for job in old))
    assert run_cli("generate", "old.jsonl", "-o", "out").code == 0
    journal = Path("out/results.jsonl")
    journal.write_text("".join(journal.read_text().splitlines(keepends=True)[:2]))
    fake_session.ran.clear()
    assert run_cli("generate", "photos", "--prompt", "x", "-o", "out").code == 0
    assert fake_session.ran == ["Foto-a-1-b9b0f196c0"]
    assert outputs(Path("out")) == ["Foto-a-1-b9b0f196c0.png", "cat-png.png", "cat.png"]


def test_a_result_never_takes_its_sources_place(
    run_cli: Run, write_picture: Write, tmp_path: Path, fake_session: Any
) -> None:
    (tmp_path / "outputs").mkdir()
    source = write_picture("outputs/Foto.png")
    before = source.read_bytes()
    for command in (
        ("generate", "outputs", "--prompt", "x", "-o", "."),
        ("check", "outputs", "--prompt", "x", "-o", "."),
        ("generate", "outputs", "--prompt", "x", "-o", "../" + tmp_path.name, "--name", "foto"),
    ):
        ran = run_cli(*command, "--force")
        assert (ran.code, "error[output.source]" in ran.err) == (2, True)
    assert (source.read_bytes(), fake_session.ran) == (before, [])
    assert run_cli("generate", "outputs", "--prompt", "x", "-o", ".", "--name", "b").code == 0


def test_the_flag_for_names_wins_over_the_pictures_and_not_over_lines(
    run_cli: Run, photos: Path, fake_session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("photos", "--prompt", "x", "--seed", "7")
    assert run_cli("generate", *arguments, "--name", "{custom_id}-{seed}", "-o", "out").code == 0
    assert outputs(Path("out")) == ["Foto-a-1-b9b0f196c0-7.png", "cat-7.png", "cat-png-7.png"]
    Path("jobs.jsonl").write_text(run_cli("manifest", *arguments[:3]).out)
    ran = run_cli("check", "jobs.jsonl", "--name", "{custom_id}-x")
    assert "--name has no effect for 1 of 3 jobs: their lines set a name" in ran.err


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
