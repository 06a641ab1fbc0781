"""`hyimg pull` against a hub on loopback: what comes, what is refused, and where it goes on."""

import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_editors
from conftest import REPOSITORY, thorough_but
from every_checkpoint import FOLDERS, WRITERS
from hub_server import COMMIT, Hub, served
from huggingface_hub import constants
from model_files import gguf

from hyimg_cli.loading import hub as hub_room
from hyimg_cli.loading.checkpoint import parts_index
from hyimg_cli.models import fetching, registry

TINY, WEIGHTS = FOLDERS["tiny-image"], "model.safetensors"
MODEL = "acme/tiny"
Run = Callable[..., Any]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that has a small model with a second form of its weights, and an empty cache."""
    folder = tmp_path / "served"
    shutil.copytree(TINY, folder)
    (folder / "tiny-all-in-one.safetensors").write_bytes(b"\0" * 3000)
    with served(acme_tiny=folder) as found:
        template = found.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", found.address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        fetching._fetched.cache_clear()
        registry._opened.cache_clear()
        yield found


def blobs(tmp_path: Path) -> Path:
    return tmp_path / "hub" / "models--acme--tiny" / "blobs"


def weights_in(tmp_path: Path) -> Path:
    return tmp_path / "hub" / "models--acme--tiny" / "snapshots" / COMMIT / WEIGHTS


def test_it_shows_what_will_come_fetches_it_and_ends_with_the_command_to_run(
    hub: Hub, run_cli: Run, tmp_path: Path
) -> None:
    ran = run_cli("pull", MODEL, "--yes")
    assert ran.code == 0, ran.err
    for text in ("licence unknown, not gated", "19.4 MB", "left out: 1 file", "memory: tiny: "):
        assert text in ran.out
    assert ran.out.splitlines()[-1].startswith("run: hyimg generate photos --prompt ")
    assert ran.out.endswith(f"--model {MODEL}\n")
    assert f"{MODEL} is complete" in ran.err
    assert weights_in(tmp_path).read_bytes() == (TINY / WEIGHTS).read_bytes()
    assert "tiny-all-in-one.safetensors" not in hub.fetched()
    # A second time, nothing comes; and a run finds it without the hub.
    hub.asked.clear()
    ran = run_cli("pull", MODEL)
    assert ran.code == 0
    assert "to fetch: nothing of 19.4 MB" in ran.out
    with hub_room.stays_local():
        assert registry.resolve_model(MODEL) == weights_in(tmp_path).parent


def test_a_prompt_rewriter_comes_and_is_found(hub: Hub, run_cli: Run, tmp_path: Path) -> None:
    """It draws nothing, so the command to run is another; and it is no model for --model."""
    hub.models["acme/pup"] = tiny_editors.write_rewriter(tmp_path / "source")
    ran = run_cli("pull", "acme/pup", "--yes")
    assert ran.code == 0, ran.err
    assert ran.out.splitlines()[-1].startswith("run: hyimg think ")
    model = tiny_editors.write(tmp_path / "flux3", "flux3")
    index = json.loads((model / "modular_model_index.json").read_text())
    index["prompt_upsampler"][2]["pretrained_model_name_or_path"] = "acme/pup"
    (model / "modular_model_index.json").write_text(json.dumps(index))
    registry.find_rewriter(str(model))
    (tmp_path / "prompts.txt").write_text("a red circle\n")
    ran = run_cli("check", "prompts.txt", "--model", "acme/pup")
    assert ran.code == 3
    assert "this is a language model, Qwen3.5" in ran.err


def test_as_json_it_says_the_same(hub: Hub, run_cli: Run) -> None:
    ran = run_cli("pull", MODEL, "--dry-run", "--json")
    (found,) = ran.json_lines
    size = (TINY / WEIGHTS).stat().st_size
    assert ran.code == 0
    assert found["parts"]["model"] == size < found["to_fetch"]
    assert (found["commit"], found["gated"], found["makes"]) == (COMMIT, False, "pictures")
    assert found["left_out"] == {"tiny-all-in-one.safetensors": 3000}


@pytest.mark.parametrize(
    "kind", thorough_but(["tiny-video", "official", "lingbot"], [*FOLDERS, *WRITERS])
)
def test_of_every_family_only_what_is_read_comes(hub: Hub, tmp_path: Path, kind: str) -> None:
    """Not pickles, code, other precisions, previews, nor the authors' own single file."""
    source = tmp_path / "source"
    shutil.copytree(FOLDERS[kind], source) if kind in FOLDERS else WRITERS[kind](source)
    hub.models["acme/other"] = source
    own = {str(one.relative_to(source)) for one in source.rglob("*") if one.is_file()}
    decoys = {"authors.safetensors", "own.py", "preview.png", "extra/model.safetensors"}
    for part in {name.rpartition("/")[0] for name in own if name.endswith(".safetensors")}:
        before = f"{part}/" if part else ""
        decoys |= {f"{before}pytorch_model.bin", f"{before}model.fp16.safetensors"}
        decoys |= {f"{before}model.safetensors.index.fp16.json"}
    if parts_index(source).is_file():
        decoys |= {"extra/config.json"}
    for name in decoys - own:
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_bytes(b"{}")
    folder = registry.fetch("acme/other")
    came = {str(one.relative_to(folder)) for one in folder.rglob("*") if one.is_file()}
    assert came == {one for one in own if not one.endswith((".py", ".npy", ".npz", ".pth"))}
    assert came.isdisjoint(decoys - own)
    assert {*hub.fetched()} <= came  # equal files come once


