"""Tests with services that nobody here wrote. Each starts what it needs on this machine's loopback,
in a folder of its own, and ends it; `make test-real` runs them and lists what it could not start.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from real.commands import HERE, Hyimg

# The Debian package of each program; `.ci/packages` installs them.
PACKAGES = {
    "nginx": "nginx-light",
    "munged": "munge",
    "sbatch": "slurm-wlm",
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "shellcheck": "shellcheck",
    "systemd-analyze": "systemd",
    "unshare": "util-linux",
}
Needs = Callable[..., None]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.real)
            item.add_marker(pytest.mark.timeout(1200))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name what was not started, and why."""
    reasons = {
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", [])
        if "tests/real/" in report.nodeid and isinstance(report.longrepr, tuple)
    }
    if reasons:
        terminalreporter.section("not started on this machine")
        for reason in sorted(reasons):
            terminalreporter.line(reason)


@pytest.fixture(scope="session")
def needs() -> Needs:
    """Skips a test whose programs are not installed, or that needs root."""

    def need(*programs: str, root: bool = False) -> None:
        for program in programs:
            if shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None:
                package = PACKAGES.get(program, program)
                pytest.skip(f"{program}: not installed (apt-get install {package})")
        if root and os.geteuid():
            pytest.skip(f"{' and '.join(programs)}: need root to start")

    return need


@pytest.fixture
def hyimg(tmp_path: Path) -> Iterator[Hyimg]:
    """The installed command, in an empty folder; what it left running is ended."""
    folder = tmp_path / "work"
    folder.mkdir()
    found = Hyimg(folder, {"PATH": f"{HERE}:{os.environ['PATH']}:/usr/sbin:/sbin"})
    yield found
    found.end()
