"""A release: the wheel alone runs in a fresh environment, and the sdist has what its tests need."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from hyimg_cli import __version__

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
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    passed(run(sys.executable, "-m", "build", "--no-isolation", "-o", folder))
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (built,) = dist.glob("hyimg_cli-*.whl")
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
    told = passed(run(installed / "hyimg", "explain", "job.size", cwd=tmp_path))
    assert told.stdout.startswith("job.size: ")
    assert not list(tmp_path.iterdir())


def test_generate_runs_from_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    passed(run(installed / "hyimg", "generate", "quickstart", "--limit", "1", cwd=tmp_path))
    assert len(list((tmp_path / "runs/quickstart/outputs").glob("*.png"))) == 1
    assert (tmp_path / "runs/quickstart/report.html").is_file()


def test_the_sdist_has_what_its_tests_need(dist: Path, tmp_path: Path) -> None:
    (archive,) = dist.glob("hyimg_cli-*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path, filter="data")
    (root,) = tmp_path.iterdir()
    if (REPOSITORY / ".git").exists():
        tracked = passed(run("git", "ls-files")).stdout.splitlines()
        kept = [name for name in tracked if not name.startswith(".ci/")]
        assert not [name for name in kept if not (root / name).is_file()]
    tests = ("tests/cli/test_docs.py", "tests/manifest/test_table.py")
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, "-k", "not command")
    environ = OFFLINE | {"PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, *words], cwd=root, env=environ, capture_output=True, text=True, check=False
    )
    passed(done)


@pytest.mark.skipif(not (REPOSITORY / ".git").exists(), reason="not a checkout")
def test_what_travels_to_a_lent_machine_is_small() -> None:
    """Tracked files, as a checkout has them: 64 MiB travel, built ones among them."""
    names = passed(run("git", "ls-files", "-z")).stdout.split("\0")
    sizes = {one: (REPOSITORY / one).lstat().st_size for one in names if one}
    largest = sorted(sizes, key=lambda one: sizes[one], reverse=True)[:5]
    assert sum(sizes.values()) <= 58_000_000, largest


def test_every_file_of_a_release_names_its_version() -> None:
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert citation["version"] == __version__
    assert [one["name"] for one in citation["authors"]] == [
        one["name"] for one in project["authors"]
    ]
    heads = (REPOSITORY / "CHANGELOG.md").read_text().split("\n## ")
    changes = [head.partition("\n")[0] for head in heads[1:]]
    assert changes[changes[0] == "Unreleased"] == __version__
    for head in heads[1:]:
        kinds = [line for line in head.splitlines() if line.startswith("### ")]
        assert len(kinds) == len(set(kinds)), f"headings twice in {head.splitlines()[0]}"


def test_what_contributors_use_calls_the_same_targets() -> None:
    hooks = yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text())["repos"][0][
        "hooks"
    ]
    lint = (REPOSITORY / "Makefile").read_text().partition("lint: ")[2].partition("\n\n")[0]
    for hook in hooks:
        assert hook["entry"].removeprefix(".venv/bin/") in lint.replace(" --check", "")
    (job,) = yaml.safe_load((REPOSITORY / ".github/workflows/ci.yml").read_text())["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands == ["sudo .ci/packages", "make lint", "make test"]
    for name in ("bug", "feature"):
        form = yaml.safe_load((REPOSITORY / f".github/ISSUE_TEMPLATE/{name}.yml").read_text())
        assert form["name"]
        assert form["description"]
        fields = [part for part in form["body"] if part["type"] != "markdown"]
        assert len({field["id"] for field in fields}) == len(fields)
        assert all(field["attributes"]["label"] for field in fields)
