"""Messages before a model is loaded: missing sources, results made with other settings."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hyimg_cli.engine import sources
from hyimg_cli.journal.journal import RunFolder

Run = Callable[..., Any]
Write = Callable[..., Path]


def edits(*names: str, **more: Any) -> list[dict[str, Any]]:
    return [{"custom_id": Path(n).stem, "prompt": "x", "images": [n]} | more for n in names]


# --- sources ---------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["generate", "plan", "check"])
def test_missing_sources_are_counted_and_the_first_named(
    run_cli: Run, write_manifest: Write, write_picture: Write, fake_session: Any, command: str
) -> None:
    write_picture("a.png")
    gone = [f"gone-{number}.png" for number in range(12)]
    ran = run_cli(command, write_manifest(*edits("a.png", *gone)), "--progress", "plain")
    assert "12 of 13 sources are missing\n" in ran.err
    assert "gone-9.png" in ran.err
    assert "2 more" in ran.err
    assert fake_session.ran == (["a"] if command == "generate" else [])
    assert ran.code == (0 if command == "plan" else 1)


def test_their_jobs_fail_by_a_line_each_and_once(
    run_cli: Run, write_manifest: Write, write_picture: Write, fake_session: Any, tmp_path: Path
) -> None:
    write_picture("a.png")
    (tmp_path / "empty.png").touch()
    (tmp_path / "text.png").write_text("x")
    names = ("a.png", "gone.png", "empty.png", "text.png", "b/c.png")
    manifest = write_manifest(*edits(*names, metadata={"sku": 1}))
    ran = run_cli("generate", manifest, "-o", "out", "--json")
    assert "2 of 5 sources are missing\n2 of 5 sources are unreadable\n" in ran.err
    results = RunFolder(Path("out")).results()
    assert {name: (line["error"] or {}).get("code") for name, line in results.items()} == {
        "a": None,
        "gone": "source.missing",
        "empty": "source.empty",
        "text": "source.not-an-image",
        "c": "source.missing",
    }
    assert results["gone"]["error"]["message"].endswith("gone.png: file not found")
    assert results["gone"]["metadata"] == {"sku": 1}
    assert len(ran.json_lines) == 6
    ran = run_cli("generate", manifest, "-o", "out")
    assert (ran.code, fake_session.ran) == (1, ["a"])
    assert len((tmp_path / "out" / "results.jsonl").read_text().splitlines()) == 5


def test_a_retry_of_nothing_that_can_be_tried_loads_nothing(
    run_cli: Run, write_manifest: Write, write_picture: Write, fake_session: Any
) -> None:
    write_picture("a.png")
    manifest = write_manifest(*edits("a.png", "gone.png"))
    run_cli("generate", manifest, "-o", "out")
    ran = run_cli("generate", manifest, "-o", "out", "--retry-failed")
    assert (ran.code, fake_session.ran) == (1, ["a"])
    assert RunFolder(Path("out")).results()["gone"]["attempt"] == 2
    write_picture("gone.png")
    assert run_cli("generate", manifest, "-o", "out", "--retry-failed").code == 0
    assert fake_session.ran == ["a", "gone"]
    assert RunFolder(Path("out")).results()["gone"]["status"] == "done"


def put_damaged(folder: Path) -> tuple[str, ...]:
    """Pictures whose heads are whole: a photograph that ends too early, and a changed byte."""
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    for name in ("short.jpg", "short.png", "changed.png"):
        Image.fromarray(noise).save(folder / name)
        data = bytearray((folder / name).read_bytes())
        if name.startswith("short"):
            del data[len(data) // 2 :]
        else:
            data[len(data) // 2] ^= 0x55
        (folder / name).write_bytes(data)
    return "short.jpg", "short.png", "changed.png"


def test_check_plan_and_generate_find_the_same_damage_and_load_nothing_for_it(
    run_cli: Run, write_manifest: Write, write_picture: Write, fake_session: Any, tmp_path: Path
) -> None:
    write_picture("a.png")
    damaged = put_damaged(tmp_path)
    manifest = write_manifest(*edits("a.png", *damaged), *edits("gone.png"))
    lines = [json.loads(line) for line in manifest.read_text().splitlines()]
    write_manifest(*(line | {"custom_id": str(n)} for n, line in enumerate(lines)))
    for command in ("check", "plan", "generate"):
        ran = run_cli(command, manifest, "-o", "out")
        assert "1 of 5 sources is missing\n3 of 5 sources are unreadable\n" in ran.err, command
    assert fake_session.ran == ["0"]
    codes = {name: line["error"] for name, line in RunFolder(Path("out")).results().items()}
    assert [codes[str(n)]["code"] for n in (1, 2, 3)] == ["source.truncated"] * 3
    ran = run_cli("generate", manifest, "-o", "out", "--retry-failed")
    assert (ran.code, fake_session.ran) == (1, ["0"])


def test_a_source_is_decoded_once_until_it_changes(
    run_cli: Run,
    write_manifest: Write,
    write_picture: Write,
    fake_session: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoded: list[str] = []
    probe = sources.probe_image

    def counted(path: Path) -> Any:
        decoded.append(path.name)
        return probe(path)

    monkeypatch.setattr(sources, "probe_image", counted)
    for name in ("a.png", "b.png"):
        write_picture(name)
    damaged = put_damaged(tmp_path)[0]
    manifest = write_manifest(*edits("a.png", "b.png", damaged))
    for command in ("check", "plan", "generate", "generate"):
        assert "1 of 3 sources is unreadable" in run_cli(command, manifest, "-o", "out").err
    assert sorted(decoded) == ["a.png", "b.png", *[damaged] * 4]
    decoded.clear()
    (tmp_path / "b.png").write_bytes((tmp_path / "b.png").read_bytes()[:-40])
    assert "2 of 3 sources are unreadable" in run_cli("plan", manifest).err
    assert sorted(decoded) == ["b.png", damaged]
    decoded.clear()
    run_cli("check", manifest, "--no-disk-cache")
    assert sorted(decoded) == ["a.png", "b.png", damaged]


def test_long_reading_of_sources_is_told(
    run_cli: Run, write_manifest: Write, write_picture: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_TOLD_AFTER_S", -1.0)
    write_picture("a.png")
    manifest = write_manifest(*edits("a.png"))
    assert "reading 1 source, once each until they change\n" in run_cli("plan", manifest).err
    assert "reading" not in run_cli("plan", manifest).err
    assert "reading" not in run_cli("plan", manifest, "-q", "--no-disk-cache").err


@pytest.mark.parametrize("command", ["generate", "plan"])
def test_with_no_source_there_is_nothing_to_run(
    run_cli: Run, write_manifest: Write, fake_session: Any, tmp_path: Path, command: str
) -> None:
    ran = run_cli(command, write_manifest(*edits("gone.png", "lost.png")))
    assert (ran.code, fake_session.ran) == (2, [])
    assert "error[source.none]: no job has all its source images: 2 of 2 sources are missing" in (
        ran.err
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", ["generate", "plan"])
def test_where_no_job_can_keep_its_source_the_cause_and_what_to_do_are_told(
    run_cli: Run, write_picture: Write, fake_session: Any, tmp_path: Path, command: str
) -> None:
    write_picture("a.png")
    Image.new("CMYK", (32, 32)).save(tmp_path / "b.jpg")
    kept = ("--prompt", "x", "--keep-outside")
    for flags, cause, hint in (
        (
            ("a.png", "--region", "0,0,9999,9"),
            "extends beyond the source",
            "give LEFT,TOP,RIGHT,BOTTOM",
        ),
        (("b.jpg",), "b.jpg: the source has CMYK pixels", "convert it to 8-bit RGB"),
        (
            ("a.png", "--region", "c.png"),
            "c.png: the region's mask is not found",
            "give the path of a mask",
        ),
    ):
        ran = run_cli(command, *flags, *kept)
        assert (ran.code, fake_session.ran) == (2, [])
        assert "no job has all its source" not in ran.err
        # A region beyond its source is a fault of its line, which the manifest is refused by.
        of_line = "manifest.region" in ran.err
        assert of_line is (flags[-1] == "0,0,9999,9")
        refused = "no job can run: 1 job cannot keep the source outside the edit"
        assert (refused in ran.err) is not of_line
        assert cause in ran.err
        assert hint in ran.err


@pytest.mark.parametrize("kind", ["empty", "pipe", "folder", "link"])
def test_with_no_source_that_is_a_picture_neither(
    run_cli: Run, fake_session: Any, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "a.jpg"
    make = {"empty": path.touch, "pipe": lambda: os.mkfifo(path), "folder": path.mkdir}
    make.get(kind, lambda: path.symlink_to("nowhere"))()
    ran = run_cli("generate", "a.jpg", "--prompt", "x")
    assert (ran.code, fake_session.ran) == (2, [])
    assert "Traceback" not in ran.err


def test_other_jobs_run_where_every_source_is_missing(
    run_cli: Run, write_manifest: Write, fake_session: Any
) -> None:
    ran = run_cli("generate", write_manifest(*edits("gone.png"), {"custom_id": "t", "prompt": "x"}))
    assert (ran.code, fake_session.ran) == (1, ["t"])


def test_a_run_that_ends_at_a_failure_ends_at_a_missing_source(
    run_cli: Run, write_manifest: Write, write_picture: Write, fake_session: Any
) -> None:
    write_picture("a.png")
    manifest = write_manifest(*edits("a.png", "gone.png", "lost.png"))
    ran = run_cli("generate", manifest, "-o", "out", "--fail-fast")
    assert (ran.code, fake_session.ran) == (1, [])
    assert list(RunFolder(Path("out")).results()) == ["gone"]
    assert "to resume:" in ran.err


def test_the_plan_leaves_them_out(
    run_cli: Run, write_manifest: Write, write_picture: Write
) -> None:
    write_picture("a.png")
    (plan,) = run_cli("plan", write_manifest(*edits("a.png", "gone.png")), "--json").json_lines
    assert (plan["total"]["jobs"], plan["untried"]) == (1, ["gone"])


@pytest.mark.parametrize("command", ["check", "plan"])
def test_a_size_that_is_its_sources_turned_gets_a_hint(
    run_cli: Run, write_manifest: Write, write_picture: Write, command: str
) -> None:
    write_picture("wide.png", size=(96, 48))
    write_picture("square.png", size=(48, 48))

    def told(name: str, size: str) -> bool:
        (line,) = edits(name, size=size)
        return "height first" in run_cli(command, write_manifest(line)).err

    assert told("wide.png", "64x128")
    assert not told("wide.png", "128x64")
    assert not told("wide.png", "64x96")
    assert not told("wide.png", "1:2")
    assert not told("square.png", "64x128")


@pytest.mark.parametrize("command", ["check", "plan", "generate"])
def test_reuse_that_is_required_and_switched_off_is_refused(
    run_cli: Run, write_manifest: Write, command: str
) -> None:
    manifest = write_manifest({"prompt": "x"})
    ran = run_cli(command, manifest, "--no-kv-reuse", "--require-kv-reuse")
    assert (ran.code, "error[usage.kv-reuse]" in ran.err) == (2, True)
    assert "--require-kv-reuse and --no-kv-reuse cannot be used together" in ran.err


# --- results made otherwise ------------------------------------------------------------------


def test_a_used_folder_tells_in_what_how_many_jobs_differ(
    run_cli: Run, write_manifest: Write, fake_session: Any
) -> None:
    def jobs(prompt: str, **more: Any) -> Path:
        lines = [{"custom_id": str(n), "prompt": "x", "seed": 1} for n in range(40)]
        return write_manifest(
            *(line | {"prompt": prompt} | more for line in lines[:20]), *lines[20:]
        )

    assert run_cli("generate", jobs("x"), "-o", "out").code == 0
    fake_session.ran.clear()
    for command in ("generate", "plan", "check"):
        ran = run_cli(command, jobs("y"), "-o", "out")
        assert ran.code == 2
        assert "error[output.other-job]: 20 of 40 jobs differ (prompt: 20)" in ran.err
        assert "--force overwrites 20 and keeps 20;" in ran.err
    ran = run_cli("check", jobs("y", guidance_scale=2), "-o", "out")
    assert "(guidance_scale: 20, prompt: 20)" in ran.err
    assert run_cli("check", jobs("y"), "-o", "out", "--force").code == 0
    assert run_cli("check", jobs("y")).code == 0
    assert run_cli("generate", jobs("y"), "-o", "out", "--force").code == 0
    assert fake_session.ran == [str(number) for number in range(20)]


def test_settings_models_and_sources_are_named_too(
    run_cli: Run, write_manifest: Write, write_picture: Write, fake_session: Any, tmp_path: Path
) -> None:
    write_picture("a.png")
    manifest = write_manifest(*edits("a.png"), {"custom_id": "t", "prompt": "x"})
    assert run_cli("generate", manifest, "-o", "out", "--no-kv-reuse").code == 0
    told = run_cli("check", manifest, "-o", "out").err
    assert "2 of 2 jobs differ (kv_reuse: 2)" in told
    write_picture("a.png", size=(32, 32))
    told = run_cli("check", manifest, "-o", "out", "--no-kv-reuse").err
    assert "1 of 2 jobs differ (source image: 1)" in told
    assert "overwrites 1 and keeps 1;" in told
    info = json.loads((tmp_path / "out" / "run.json").read_text())
    info["models"] = {"tiny-image": "0"}
    (tmp_path / "out" / "run.json").write_text(json.dumps(info))
    (tmp_path / "out" / "manifest.resolved.jsonl").write_text("damaged")
    told = run_cli("check", manifest, "-o", "out").err
    assert "(kv_reuse: 2, model: 2)" in told
    (tmp_path / "out" / "run.json").unlink()
    told = run_cli("check", manifest, "-o", "out").err
    assert "source image: 1" in told
    assert "something this folder does not record: 1" in told
