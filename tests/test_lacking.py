"""A machine with torch and a GPU, and none of the libraries for videos and LPIPS: its GPU tests are
found, pictures are made, and whatever else is asked for says what is missing.
"""

import ast
import inspect
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from conftest import MAY_LACK

from hyimg_cli import errors
from hyimg_cli.cli.eval import evaluate
from hyimg_cli.cli.replay import replay
from hyimg_cli.doctor.check import run_checks
from hyimg_cli.doctor.tools import film, lpips
from hyimg_cli.settings.run import OutputConfig, RunConfig

TESTS = Path(__file__).parent
# Where nothing is found a library is missing as it is on such a machine; then both in one process,
# since importing torch and transformers takes most of the time of either. An older typer lacks a
# name for the parser's errors.
BARE = f"""
import sys
from importlib.machinery import PathFinder

find, lacking = PathFinder.find_spec, {MAY_LACK}
PathFinder.find_spec = lambda name, *rest: None if name in lacking else find(name, *rest)

import pytest
import typer
del typer.TyperException
from hyimg_cli.cli import app

assert app.run(["generate", "quickstart", "--limit", "1", "-o", sys.argv[1]]) == 0
options = ["-p", "no:cacheprovider", "-p", "no:timeout", "--assert=plain", "-q"]
sys.exit(pytest.main([*options, "--collect-only", "-m", "gpu", {str(TESTS)!r}]))
"""


# Their networks are made of diffusers' own modules.
NEED_DIFFUSERS = {
    TESTS / "models" / "lingbot_world" / "test_chunks.py",
    TESTS / "models" / "diffusers_video" / "test_context.py",
}
GPU_TESTS = {path for path in TESTS.rglob("test_*.py") if "pytest.mark.gpu" in path.read_text()}
GPU_TESTS -= {Path(__file__), *NEED_DIFFUSERS}


def imported_at_the_top(path: Path, seen: set[Path]) -> set[str]:
    """Libraries that importing a file imports, by itself or by files of this repository."""
    seen.add(path)
    libraries = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        match node:
            case ast.Import(names):
                modules = [alias.name for alias in names]
            case ast.ImportFrom(module=str(module), names=names):
                modules = [module, *(f"{module}.{alias.name}" for alias in names)]
            case _:
                continue
        for module in modules:
            libraries.add(module.split(".")[0])
            place = Path(*module.split("."))
            for root in (path.parent, TESTS, TESTS.parent):
                for ours in (root / place.with_suffix(".py"), root / place / "__init__.py"):
                    if ours.is_file() and ours not in seen:
                        libraries |= imported_at_the_top(ours, seen)
    return libraries


@pytest.mark.parametrize("path", sorted(GPU_TESTS), ids=lambda path: str(path.relative_to(TESTS)))
def test_no_gpu_test_imports_what_its_machine_lacks(path: Path) -> None:
    """A conftest beside it counts as well; `bare` below is the same in earnest."""
    seen: set[Path] = set()
    beside = [folder / "conftest.py" for folder in path.parents if folder.is_relative_to(TESTS)]
    for file in (path, *(file for file in beside if file.exists())):
        assert not imported_at_the_top(file, seen) & {*MAY_LACK}, file


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BARE, tmp_path_factory.mktemp("bare") / "out"]
    return subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=False)


@pytest.mark.thorough
def test_every_gpu_test_is_collected(bare: subprocess.CompletedProcess[str]) -> None:
    """Without an error; no module that has one is skipped for what another of its tests needs."""
    assert bare.returncode == 0, bare.stdout + bare.stderr
    found = {line.partition("::")[0] for line in bare.stdout.splitlines() if "::" in line}
    assert found == {str(path.relative_to(TESTS.parent)) for path in GPU_TESTS}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "skipped",
    [
        "tests/cli/test_video.py: av is not installed",
        "tests/models/diffusers_video: diffusers is not installed",
        "tests/engine/test_video_tiny.py: diffusers is not installed",
    ],
)
def test_what_is_skipped_says_why(bare: subprocess.CompletedProcess[str], skipped: str) -> None:
    assert f"SKIPPED [1] {skipped}" in bare.stdout


@pytest.mark.thorough
def test_a_picture_is_made(bare: subprocess.CompletedProcess[str]) -> None:
    assert "1 done, 0 failed" in bare.stderr


@pytest.fixture
def _nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "find_spec", lambda name: None)


@pytest.mark.usefixtures("_nothing_is_installed")
def test_a_video_is_refused_before_it_is_drawn(run_cli: Any) -> None:
    ran = run_cli("generate", "quickstart-video")
    assert ran.code == 3
    assert "error[machine.no-package]: diffusers and av are not installed" in ran.err
    assert "pip install" in ran.err


@pytest.mark.usefixtures("_nothing_is_installed")
@pytest.mark.parametrize("command", [("info",), ("eval", "psnr", "film.mp4")])
def test_a_videos_file_cannot_be_read_without_av(
    run_cli: Any, tmp_path: Path, command: tuple[str, ...]
) -> None:
    (tmp_path / "film.mp4").write_bytes(b"\0\0\0\x20ftypisom" + bytes(64))
    ran = run_cli(*command, "film.mp4")
    assert ran.code == 3
    assert "error[machine.no-package]: av is not installed" in ran.err


@pytest.mark.parametrize(
    ("command", "words"),
    [(evaluate, {"metric": "psnr", "a": "a.png", "b": "b.png"}), (replay, {"file": "a.png"})],
)
def test_paths_are_paths_where_a_context_has_words(
    monkeypatch: pytest.MonkeyPatch, command: Any, words: dict[str, str]
) -> None:
    """As with typer before 0.29."""
    given = []
    module = sys.modules[command.__module__]
    monkeypatch.setattr(module, "_run", lambda found, *_: given.append(found) or 0)
    not_given: dict[str, Any] = dict.fromkeys(inspect.signature(command).parameters)
    del not_given["ctx"]
    not_given |= {"verbose": 0} if "verbose" in not_given else {}
    ctx: Any = SimpleNamespace(params=not_given | words, obj=())
    paths = {name: Path(word) for name, word in words.items() if name != "metric"}
    with pytest.raises(typer.Exit):
        command(ctx=ctx, **not_given | words | paths)
    assert given[0].items() >= paths.items()


@pytest.mark.usefixtures("_nothing_is_installed")
def test_the_doctor_names_what_is_missing() -> None:
    config = RunConfig(OutputConfig(Path()))
    films, distances = run_checks(config, [("video files", film), ("lpips", lpips)])
    assert (films.status, films.found) == ("failed", "diffusers and av are not installed")
    assert distances.status == "warning", "no run needs it"
