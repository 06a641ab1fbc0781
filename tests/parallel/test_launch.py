"""A launched process, which ends with this one from its very start."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

TESTS = Path(__file__).parents[1]
DRIVER = """
import sys, time
from hyimg_cli.parallel.launch import ChildProcess
child = ChildProcess(sys.argv[1], {"PYTHONPATH": sys.argv[2], "STOP_AT_START": sys.argv[3]})
print(child.process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("module", "stops_at_start"),
    [("json", True), ("stops_as_it_is_imported", False), ("sleeps_as_it_is_imported", False)],
)
def test_one_that_starts_is_gone_with_a_driver_that_is_killed(
    tmp_path: Path, module: str, stops_at_start: bool
) -> None:
    mark = tmp_path / "mark"
    if stops_at_start:
        mark.touch()
    path = os.pathsep.join(map(str, [TESTS / "stopped_at_start", TESTS.parent]))
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, module, path, str(mark)], stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    child = psutil.Process(int(driver.stdout.readline()))
    wanted = psutil.STATUS_SLEEPING if module.startswith("sleeps") else psutil.STATUS_STOPPED
    until = time.monotonic() + 60
    while child.status() != wanted or mark.exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    driver.kill()
    driver.communicate()
    _, alive = psutil.wait_procs([child], timeout=60)
    assert not alive