@pytest.mark.parametrize("command", ["check", "plan"])
def test_check_and_plan_of_an_absent_id_name_the_command_and_ask_nobody(
    hub: Hub, run_cli: Run, tmp_path: Path, command: str
) -> None:
    (tmp_path / "prompts.txt").write_text("a red circle\n")
    ran = run_cli(command, "prompts.txt", "--model", MODEL, "--revision", "v2")
    assert ran.code == 3
    assert hub.asked == []
    assert "error[checkpoint.missing]: acme/tiny is not here: neither a folder nor in" in ran.err
    assert "hint: fetch it with: hyimg pull acme/tiny --revision v2" in ran.err


def test_a_run_fetches_the_same_files(hub: Hub, tmp_path: Path) -> None:
    assert registry.resolve_model(MODEL) == weights_in(tmp_path).parent
    assert WEIGHTS in hub.fetched()
    assert "tiny-all-in-one.safetensors" not in hub.fetched()
    # What is here counts if the hub is gone.
    fetching._fetched.cache_clear()
    hub.models.clear()
    assert registry.resolve_model(MODEL) == weights_in(tmp_path).parent


def test_it_goes_on_where_a_killed_one_ended(hub: Hub, tmp_path: Path) -> None:
    data = (TINY / WEIGHTS).read_bytes()
    listing = hub_room.listed(MODEL)
    digest = hub_room.digest.of_bytes(data)
    blobs(tmp_path).mkdir(parents=True)
    (blobs(tmp_path) / f"{digest}.incomplete").write_bytes(data[:10_000_001])
    hub.cuts[WEIGHTS] = 5_000_000  # and the connection breaks, too
    hub.asked.clear()
    hub_room.fetch(listing, [WEIGHTS])
    ranges = [one[2] for one in hub.asked if one[0] == "GET" and one[1].endswith(WEIGHTS)]
    assert ranges == ["bytes=10000001-"] * 2  # what came is written by 10 MiB
    assert weights_in(tmp_path).read_bytes() == data
    assert not [*blobs(tmp_path).glob("*.incomplete")]


def test_bytes_of_another_digest_are_refused_and_fetched_anew(hub: Hub, tmp_path: Path) -> None:
    hub.wrong.add(WEIGHTS)
    listing = hub_room.listed(MODEL)
    with pytest.raises(hub_room.CheckpointError, match="came damaged") as caught:
        hub_room.fetch(listing, [WEIGHTS])
    assert caught.value.code == "checkpoint.damaged"
    assert not [*blobs(tmp_path).iterdir()]
    hub.wrong.clear()
    assert (hub_room.fetch(listing, [WEIGHTS]) / WEIGHTS).exists()


