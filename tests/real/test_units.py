"""Files that other programs read: the systemd unit, shell scripts, and a machine whose root cannot
be written.
"""

import re
from pathlib import Path

from real.commands import HERE, QUICK, REPOSITORY, Hyimg, assert_each_done_once, lines_of
from real.conftest import Needs


def test_systemd_takes_the_documented_unit(needs: Needs, hyimg: Hyimg) -> None:
    needs("systemd-analyze")
    page = (REPOSITORY / "docs/serve-operation.md").read_text()
    (unit,) = re.findall(r"```ini\n(.*?)```", page, re.S)
    path = hyimg.folder / "hyimg.service"
    path.write_text(unit.replace("/opt/hyimg/bin/hyimg", str(HERE / "hyimg")))
    said = hyimg.done("systemd-analyze", "verify", path)
    assert "hyimg.service" not in said


def test_shell_scripts(needs: Needs, hyimg: Hyimg) -> None:
    needs("shellcheck")
    scripts = [*REPOSITORY.glob("recipes/**/*.sh"), *REPOSITORY.glob(".ci/*")]
    assert len(scripts) > 2
    hyimg.done("shellcheck", *scripts)


def test_a_root_that_cannot_be_written(needs: Needs, hyimg: Hyimg, tmp_path: Path) -> None:
    """Only the output folder and a temporary one can be written."""
    needs("unshare", root=True)
    hyimg.write_jobs(2)
    out = tmp_path / "out"
    out.mkdir()
    mounts = (
        f"mount -t tmpfs none /dev/shm && mount --bind {out} {out} && mount -o remount,bind,ro /"
    )
    words = " ".join(["generate", "jobs.jsonl", "-o", str(out / "run"), *QUICK])
    hyimg.done("unshare", "-m", "bash", "-c", f"{mounts} && hyimg {words}", TMPDIR="/dev/shm")
    assert_each_done_once(lines_of(out / "run"), 2)
