"""What tests in every room need: manifests, command lines run in this process, fixed seeds."""

import gc
import io
import json
import os
import random
import re
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from PIL import Image

from hyimg_cli import remote

# Behind a shell's "&" Ctrl-C is ignored, here and by every process that is started from here.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

WriteManifest = Callable[..., Path]
REPOSITORY = Path(__file__).parent.parent
CACHE = Path(tempfile.gettempdir()) / f"hyimg-tests-{os.getpid()}"
# What a machine that was set up for torch alone may lack: no picture is made with them.
MAY_LACK = ("av", "diffusers", "lpips")


# A busy machine makes an example slow, not wrong. And each run has the same examples: others may
# be had by --hypothesis-profile default.
settings.register_profile(
    "the same", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("the same")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="write transcripts as they are today")


def pytest_configure(config: pytest.Config) -> None:
    """No test touches the developer's own cache, nor one that a test started as a process."""
    os.environ["HYIMG_CACHE_DIR"] = str(CACHE)
    gc.disable()  # while libraries and tests are read: nothing of them goes, looking cost a tenth
    # As a plugin: of a conftest's hooks none is asked about a folder whose own conftest fails.
    config.pluginmanager.register(_Lacking())


class _Lacking:
    """Skips what cannot be imported here: a module, or a folder by its conftest."""

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        report = yield
        error = report.call.excinfo and report.call.excinfo.value.__cause__
        if isinstance(error, ModuleNotFoundError) and error.name in MAY_LACK:
            report.outcome = "skipped"
            report.longrepr = (str(collector.path), None, f"Skipped: {error.name} is not installed")
        return report


# Reasons of skips that no installation could have avoided.
_UNAVOIDABLE = re.compile(
    r"GPU|CUDA|has no case|this version of|weights|a source distribution|/proc"
)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, Any]:
    """Fail a test that was skipped for want of something, where all of it could be installed."""
    report = yield
    if os.environ.get("HYIMG_TESTS_SKIP") == "never" and report.skipped:
        is_expected = hasattr(report, "wasxfail") or not isinstance(report.longrepr, tuple)
        reason = "" if is_expected else report.longrepr[2]
        if not is_expected and not _UNAVOIDABLE.search(reason):
            report.outcome = "failed"
            report.longrepr = f"{reason}; nothing is skipped here that could be installed"
    return report


def pytest_collection_finish() -> None:
    gc.enable()
    _look_through_no_more()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
    yield
    if nextitem is not None and nextitem.path != item.path:
        _look_through_no_more()


def _look_through_no_more() -> None:
    """Leaves what outlives a module (libraries, all tests) out of the garbage collector's rounds.

    A session collects when it ends: looking at each of those objects took most of a small one's
    time. What later tests make is collected as ever.
    """
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()
    shutil.rmtree(CACHE, ignore_errors=True)


def diagonal(sizes: Iterable[Any], budgets: Iterable[Any]) -> list[Any]:
    """Every pair; as many as the longer list has values, each in one, stay in `make test`."""
    rows, columns = [*sizes], [*budgets]
    kept = {(n % len(rows), n % len(columns)) for n in range(max(len(rows), len(columns)))}
    return [
        pytest.param(size, budget, marks=[] if (row, column) in kept else [pytest.mark.thorough])
        for row, size in enumerate(rows)
        for column, budget in enumerate(columns)
    ]


def thorough_but(quick: Iterable[Any], every: Iterable[Any]) -> list[Any]:
    """Every value; those of `quick`, which take different paths, stay in `make test`."""
    kept = [*quick]
    return [pytest.param(one, marks=[] if one in kept else [pytest.mark.thorough]) for one in every]


def processor_s(work: Callable[[], object], limit: float) -> float:
    """Seconds of the processor that `work` takes: other work on the machine counts only by the
    caches it takes away, and so a try beyond the limit is made again, twice at most.
    """
    took = limit
    for _ in range(3):
        started = time.process_time()
        work()
        took = time.process_time() - started
        if took < limit:
            break
    return took


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's HYIMG_ variables and hyimg.toml must not change what a test sees; its cache is
    empty.
    """
    for name in [name for name in os.environ if name.startswith("HYIMG_")]:
        if name not in ("HYIMG_GOLDENS", "HYIMG_TESTS_SKIP"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HYIMG_CACHE_DIR", str(CACHE / secrets.token_hex(8)))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(CACHE / "config"))


@pytest.fixture(autouse=True)
def _nothing_left_in_the_repository(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """Fails a test that writes beside the sources: outside `tmp_path`, by a relative name."""
    # Else a store in a relative folder, of a test before, keeps what this one reads.
    monkeypatch.setattr(remote, "_copies", [])
    before = os.listdir(REPOSITORY)
    yield
    left = [name for name in os.listdir(REPOSITORY) if name not in before and name[0] != "."]
    assert not left, f"in {REPOSITORY}"


@pytest.fixture
def write_manifest(tmp_path: Path) -> WriteManifest:
    """Writes lines (objects, or text as it is) into a JSONL file and gives its path."""

    def write(*lines: Mapping[str, Any] | str, name: str = "jobs.jsonl") -> Path:
        texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
        path = tmp_path / name
        path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
        return path

    return write


@pytest.fixture
def write_picture(tmp_path: Path) -> Callable[..., Path]:
    """Writes a small picture with a red square on white and gives its path."""

    def write(name: str = "source.png", size: tuple[int, int] = (64, 48)) -> Path:
        picture = Image.new("RGB", size, "white")
        picture.paste((220, 30, 30), (8, 8, size[0] // 2, size[1] // 2))
        picture.save(tmp_path / name)
        return tmp_path / name

    return write


@dataclass(frozen=True)
class Ran:
    """What a command line left behind."""

    code: int
    out: str
    err: str

    @property
    def json_lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


@pytest.fixture
def run_cli(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Ran]:
    """Runs `hyimg …` in this process, in an empty working folder, and gives what it left."""
    from hyimg_cli.cli import app

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")

    def run(*arguments: object, stdin: str = "") -> Ran:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        code = app.run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return run


@pytest.fixture
def read_lines() -> Callable[[Path], list[dict[str, Any]]]:
    """The objects of a JSONL file."""

    def read(path: Path) -> list[dict[str, Any]]:
        lines: Iterable[str] = path.read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    return read