def test_a_full_disk_ends_it_and_the_next_try_goes_on(hub: Hub, tmp_path: Path) -> None:
    """Files of this process may have 8 MB at most; the model's weights have 19."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    listing = hub_room.listed(MODEL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8_000_000, hard))
    try:
        with pytest.raises(hub_room.HyimgError) as caught:
            hub_room.fetch(listing, [WEIGHTS])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.code.startswith("storage.")
    assert caught.value.exit_code == 3
    (partial,) = blobs(tmp_path).glob("*.incomplete")
    assert partial.stat().st_size == 8_000_000
    hub.asked.clear()
    hub_room.fetch(listing, [WEIGHTS])
    assert "bytes=8000000-" in [one[2] for one in hub.asked]


def test_a_disk_that_is_too_small_is_refused_before_anything_comes(
    hub: Hub, run_cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    ran = run_cli("pull", MODEL, "--yes")
    assert ran.code == 3
    assert "error[storage.full]: 19.4 MB must come, and 1.0 MB are" in ran.err
    assert "HF_HOME" in ran.err
    assert not weights_in(tmp_path).exists()


def test_nobody_is_there_to_answer(hub: Hub, run_cli: Run, tmp_path: Path) -> None:
    ran = run_cli("pull", MODEL)
    assert ran.code == 2
    assert "error[usage.not-confirmed]" in ran.err
    assert "--yes" in ran.err
    assert not (tmp_path / "hub").exists()
    assert "to fetch: 19.4 MB" in ran.out


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("n\n", 1), ("\n", 1)])
def test_it_asks(
    hub: Hub,
    run_cli: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
    code: int,
) -> None:
    terminal = type("Terminal", (io.StringIO,), {"isatty": lambda _: True})
    monkeypatch.setattr(io, "StringIO", terminal)
    ran = run_cli("pull", MODEL, stdin=answer)
    assert ran.code == code
    assert "Fetch 19.4 MB?" in ran.err
    assert weights_in(tmp_path).exists() == (code == 0)


def test_a_gated_model_needs_a_token_which_is_never_printed(
    hub: Hub, run_cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.gated.add(MODEL)
    ran = run_cli("pull", MODEL, "--yes")
    assert ran.code == 3
    assert "error[checkpoint.gated]: acme/tiny is gated" in ran.err
    assert f"accept them at {hub.address}/acme/tiny" in ran.err
    assert "HF_TOKEN" in ran.err
    monkeypatch.setenv("HF_TOKEN", hub.token)
    hub.revisions["bad"] = "d" * 40
    for words in (["--yes"], ["--revision", "none", "-y"]):
        ran = run_cli("pull", MODEL, *words)
        assert hub.token not in ran.out + ran.err
    assert weights_in(tmp_path).exists()
    assert not [
        one
        for one in tmp_path.rglob("*")
        if one.is_file() and hub.token.encode() in one.read_bytes()
    ]


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["acme/none"], "missing", "the hub has no model acme/none, or it is private"),
        ([MODEL, "--revision", "v9"], "missing", "acme/tiny has no revision 'v9'"),
        (["qwen-image-edit"], "missing", "did you mean Qwen/Qwen-Image-Edit"),
        (["./nothing/here"], "missing", "checkpoint folder not found"),
        (["acme/ti ny"], "missing", "'acme/ti ny' is not a name on the hub"),
    ],
)
def test_what_cannot_be_fetched_says_why(
    hub: Hub, run_cli: Run, words: list[str], code: str, says: str
) -> None:
    ran = run_cli("pull", *words, "--yes")
    assert ran.code == 3
    assert f"error[checkpoint.{code}]" in ran.err
    assert says in ran.err


def test_a_model_of_this_machine_needs_nothing(hub: Hub, run_cli: Run) -> None:
    for model in ("tiny-image", TINY):
        ran = run_cli("pull", model)
        assert ran.code == 0
        assert "nothing to fetch" in ran.err
    assert hub.asked == []


def test_a_revision_comes_under_its_name(hub: Hub) -> None:
    hub.revisions["v2"] = "d" * 40
    registry.fetch(MODEL, "v2")
    with hub_room.stays_local():
        assert registry.resolve_model(MODEL, "v2").name == "d" * 40
        assert registry.resolve_model(MODEL, "d" * 40).name == "d" * 40
        with pytest.raises(hub_room.CheckpointError, match="acme/tiny is not here"):
            registry.resolve_model(MODEL)


def test_without_the_hub(
    hub: Hub, run_cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offline what is here is checked; and an address at which nobody listens is named."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    ran = run_cli("pull", MODEL, "--yes")
    assert ran.code == 3
    assert "HF_HUB_OFFLINE is set" in ran.err
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert run_cli("pull", MODEL, "--yes").code == 0
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    ran = run_cli("pull", MODEL)
    assert ran.code == 0
    assert f"{MODEL} is complete" in ran.err
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    ran = run_cli("pull", "acme/else", "--yes")
    assert ran.code == 3
    assert "the hub (http://127.0.0.1:9) does not answer: ConnectError" in ran.err


def test_a_checkpoint_that_hyimg_does_not_run_is_refused_before_it_comes(
    hub: Hub, run_cli: Run, tmp_path: Path
) -> None:
    folder = hub.models[MODEL]
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02")
    (folder / "tiny-Q8_0.gguf").write_bytes(b"GGUF")
    ran = run_cli("pull", MODEL, "--yes")
    assert ran.code == 3
    assert "error[checkpoint.no-weights]: acme/tiny has no model.saf" in ran.err
    assert "hyimg pull acme/tiny FILE; it has tiny-Q8_0.gguf" in ran.err
    assert not (tmp_path / "hub").exists()


def test_one_file_of_a_repository_comes_alone(hub: Hub, run_cli: Run, tmp_path: Path) -> None:
    """Its header says what it is; of what is not a model of hyimg, nothing comes."""
    folder, name = hub.models[MODEL], "double_stream_modulation_img.lin.weight"
    gguf(folder / "klein-Q8_0.gguf", {name: ("Q8_0", (64, 64))})
    ran = run_cli("pull", MODEL, "klein-Q8_0.gguf", "--yes")
    assert ran.code == 0, ran.err
    assert "a transformer of FLUX.2, gguf" in ran.out
    path = weights_in(tmp_path).with_name("klein-Q8_0.gguf")
    assert path.read_bytes() == (folder / "klein-Q8_0.gguf").read_bytes()
    assert "--model acme/tiny/klein-Q8_0.gguf --components " in ran.out.splitlines()[-1]
    assert WEIGHTS not in hub.fetched()
    assert not weights_in(tmp_path).exists()
    hub.asked.clear()
    ran = run_cli("pull", MODEL, "tiny-all-in-one.safetensors", "--yes")
    assert ran.code == 3
    assert "error[checkpoint." in ran.err
    ran = run_cli("pull", MODEL, "klein.gguf", "--yes")
    assert ran.code == 3
    assert "acme/tiny has no file klein.gguf" in ran.err
    assert "klein-Q8_0.gguf" in ran.err


@pytest.mark.thorough
def test_killed_at_any_moment_it_ends_with_the_same_bytes(hub: Hub, tmp_path: Path) -> None:
    hub.pace_s = 0.02
    environment = os.environ | {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path)}
    command = (sys.executable, "-m", "hyimg_cli", "pull", MODEL, "--yes", "-q")

    def has_begun(size: int) -> bool:
        """What came is written by 10 MiB."""
        sizes = [one.stat().st_size for one in blobs(tmp_path).glob("*.incomplete")]
        return bool(sizes) and max(sizes) >= size

    for kill in (signal.SIGKILL, signal.SIGINT, signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
        process = subprocess.Popen(command, env=environment, cwd=REPOSITORY)
        while process.poll() is None and not has_begun(10_000_000):
            time.sleep(0.05)
        time.sleep(0.5)
        process.send_signal(kill)
        process.wait()
    hub.pace_s = 0
    subprocess.run(command, env=environment, cwd=REPOSITORY, check=True)
    assert weights_in(tmp_path).read_bytes() == (TINY / WEIGHTS).read_bytes()
    assert "bytes=10485760-" in [one[2] for one in hub.asked]
