"""hyimg.toml is read in the working folder, only by commands of a run, and cannot choose a
model.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hyimg_cli.cli.commands import LazyCommand
from hyimg_cli.cli.options import settings_of

Run = Callable[..., Any]
Write = Callable[..., Path]


@pytest.fixture
def config(tmp_path: Path) -> Callable[[str], Path]:
    """Writes hyimg.toml into the working folder."""

    def write(text: str) -> Path:
        (tmp_path / "hyimg.toml").write_text(text)
        return tmp_path / "hyimg.toml"

    return write


def flags_of(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "run.json").read_text())["flags"]
    return found


def test_it_stands_below_the_recipe_and_above_the_default(
    run_cli: Run, write_manifest: Write, config: Any, fake_session: Any, tmp_path: Path
) -> None:
    config("[sampling]\nnum_inference_steps = 3\nseed = 5\nguidance_scale = 2\n")
    (tmp_path / "run.toml").write_text("[sampling]\nseed = 6\n")
    arguments = ("generate", write_manifest({"prompt": "x"}), "--recipe", "run.toml")
    ran = run_cli(*arguments, "--guidance-scale", "4", "-o", "out")
    assert ran.code == 0
    told = "hyimg.toml in this folder sets num_inference_steps, seed, guidance_scale; "
    assert ran.err.count(told) == 1
    flags = flags_of(tmp_path / "out")
    assert flags["num_inference_steps"] == {"value": 3, "origin": "hyimg.toml"}
    assert flags["seed"] == {"value": 6, "origin": "recipe"}
    assert flags["guidance_scale"] == {"value": 4.0, "origin": "flag"}
    assert run_cli(*arguments, "--no-config", "-o", "other").code == 0
    assert flags_of(tmp_path / "other")["num_inference_steps"]["origin"] == "model"


@pytest.mark.parametrize("command", ["bench", "eval", "replay", "doctor", "cache"])
def test_no_other_command_does(
    config: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    config("not toml at all")
    monkeypatch.chdir(tmp_path)
    loaded = LazyCommand(command).load_command()
    names = {parameter.name for parameter in loaded.params}
    assert "no_config" not in names
    settings_of(dict.fromkeys(names))


def test_the_users_own_stands_below_the_folders_and_may_choose_a_model(
    run_cli: Run,
    write_manifest: Write,
    config: Any,
    fake_session: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    home = tmp_path / "home"
    (home / ".config").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CONFIG_HOME")
    own = home / ".config/hyimg.toml"
    own.write_text(
        '[sampling]\nseed = 5\n[output]\nformat = "jpeg"\n[model]\nmodel = "tiny-image"\n'
    )
    config("[sampling]\nseed = 6\n")
    arguments = ("generate", write_manifest({"prompt": "x"}))
    ran = run_cli(*arguments, "-o", "out")
    assert ran.code == 0
    assert "~/.config/hyimg.toml sets seed, format, model; --no-config ignores it\n" in ran.err
    assert "toy" not in ran.err  # it was chosen
    flags = flags_of(tmp_path / "out")
    assert flags["seed"] == {"value": 6, "origin": "hyimg.toml"}
    assert flags["format"] == {"value": "jpeg", "origin": "user's hyimg.toml"}
    assert run_cli(*arguments, "--no-config", "-o", "other").code == 0
    assert flags_of(tmp_path / "other")["format"]["origin"] == "default"
    # Where XDG_CONFIG_HOME says, by that name; a fault is told with its place.
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(elsewhere))
    (elsewhere / "hyimg.toml").write_text("[sampling]\nsede = 1\n")
    ran = run_cli("check", arguments[1])
    assert ran.code == 2
    assert f"--> {elsewhere}/hyimg.toml: sampling.sede\n  hint: did you mean seed?" in ran.err
    # The folder of the file itself is no reason to read it twice, or to trust it less.
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert run_cli("check", arguments[1]).err.count("hyimg.toml") == 1
