"""The wheel alone, in a fresh environment and an empty folder, has all that a command needs."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
OFFLINE = os.environ | {"HF_HUB_OFFLINE": "1", "PIP_NO_INDEX": "1", "PYTHONPATH": ""}


def run(*command: str | Path, cwd: Path = REPOSITORY) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    return subprocess.run(
        words, cwd=cwd, env=OFFLINE, capture_output=True, text=True, check=False, timeout=300
    )


def passed(done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    passed(run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", folder))
    (built,) = folder.glob("hyimg_cli-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of a fresh environment with the wheel, which sees our dependencies."""
    home = tmp_path_factory.mktemp("fresh") / "venv"
    passed(run(sys.executable, "-m", "venv", "--without-pip", home))
    python = home / "bin" / "python"
    purelib = passed(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"))
    # A path in a .pth file is searched, but .pth files found there are not read: the editable
    # install of this checkout stays out of sight.
    outer = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (Path(purelib.stdout.strip()) / "outer.pth").write_text("\n".join(sorted(outer)))
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps")
    passed(run(*pip, wheel))
    return home / "bin"


def test_the_wheel_holds_defaults_and_no_tests(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert "hyimg_cli/recipes/quickstart.jsonl" in names
    assert "hyimg_cli/recipes/quickstart/red-circle.png" in names
    assert "hyimg_cli/assets/tiny-image/model.safetensors" in names
    assert not [name for name in names if name.startswith(("tests/", "recipes/"))]


def test_the_fresh_environment_runs_the_wheel_not_the_checkout(
    installed: Path, tmp_path: Path
) -> None:
    code = "import hyimg_cli; print(hyimg_cli.__file__)"
    found = passed(run(installed / "python", "-c", code, cwd=tmp_path)).stdout
    assert found.startswith(str(installed.parent))


def test_check_runs_from_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    passed(run(installed / "hyimg", "check", "quickstart", cwd=tmp_path))
    assert not list(tmp_path.iterdir())


def test_generate_runs_from_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    passed(run(installed / "hyimg", "generate", "quickstart", "--limit", "1", cwd=tmp_path))
    assert len(list((tmp_path / "runs/quickstart/outputs").glob("*.png"))) == 1
