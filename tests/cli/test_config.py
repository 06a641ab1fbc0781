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


@pytest.mark.parametrize("command", ["check", "plan", "generate"])
def test_each_command_of_a_run_reads_it(
    run_cli: Run, write_manifest: Write, config: Any, fake_session: Any, command: str
) -> None:
    config("[sampling]\nsteps = 3\n")
    manifest = write_manifest({"prompt": "x"})
    assert "recipe.unknown" in run_cli(command, manifest).err
    assert run_cli(command, manifest, "--no-config").code == 0


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


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('[model]\ndtype = "float32"\n\nmodel = "elsewhere"\n', "hyimg.toml: model.model"),
        ('[ "model" ]\nvideo_model = "x"\n', "hyimg.toml: model.video_model"),
        ('model.revision = "x"\n', "hyimg.toml: model.revision"),
        ('[sampling]\nseed = 1\n[cache]\ncache_dir = "/x"', "hyimg.toml: cache.cache_dir"),
        ('output = { output_dir = "x" }', "hyimg.toml: output.output_dir"),
    ],
)
def test_it_may_not_choose_what_is_loaded_or_where_is_written(
    run_cli: Run, write_manifest: Write, config: Any, fake_session: Any, text: str, place: str
) -> None:
    config(text)
    manifest = write_manifest({"prompt": "x"})
    ran = run_cli("generate", manifest)
    assert (ran.code, "error[recipe.not-by-itself]" in ran.err) == (2, True)
    assert f"--> {place}\n" in ran.err
    assert "--recipe hyimg.toml" in ran.err
    ran = run_cli("generate", manifest, "--recipe", "./hyimg.toml")
    assert "not-by-itself" not in ran.err


@pytest.mark.parametrize("text", ["[model", "[sampling]\nseed = -1", "[nothing]\n"])
def test_its_faults_are_told(run_cli: Run, write_manifest: Write, config: Any, text: str) -> None:
    config(text)
    ran = run_cli("check", write_manifest({"prompt": "x"}))
    assert (ran.code, "--> hyimg.toml" in ran.err) == (2, True)


def test_something_else_of_that_name(run_cli: Run, write_manifest: Write, tmp_path: Path) -> None:
    (tmp_path / "hyimg.toml").mkdir()
    ran = run_cli("check", write_manifest({"prompt": "x"}))
    assert (ran.code, "recipe.unreadable" in ran.err) == (2, True)


def test_a_quiet_run_is_quiet(run_cli: Run, write_manifest: Write, config: Any) -> None:
    config("[sampling]\nseed = 1\n")
    assert run_cli("check", write_manifest({"prompt": "x"}), "-q").err == ""
