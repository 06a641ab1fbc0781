"""Messages before a model is loaded: missing sources, results made with other settings."""

import json
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
def test_a_source_whose_pixels_cannot_be_kept_is_refused_with_what_to_do(
    run_cli: Run, fake_session: Any, tmp_path: Path, command: str
) -> None:
    Image.new("CMYK", (32, 32)).save(tmp_path / "b.jpg")
    ran = run_cli(command, "b.jpg", "--prompt", "x", "--keep-outside")
    assert (ran.code, fake_session.ran) == (2, [])
    assert "no job can run: 1 job cannot keep the source outside the edit" in ran.err
    assert "b.jpg: the source has CMYK pixels" in ran.err
    assert "convert it to 8-bit RGB" in ran.err


def test_the_plan_leaves_them_out(
    run_cli: Run, write_manifest: Write, write_picture: Write
) -> None:
    write_picture("a.png")
    (plan,) = run_cli("plan", write_manifest(*edits("a.png", "gone.png")), "--json").json_lines
    assert (plan["total"]["jobs"], plan["untried"]) == (1, ["gone"])


# --- results made otherwise ------------------------------------------------------------------


def test_what_differs_is_named_where_the_folders_own_files_say_less(
    run_cli: Run, write_manifest: Write, write_picture: Write, fake_session: Any, tmp_path: Path
) -> None:
    write_picture("a.png")
    manifest = write_manifest(*edits("a.png"), {"custom_id": "t", "prompt": "x"})
    assert run_cli("generate", manifest, "-o", "out", "--no-kv-reuse").code == 0
    write_picture("a.png", size=(32, 32))
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
