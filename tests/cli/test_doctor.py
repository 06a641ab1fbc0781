"""`hyimg doctor` on this very machine: ready for the embedded models, not for an absent one."""

import getpass
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]
# Whether LPIPS has its weights is the machine's.
MAY_WARN = {"lpips", "packages", "python", "processor"}


def test_this_machine_is_ready_for_the_embedded_models(
    run_cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijkl")
    ran = run_cli("doctor", "--device", "cpu", "--ranks", "--json")
    (report,) = ran.json_lines
    assert (ran.code, report["ready"]) == (0, True), ran.out
    found = {check["name"]: check for check in report["checks"]}
    assert {name for name, check in found.items() if check["status"] != "ok"} <= MAY_WARN
    assert "with equal pixels" in found["trial"]["found"]
    assert "added up to [3.0, 3.0]" in found["ranks"]["found"]
    assert all(check["seconds"] >= 0 for check in found.values())
    assert not (tmp_path / "runs").exists()
    for secret in ("hf_abcdefghijkl", str(Path.home()) + "/", str(tmp_path), socket.gethostname()):
        assert secret not in ran.out
    assert f"/{getpass.getuser()}/" not in ran.out


def test_a_model_that_is_absent_makes_it_not_ready(
    run_cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hyimg_cli.doctor import checks

    cheap = [pair for pair in checks.CHECKS if pair[0] in ("hub", "checkpoint", "memory")]
    monkeypatch.setattr("hyimg_cli.cli.doctor.CHECKS", tuple(cheap))
    ran = run_cli("doctor", "--model", tmp_path / "models" / "absent", "--device", "cpu")
    assert ran.code == 3
    lines = ran.out.splitlines()
    assert lines[0].startswith("ok      hub: ")
    assert lines[1] == "failed  checkpoint: absent: checkpoint folder not found: …/absent"
    assert lines[2].startswith("        hint: give a folder")
    assert lines[3].startswith("warning memory: ")
    assert lines[-1].startswith("not ready for absent and tiny-video: 1 ok, 1 warning, 1 failed")
    assert str(tmp_path) not in ran.out


def test_settings_of_the_run_are_those_of_the_check(
    run_cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recipe's settings too; ranks are started where the run would start some."""
    seen: list[Any] = []

    def run_checks(config: Any, checks: Any) -> Any:
        seen.append((config, dict(checks)))
        return iter(())

    monkeypatch.setattr("hyimg_cli.cli.doctor.run_checks", run_checks)
    (tmp_path / "r.toml").write_text("[parallel]\ncfg_parallel_size = 2\n")
    assert run_cli("doctor", "--recipe", "r.toml", "--quantization", "nf4", "-o", "x").code == 0
    assert run_cli("doctor", "--video-model", "other/model").code == 0
    assert run_cli("doctor", "--tp-size", "2").code == 0
    assert run_cli("doctor", "--replicas", "2", "--tp-size", "2").code == 0
    (first, with_ranks), (second, without), (third, split), (several, _) = seen
    parallel = several.parallel
    assert (parallel.replicas, parallel.tensor_ranks) == (2, 2)
    assert (third.parallel.tensor_ranks, "ranks" in split) == (2, True)
    assert (first.model.quantization, first.output.folder) == ("nf4", Path("x"))
    assert second.model.video_model == "other/model"
    assert ("ranks" in with_ranks, "ranks" in without) == (True, False)


@pytest.mark.parametrize("arguments", [["--quantization", "q3"], ["--recipe", "gone.toml"]])
def test_wrong_usage_exits_2(run_cli: Run, arguments: list[str]) -> None:
    ran = run_cli("doctor", *arguments)
    assert (ran.code, ran.out) == (2, "")
