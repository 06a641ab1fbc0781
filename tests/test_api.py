"""The Python face, as docs/python.md shows it, and what a run refuses before anything loads."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import processor_s
from event_kinds import is_done
from PIL import Image

from hyimg_cli import (
    ModelChoice,
    OutputConfig,
    RunConfig,
    RunEnded,
    RunFolder,
    RunPlanned,
    Sampling,
    Session,
    draw,
    make_plan,
    read_manifest,
    run_manifest,
)
from hyimg_cli.engine import runner
from hyimg_cli.errors import CheckpointError, ManifestError, UsageError
from hyimg_cli.models import registry
from hyimg_cli.settings.config import build_run_config, settings_of, settle
from hyimg_cli.settings.run import BatchConfig, ReuseConfig
from hyimg_cli.spec.events import JobEnded
from hyimg_cli.spec.job import SizeRequest
from hyimg_cli.spec.options import Lora
from hyimg_cli.spec.plan import Plan
from hyimg_cli.spec.step_cache import StepCache

Write = Callable[..., Path]
UNFIT = (
    {"prompt": "a <boi>"},
    {"prompt": "a", "cot_text": "<img>"},
    {"prompt": "word " * 5000, "n": 3},
    {"prompt": "a", "use_system_prompt": "en_unified"},
    {"prompt": "a", "cot_token_ids": [10**6]},
    {"prompt": "a", "system_prompt": "b", "drop_think": True, "bot_task": "think_recaption"},
)
CODES = (
    ("manifest.control-token", "prompt"),
    ("manifest.control-token", "cot_text"),
    ("manifest.too-long", "prompt"),
    ("manifest.system-prompt", "use_system_prompt"),
    ("manifest.out-of-range", "cot_token_ids"),
    ("manifest.system-prompt", "drop_think"),
)
QUICK = {"num_inference_steps": 1, "bot_task": "none", "size": "1:1"}


PAGES = [Path(__file__).parents[1] / "docs" / name for name in ("python.md", "python-sessions.md")]


def test_the_pages_on_python_run_as_they_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = "".join(path.read_text(encoding="utf-8") for path in PAGES)
    (lines,) = re.findall(r"```json\n(.*?)```", page, re.S)
    monkeypatch.chdir(tmp_path)
    Path("jobs.jsonl").write_text(lines)
    said, names = [], dict[str, Any]()
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page, re.S)):
        exec(compile(block, f"Python, example {number}", "exec"), names)
        said.append(capsys.readouterr().out.splitlines())
    run, again, _, pictures, results, best, memory, distances, errors, session = said
    assert run == ["2 done 0 failed"]
    assert again == pictures == []
    assert memory == ["(64, 64)"]
    assert names["bar"].n == names["summary"].done == 2
    assert names["pictures"]["circle"].size == (64, 64)
    assert [line.split()[:2] for line in results][1] == ["square", "7"]
    assert [line.split()[0] for line in best] == ["circle", "square"]
    assert [line.split()[0] for line in distances] == ["circle", "square"]
    assert [line.split()[0] for line in errors] == ["faulty.jsonl:1:", "faulty.jsonl:2:"]
    assert session == ["outputs/circle.png", "outputs/square.png"]


def test_a_run_tells_its_plan_its_jobs_and_its_end(write_manifest: Write, tmp_path: Path) -> None:
    manifest = write_manifest({"prompt": "a", "custom_id": "a"} | QUICK, {"prompt": "b"} | QUICK)
    config = RunConfig(OutputConfig(tmp_path / "out"))
    events: list[Any] = []
    summary = run_manifest(manifest, config, select="a", on_event=events.append)
    (planned,) = [event for event in events if isinstance(event, RunPlanned)]
    assert [job.custom_id for job in planned.plan.jobs] == ["a"]
    (done,) = [event.outcome for event in events if is_done(event)]
    assert (tmp_path / "out" / done.outputs[0].path).is_file()
    assert events[-2] == RunEnded(summary)
    assert (summary.done, summary.left) == (1, 0)
    assert events[-1].text == f"report: {tmp_path / 'out' / 'report.html'}"
    assert run_manifest(read_manifest(manifest), config, select="a").skipped == 1
    origin = json.loads((tmp_path / "out" / "run.json").read_text())["flags"]["output_dir"]
    assert origin == {"value": "out", "origin": "RunConfig"}


def test_what_an_event_s_reader_raises_ends_the_run_in_order(
    write_manifest: Write, tmp_path: Path
) -> None:
    manifest = write_manifest(*({"prompt": f"a {n}"} | QUICK for n in range(3)))
    config = RunConfig(OutputConfig(tmp_path / "out"), batch=BatchConfig(max_size=1))
    ended: list[Any] = []

    def stop(event: Any) -> None:
        if isinstance(event, RunEnded):
            ended.append(event.error)
        if is_done(event):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_manifest(manifest, config, on_event=stop)
    assert [type(error) for error in ended] == [KeyboardInterrupt]
    again = run_manifest(manifest, config)
    assert again.failed == 0
    assert again.done < 3
    assert again.done + again.skipped == 3


def test_a_configuration_is_checked_as_flags_are(write_manifest: Write, tmp_path: Path) -> None:
    manifest, output = write_manifest({"prompt": "a"}), OutputConfig(tmp_path / "out")
    wrong: Any = "float7"
    with pytest.raises(UsageError, match="float7") as caught:
        run_manifest(manifest, RunConfig(output, model=ModelChoice(dtype=wrong)))
    assert caught.value.where == "model.dtype"
    reuse = ReuseConfig(kv_reuse=False, required=True)
    with pytest.raises(UsageError, match=r"reuse\.required and reuse\.kv_reuse cannot"):
        run_manifest(manifest, RunConfig(output, reuse=reuse))
    assert not (tmp_path / "out").exists()


def test_every_setting_goes_from_a_configuration_and_back() -> None:
    sampling = Sampling(
        size=SizeRequest(64, 96),
        step_cache=StepCache(4),
        lora=(Lora("a.safetensors", 0.5),),
        guidance_interval=(0.4, 1.0),
        n=3,
    )
    config = RunConfig(OutputConfig(Path("out"), format="webp"), sampling=sampling)
    settings = settings_of(config)
    assert build_run_config(settings, config.output.folder, None) == config
    by_hand = {name for name, one in settings.items() if one.origin == "RunConfig"}
    given = {"size", "step_cache", "lora", "guidance_interval", "n", "format", "output_dir"}
    assert by_hand == given


def test_a_plan_is_made_of_a_manifest_or_of_jobs(write_manifest: Write) -> None:
    manifest = read_manifest(write_manifest({"prompt": "a", "n": 2}, {"prompt": "b"}))
    plan = make_plan(manifest)
    assert len(plan.jobs) == 3
    assert make_plan(plan.jobs) == plan == make_plan(plan.jobs, registry.model_card)
    assert make_plan([]) == Plan(())


def test_a_faulty_manifest_has_no_plan(write_manifest: Write) -> None:
    with pytest.raises(ManifestError) as caught:
        make_plan(read_manifest(write_manifest({"prompt": ""}, {"prompt": "<boi>"})))
    assert [fault.where for fault in caught.value.faults] == [
        "jobs.jsonl:1: prompt",
        "jobs.jsonl:2: prompt",
    ]


def test_the_names_come_without_torch() -> None:
    code = (
        "import sys; from hyimg_cli import RunFolder, make_plan, read_manifest;"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_numpy_leaves_the_cores_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its threads begin as it is imported and wait for products at full speed."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    code = "import hyimg_cli, numpy, psutil, sys; sys.exit(psutil.Process().num_threads() - 1)"
    subprocess.run([sys.executable, "-c", code], check=True)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    code = "import hyimg_cli, os, sys; sys.exit(int(os.environ['OPENBLAS_NUM_THREADS']) - 2)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_only_the_checkpoint_can_tell_is_a_fault_of_the_line(write_manifest: Write) -> None:
    late = {"prompt": "b", "sede": 1}
    manifest = read_manifest(write_manifest(*UNFIT, {"prompt": "good"}, late))
    jobs, faults = runner.examine(manifest, settle({}, {}, {}))
    expected = [(code, f"jobs.jsonl:{n}: {field}") for n, (code, field) in enumerate(CODES, 1)]
    expected.append(("manifest.unknown-field", "jobs.jsonl:8: sede"))
    assert [(fault.code, fault.where) for fault in faults] == expected
    assert [job.prompt for job in jobs] == ["good"]


def test_it_stops_the_run_or_becomes_a_failed_line(write_manifest: Write) -> None:
    manifest = read_manifest(write_manifest(*UNFIT, {"prompt": "good"}))
    with pytest.raises(ManifestError) as caught:
        runner.accept(manifest, settle({}, {}, {}))
    assert len(caught.value.faults) == len(UNFIT)
    jobs, invalid = runner.accept(manifest, settle({"skip_invalid": True}, {}, {}))
    assert [job.prompt for job in jobs] == ["good"]
    assert [one.custom_id for one in invalid] == [f"jobs-{n:04}" for n in range(1, 7)]
    for one in invalid:
        assert one.error is not None
        assert one.error.hint
        assert one.error.hint not in one.error.message


def test_a_setting_that_no_line_can_take_is_said_once(write_manifest: Write) -> None:
    manifest = read_manifest(write_manifest(*({"prompt": f"a {n}"} for n in range(9))))
    flags = {"use_system_prompt": "en_unified", "skip_invalid": True}
    with pytest.raises(ManifestError) as caught:
        runner.accept(manifest, settle(flags, {}, {}))
    assert [fault.where for fault in caught.value.faults] == ["flag: use_system_prompt"]


def test_in_a_running_job_a_missing_system_prompt_fails_that_job_alone(
    write_manifest: Write, tmp_path: Path
) -> None:
    good, bad = make_plan(
        read_manifest(write_manifest({"prompt": "a"} | QUICK, {"prompt": "b"} | QUICK))
    ).jobs
    plan = make_plan([replace(bad, use_system_prompt="en_unified"), good])
    session = Session(RunConfig(OutputConfig(tmp_path / "out")))
    events = [e for e in session.run(plan) if isinstance(e, JobEnded)]
    ends = {event.outcome.custom_id: event.outcome for event in events}
    assert ends[good.custom_id].status == "done"
    error = ends[bad.custom_id].error
    assert error is not None
    assert error.code == "job.system-prompt"


def test_a_relative_name_is_another_checkpoint_in_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for home, model in (("a", registry.EMBEDDED), ("b", registry.EMBEDDED_VIDEO)):
        (tmp_path / home).mkdir()
        (tmp_path / home / "model").symlink_to(registry.resolve_model(model))
    monkeypatch.chdir(tmp_path / "a")
    of_pictures = registry.fingerprint("./model")
    assert registry.model_card("./model").weight_bytes
    monkeypatch.chdir(tmp_path / "b")
    assert registry.fingerprint("./model") != of_pictures
    with pytest.raises(CheckpointError):
        registry.model_card("./model")


def test_a_resolved_manifest_reads_back(
    run_cli: Any, write_manifest: Write, write_picture: Any, tmp_path: Path
) -> None:
    write_picture("in.png")
    (tmp_path / "checkpoint").symlink_to(registry.resolve_model(registry.EMBEDDED))
    manifest = read_manifest(
        write_manifest(
            {"prompt": "a", "images": ["in.png"], "model": "./checkpoint", "temperature": 0},
            {"prompt": "b", "n": 2, "bot_task": "recaption"},
            {"prompt": "c", "cot_text": "<recaption>d</recaption>"},
            {"prompt": "d", "bot_task": "none"},
        )
    )
    flags = {"drop_think": True}
    jobs, _ = runner.accept(manifest, settle(flags, {}, {}))
    out = tmp_path / "runs" / "out"
    with RunFolder(out) as folder:
        folder.write_resolved(jobs)
    resolved = out / "manifest.resolved.jsonl"
    text = resolved.read_text()
    assert str(tmp_path) not in text
    assert json.loads(text.splitlines()[0])["model"] == "../../checkpoint"
    ran = run_cli("check", resolved, "--json")
    assert (ran.code, ran.json_lines[-1]["summary"]) == (0, {"jobs": 5, "faults": 0})


def test_ten_thousand_prompts_are_examined_in_two_seconds(write_manifest: Write) -> None:
    path = write_manifest(*({"prompt": f"a red circle number {n}"} for n in range(10_000)))

    def examined() -> None:
        jobs, faults = runner.examine(read_manifest(path), settle({}, {}, {}))
        assert (len(jobs), faults) == (10_000, [])

    assert processor_s(examined, 2) < 2


@pytest.mark.parametrize("mode", ["RGB", "CMYK", "I;16"])
def test_pictures_in_memory_are_drawn_as_those_in_files(tmp_path: Path, mode: str) -> None:
    """A manifest with the saved picture gives the same pixels; equal lines are drawn once."""
    photo = Image.new("RGB", (64, 64), (200, 30, 30))
    photo = photo.convert(mode) if mode != "I;16" else Image.new(mode, (64, 64), 30_000)
    sampling = Sampling(num_inference_steps=1, bot_task="none")
    config = RunConfig(OutputConfig(tmp_path / "out"), sampling=sampling)
    line = {"custom_id": "a", "prompt": "make it green", "seed": 1, "images": [photo]}
    (drawn,) = draw([line], config)["a"]
    assert (drawn.mode, drawn.size) == ("RGB", (64, 64))
    (saved,) = (tmp_path / "out" / "sources").iterdir()
    with Image.open(saved) as kept:
        assert (kept.mode, kept.tobytes()) == (photo.mode, photo.tobytes())
    journal = (tmp_path / "out" / "results.jsonl").read_bytes()
    assert draw([line], config)["a"][0].tobytes() == drawn.tobytes()
    assert (tmp_path / "out" / "results.jsonl").read_bytes() == journal
    if mode == "RGB":
        (tmp_path / "jobs.jsonl").write_text(json.dumps(line | {"images": [str(saved)]}))
        other = RunConfig(OutputConfig(tmp_path / "other"), sampling=sampling)
        run_manifest(tmp_path / "jobs.jsonl", other)
        with Image.open(tmp_path / "other" / "outputs" / "a.png") as twin:
            assert twin.tobytes() == drawn.tobytes()


def test_a_failed_job_of_pictures_in_memory_is_missing(tmp_path: Path) -> None:
    config = RunConfig(
        OutputConfig(tmp_path), sampling=Sampling(num_inference_steps=1, bot_task="none")
    )
    (tmp_path / "gone.png").write_bytes(b"no picture")
    lines = [
        {"custom_id": "bad", "prompt": "x", "images": [tmp_path / "gone.png"]},
        {"custom_id": "good", "prompt": "a red circle", "n": 2},
    ]
    found = draw(lines, config)
    assert [*found] == ["good-0", "good-1"]
