"""A machine with torch and a GPU, and none of the libraries for videos and LPIPS: its GPU tests are
found, and pictures are made.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import MAY_LACK

TESTS = Path(__file__).parent
# Where nothing is found a library is missing as it is on such a machine; then both in one process,
# since importing torch and transformers takes most of the time of either.
BARE = f"""
import sys
from importlib.machinery import PathFinder

find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *rest: None if name in {MAY_LACK} else find(name, *rest)

import pytest
from hyimg_cli.cli import app

assert app.run(["generate", "quickstart", "--limit", "1", "-o", sys.argv[1]]) == 0
options = ["-p", "no:cacheprovider", "--assert=plain", "-q"]
sys.exit(pytest.main([*options, "--collect-only", "-m", "gpu", {str(TESTS)!r}]))
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BARE, tmp_path_factory.mktemp("bare") / "out"]
    return subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=False)


def test_every_gpu_test_is_collected(bare: subprocess.CompletedProcess[str]) -> None:
    """Without an error; no module that has one is skipped for what another of its tests needs."""
    assert bare.returncode == 0, bare.stdout + bare.stderr
    found = {line.partition("::")[0] for line in bare.stdout.splitlines() if "::" in line}
    marked = {path for path in TESTS.rglob("test_*.py") if "pytest.mark.gpu" in path.read_text()}
    marked.remove(Path(__file__))
    assert found == {str(path.relative_to(TESTS.parent)) for path in marked}


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


def test_a_picture_is_made(bare: subprocess.CompletedProcess[str]) -> None:
    assert "1 done, 0 failed" in bare.stderr
