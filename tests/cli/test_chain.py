"""Lines that edit the results of other lines (`images: ["@a"]`), with a session without a model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

Run = Callable[..., Any]
Write = Callable[..., Path]
Line = dict[str, Any]
pytestmark = pytest.mark.usefixtures("fake_session")
THOROUGH = pytest.mark.thorough


def line(name: str, *images: str, **more: Any) -> Line:
    pictures = {"images": list(images)} if images else {}
    return {"custom_id": name, "prompt": "a circle", "seed": 1} | pictures | more


A, B, C = line("a"), line("b", "@a"), line("c", "@b")
CHAIN = (C, A, B)


def outcomes(out: Path) -> dict[str, Line]:
    lines = (out / "results.jsonl").read_text().splitlines()
    return {entry["custom_id"]: entry for entry in map(json.loads, lines)}


def resolved_in(out: Path) -> list[Line]:
    return [*map(json.loads, (out / "manifest.resolved.jsonl").read_text().splitlines())]


def test_lines_run_after_those_whose_results_they_edit(
    run_cli: Run, write_manifest: Write, fake_session: Any, tmp_path: Path
) -> None:
    manifest, out = write_manifest(*CHAIN, line("d"), line("e", "@a", "@d")), tmp_path / "out"
    assert run_cli("check", manifest, "-o", out).code == 0
    assert "total: 3 groups" in run_cli("plan", manifest, "-o", out).out
    assert run_cli("generate", manifest, "-o", out).code == 0
    order = fake_session.ran
    assert {*order[:2]} == {"a", "d"}
    assert order.index("b") < order.index("c")
    resolved = resolved_in(out)
    assert [one["custom_id"] for one in resolved] == ["c", "a", "b", "d", "e"]
    assert resolved[4]["images"] == ["outputs/a.png", "outputs/d.png"]
    assert resolved[4]["links"] == ["a", "d"]
    # Everything is done, however the lines are read.
    fake_session.ran.clear()
    for again in (manifest, out / "manifest.resolved.jsonl"):
        assert "5 skipped" in run_cli("generate", again, "-o", out).err
    assert fake_session.ran == []
    # A lost result is drawn again; those after it were made from the same pixels.
    (out / "outputs" / "a.png").unlink()
    assert run_cli("generate", manifest, "-o", out).code == 0
    assert fake_session.ran == ["a"]


def test_a_changed_link_changes_all_after_it(
    run_cli: Run, write_manifest: Write, fake_session: Any, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert run_cli("generate", write_manifest(*CHAIN, line("d")), "-o", out).code == 0
    changed = write_manifest(A, B | {"seed": 2}, C, line("d"))
    fake_session.ran.clear()
    ran = run_cli("generate", changed, "-o", out)
    assert (ran.code, fake_session.ran) == (2, []), "it is refused before anything is drawn"
    assert "2 of 4 jobs differ (ar_seed: 1, seed: 1, source image: 1)" in ran.err
    assert run_cli("check", changed, "-o", out).code == 2
    fake_session.meanwhile["c"] = lambda folder: (_ for _ in ()).throw(KeyboardInterrupt)
    run_cli("generate", changed, "-o", out, "--force")
    assert fake_session.ran == ["b", "c"]
    fake_session.meanwhile.clear()
    assert run_cli("generate", changed, "-o", out, "--force").code == 0
    assert fake_session.ran == ["b", "c", "c"], "b is not drawn twice"


def test_a_failed_link_fails_what_comes_after_it_with_one_reason(
    run_cli: Run, write_manifest: Write, fake_session: Any, tmp_path: Path
) -> None:
    out, d = tmp_path / "out", line("d", "@c", "@a")
    failing = write_manifest(A, B | {"prompt": "fail"}, C, d)
    ran = run_cli("generate", failing, "-o", out)
    assert (ran.code, fake_session.ran) == (1, ["a", "b"])
    found = outcomes(out)
    for name in ("c", "d"):
        error = found[name]["error"]
        assert (error["code"], found[name]["status"]) == ("source.link", "failed")
        assert error["message"] == 'it comes after "b", whose result was not drawn'
    assert "1 done, 3 failed" in ran.err
    before = (out / "results.jsonl").read_bytes()
    ran = run_cli("generate", failing, "-o", out)
    assert (ran.code, (out / "results.jsonl").read_bytes()) == (1, before)
    assert "0 done, 3 failed, 1 skipped" in ran.err
    ran = run_cli("generate", failing, "-o", out, "--retry-failed")
    assert fake_session.ran == ["a", "b", "b"]
    ran = run_cli("generate", write_manifest(A, B, C, d), "-o", out)
    assert (ran.code, fake_session.ran[3:]) == (0, ["b", "c", "d"]), "mended, it goes on"
    assert {entry["status"] for entry in outcomes(out).values()} == {"done"}


@THOROUGH
def test_a_selected_line_edits_the_result_that_is_there(
    run_cli: Run, write_manifest: Write, fake_session: Any, tmp_path: Path
) -> None:
    manifest, out = write_manifest(*CHAIN), tmp_path / "out"
    ran = run_cli("generate", manifest, "-o", out, "--select", "b")
    assert (ran.code, fake_session.ran) == (1, [])
    assert outcomes(out)["b"]["error"]["message"].startswith('it comes after "a"')
    assert run_cli("generate", manifest, "-o", out, "--select", "a").code == 0
    assert run_cli("generate", manifest, "-o", out, "--select", "b").code == 0, "without --retry"
    assert run_cli("generate", manifest, "-o", out).code == 0
    assert fake_session.ran == ["a", "b", "c"]


@THOROUGH
def test_a_run_that_ends_early_leaves_what_comes_after(
    run_cli: Run, write_manifest: Write, fake_session: Any, tmp_path: Path
) -> None:
    out, failing = tmp_path / "out", line("x", prompt="fail")
    ran = run_cli("generate", write_manifest(A, failing, B), "-o", out, "--fail-fast")
    assert (ran.code, fake_session.ran) == (1, ["a", "x"])
    assert "b" not in outcomes(out)
    stopped = write_manifest(A, B | {"prompt": "SIGINT"}, C)
    fake_session.ran.clear()
    assert run_cli("generate", stopped, "-o", tmp_path / "other").code == 130
    assert fake_session.ran == ["a", "b"]
    assert [*outcomes(tmp_path / "other")] == ["a"]


REFUSED = [
    ((A, line("b", "@x")), 2, 'no result has the id "x"', "./@x"),
    ((A | {"n": 2}, B), 2, 'no result has the id "a"', "it makes several: name one, such as @a-0"),
    ((line("a", "@b"), B), 1, "a result cannot be made from itself: @", "earlier"),
    ((line("a", task="t2v"), B), 2, 'the result of "a" is a video', "name a picture"),
    ((A | {"use_system_prompt": "custom"}, B, C), 2, '"a" has a fault, so it has no', "mend"),
    ((A, B | {"keep_outside": True}), 2, 'the size of "a" is not known before the run', "a size"),
]
REFUSED_TOO = [
    (
        (A | {"size": "64x64"}, B | {"keep_outside": True, "region_size": "native"}),
        2,
        'the result of "a" is not drawn yet, so no draft can find one',
        "leave out region_size",
    ),
    ((A | {"custom_id": "cat"}, line("b", "@cta")), 2, 'no result has the id "cta"', "@cat"),
    ((A | {"matrix": {"guidance_scale": [2, 3]}}, B), 2, 'the id "a"', "@a-guidance_scale-2"),
    ((line("b", "@b"),), 1, "a result cannot be made from itself: @b → @b", "earlier"),
    ((line("a", "@c"), B, C, line("d", "@a")), 4, '"a" has a fault', "mend"),
    ((A | {"size": "huge"}, B), 2, '"a" has a fault, so it has no result to edit', "mend"),
    ((A | {"size": "huge", "n": 2}, line("b", "@a-1")), 2, '"a-1" has a fault', "mend"),
    ((A, B | {"images": "@a b"}), 2, '"a b" cannot name a job', ""),
    ((A, B | {"images": "@"}), 2, '"" cannot name a job', ""),
    ((A, B | {"links": ["a", "a"]}), 2, "2 links for 1 images", "remove"),
    ((A | {"size": "64x64"}, B | {"region": "0,0,65,9"}), 2, "extends beyond the source", "LEFT"),
]


@pytest.mark.parametrize(
    ("lines", "where", "what", "hint"),
    [*REFUSED, *(pytest.param(*case, marks=THOROUGH) for case in REFUSED_TOO)],
)
def test_what_check_and_a_run_refuse(
    run_cli: Run, write_manifest: Write, fake_session: Any,
    lines: tuple[Line, ...], where: int, what: str, hint: str,
) -> None:  # fmt: skip
    manifest = write_manifest(*lines)
    found = run_cli("check", manifest, "--json").json_lines
    faults = [one["fault"] for one in found if "fault" in one]
    mine = [one for one in faults if what in one["message"]]
    assert mine, faults
    assert mine[0]["where"].startswith(f"{manifest.name}:{where}"), mine
    assert hint in mine[0]["hint"]
    ran = run_cli("generate", manifest)
    assert (ran.code, what in ran.err, fake_session.ran) == (2, True, [])


@THOROUGH
@pytest.mark.parametrize(("flags", "why"), [
    (("generate", "--shard", "1/2"), "its source may be in another shard"),
    (("check", "--shard", "1/2"), "its source may be in another shard"),
    (("think", "-o", "texts.jsonl"), "its text can only be written once that is drawn"),
    (("generate", "--n", "2", "--score", "text"), "after all of them are drawn"),
])  # fmt: skip
def test_modes_without_chains_say_so(
    run_cli: Run, write_manifest: Write, fake_session: Any, flags: tuple[str, ...], why: str
) -> None:
    command, *more = flags
    name = "@a-0" if "--n" in flags else "@a"
    ran = run_cli(command, write_manifest(A, line("b", name)), *more)
    assert (ran.code, fake_session.ran) == (2, [])
    assert "error[usage.chain]" in ran.err
    assert why in ran.err


def test_edits_after_a_missing_source_fail_with_it(
    run_cli: Run, write_manifest: Write, fake_session: Any, tmp_path: Path
) -> None:
    first, later = line("a", "none.png", keep_outside=True), B | {"keep_outside": True}
    manifest, out = write_manifest(first, later, line("d")), tmp_path / "out"
    assert "1 of 1 source is missing" in run_cli("check", manifest, "-o", out).err
    assert run_cli("generate", manifest, "-o", out).code == 1
    assert fake_session.ran == ["d"]
    codes = {name: (one["error"] or {}).get("code") for name, one in outcomes(out).items()}
    assert codes == {"a": "source.missing", "b": "source.link", "d": None}


def test_a_mask_of_a_result_is_read_before_the_run(
    run_cli: Run, write_manifest: Write, write_picture: Any, fake_session: Any, tmp_path: Path
) -> None:
    """Its mask may be wrong in itself, which no drawing should have to find out."""
    source = write_picture("photo.png")
    with Image.open(source) as image:
        holes = image.convert("RGBA")
    holes.putpixel((0, 0), (0, 0, 0, 0))
    holes.save(tmp_path / "mask.png")
    first = line("a", str(source), keep_outside=True)
    later = B | {"region": str(tmp_path / "mask.png")}
    ran = run_cli("check", write_manifest(first, later, C))
    assert ran.code == 1
    assert "the mask has transparency, which has two readings" in ran.err
    assert run_cli("generate", write_manifest(first, later, C), "-o", tmp_path / "out").code == 1
    assert fake_session.ran == ["a"]
    codes = [(one["error"] or {}).get("code") for one in outcomes(tmp_path / "out").values()]
    assert codes == ["source.region", "source.link", None]


@THOROUGH
def test_a_joined_folder_has_its_own_links(
    run_cli: Run, write_manifest: Write, fake_session: Any, tmp_path: Path
) -> None:
    manifest, out, joined = write_manifest(*CHAIN), tmp_path / "out", tmp_path / "deep" / "joined"
    run_cli("generate", manifest, "-o", out, "--select", "a")
    assert run_cli("merge", out, "-o", joined).code == 1, "two jobs are missing"
    missing = [*map(json.loads, (joined / "missing.jsonl").read_text().splitlines())]
    assert [(one["images"], one["links"]) for one in missing] == [
        (["outputs/b.png"], ["b"]),
        (["outputs/a.png"], ["a"]),
    ]
    out.rename(tmp_path / "gone")
    assert run_cli("generate", manifest, "-o", joined).code == 0
    assert fake_session.ran == ["a", "b", "c"]


@THOROUGH
def test_an_invalid_link_that_is_skipped_leaves_out_what_comes_after_it(
    run_cli: Run, write_manifest: Write, fake_session: Any, tmp_path: Path
) -> None:
    broken = A | {"use_system_prompt": "custom"}
    manifest = write_manifest(broken, B, C, line("d"))
    ran = run_cli("generate", manifest, "-o", tmp_path / "out", "--skip-invalid")
    assert (ran.code, fake_session.ran) == (1, ["d"])
    failed = outcomes(tmp_path / "out")
    assert {name for name, one in failed.items() if one["status"] == "failed"} == {"a", "b", "c"}


@THOROUGH
def test_names_tables_and_paths_that_begin_with_the_mark(
    run_cli: Run, fake_session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("jobs.csv").write_text(
        "custom_id,prompt,images,seed\nx/a,one,,1\nb,two,@x/a,1\nc,3,@b;@x/a,1\n"
    )
    ran = run_cli("generate", "jobs.csv", "-o", "out", "--name", "{stem}-{seed}-{custom_id}")
    assert (ran.code, fake_session.ran) == (0, ["x/a", "b", "c"]), ran.err
    resolved = resolved_in(Path("out"))
    assert resolved[1]["images"] == [resolved[2]["images"][1]]
    assert all(Path("out", path).is_file() for path in resolved[2]["images"])
    # A picture whose name begins with it is a path with a dot.
    Image.new("RGB", (64, 64), "red").save("@cat.png")
    run_cli("manifest", "@cat.png", "--prompt", "x", "-o", "made.jsonl")
    assert json.loads(Path("made.jsonl").read_text())["images"] == ["./@cat.png"]
    assert run_cli("generate", "made.jsonl", "-o", "out-2").code == 0
