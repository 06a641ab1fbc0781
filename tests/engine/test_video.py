"""Video sessions with a model of plain arithmetic: order, failures, stops and kept latents leave
the pixels alone, and every line says what happened.
"""

import json
import signal
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from engine.fake_video import FakeDenoiser, FakeVideo, Studios, video_job
from event_kinds import is_done, is_embedded, is_step
from machines import with_main_memory
from PIL import Image
from torch._dynamo.callback import CallbackTrigger, callback_handler

from hyimg_cli.engine.preparation import Preparation, RunPlan, begin
from hyimg_cli.engine.runner import RunRequest, Summary
from hyimg_cli.engine.session import Session
from hyimg_cli.errors import Interrupted, StorageError
from hyimg_cli.journal.journal import RunFolder, outcome_to_json
from hyimg_cli.journal.keys import job_keys
from hyimg_cli.journal.resume import ResumePolicy, resume
from hyimg_cli.manifest.manifest import manifest_of
from hyimg_cli.manifest.planner import make_plan
from hyimg_cli.media import video
from hyimg_cli.memory import available
from hyimg_cli.memory.fit import need
from hyimg_cli.models import registry
from hyimg_cli.settings.run import (
    BatchConfig,
    CacheConfig,
    FailurePolicy,
    ModelChoice,
    OutputConfig,
    ReuseConfig,
    RunConfig,
)
from hyimg_cli.spec import digest
from hyimg_cli.spec.events import (
    PHASES,
    Event,
    JobEnded,
    ModelLoaded,
    ModelLoading,
    ModelReleased,
    Outcome,
    Prewarmed,
    PromptsReady,
    VideoFile,
)
from hyimg_cli.spec.job import ImageJob, Size, VideoJob

COLD, WARM = BatchConfig(prewarm=False), BatchConfig(prewarm=True)


@pytest.fixture(autouse=True)
def studios(monkeypatch: pytest.MonkeyPatch) -> Studios:
    opened = Studios()
    monkeypatch.setattr(registry, "load_video", opened)
    return opened


def run(
    jobs: list[Any], out: Path, *, session: Session | None = None, **config: Any
) -> tuple[list[Event], dict[str, Outcome]]:
    settings = RunConfig(**({"output": OutputConfig(out)} | config))
    with RunFolder(out) as folder:
        plan = make_plan(jobs, registry.model_card)
        events = list((session or Session(settings)).run(plan, folder))
    done = {e.outcome.custom_id: e.outcome for e in events if isinstance(e, JobEnded)}
    return events, done


def pixels(outcome: Outcome) -> str:
    assert outcome.error is None, outcome.error
    return outcome.outputs[0].pixel_sha256


@pytest.fixture
def jobs() -> list[VideoJob]:
    """Four unlike jobs of two sizes; two share a prompt."""
    return [
        video_job("plain"),
        video_job("seeded", seed=8),
        video_job("quoted", prompt='a sign "open"', negative_prompt="blur", num_frames=9),
        video_job("single", guidance_scale=1.0, num_inference_steps=3),
    ]


def test_files_and_lines_say_the_same(jobs: list[VideoJob], tmp_path: Path) -> None:
    _, outcomes = run(jobs, tmp_path)
    for job in jobs:
        outcome = outcomes[job.custom_id]
        (file,) = outcome.outputs
        assert isinstance(file, VideoFile)
        assert (file.num_frames, file.fps) == (job.num_frames, job.fps)
        with av.open(str(tmp_path / file.path)) as container:
            frames = list(container.decode(video=0))
            comment = json.loads(container.metadata["comment"])
        assert len(frames) == job.num_frames
        assert (frames[0].height, frames[0].width) == (job.size.height, job.size.width)
        assert comment == json.loads((tmp_path / f"outputs/{job.custom_id}.json").read_text())
        assert (comment["job"]["seed"], comment["job"]["prompt"]) == (job.seed, job.prompt)
        assert outcome.denoise_steps == job.num_inference_steps
        line = outcome_to_json(outcome)
        assert line["kv_reuse"]["status"] == "none"
        assert line["outputs"][0]["num_frames"] == job.num_frames
    assert len({pixels(outcome) for outcome in outcomes.values()}) == 4


@pytest.mark.usefixtures("processor_clock")
def test_phases_are_disjoint_and_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = FakeDenoiser.step

    def slow(self: Any, index: int, latents: Any) -> Any:
        torch.randn(700, 700) @ torch.randn(700, 700)
        return step(self, index, latents)

    monkeypatch.setattr(FakeDenoiser, "step", slow)
    _, outcomes = run([video_job(num_inference_steps=40)], tmp_path, batch=COLD)
    timings = outcomes["job"].timings_s
    assert timings.keys() == {*PHASES, "unattributed", "total"}
    parts = sum(seconds for name, seconds in timings.items() if name != "total")
    assert parts == pytest.approx(timings["total"], abs=1e-4)
    assert timings["unattributed"] < 0.05 * (timings["total"] - timings["queue"])
    for phase in ("encode", "denoise_first", "denoise_rest", "decode_latents"):
        assert timings[phase] > 0
    assert outcomes["job"].overlapped_s["write"] > 0


def test_compiling_is_a_phase_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processor_clock: Callable[[float], None]
) -> None:
    step = FakeDenoiser.step

    def compiling(self: Any, index: int, latents: Any) -> Any:
        if index in (0, 2):  # the first step, and one that meets another shape
            with callback_handler.install_callbacks(CallbackTrigger.DYNAMO, "0/0"):
                processor_clock(20.0)
        return step(self, index, latents)

    monkeypatch.setattr(FakeDenoiser, "step", compiling)
    for compiles in (True, False):
        choice = ModelChoice(device="cpu", compile_blocks=compiles)
        out = tmp_path / str(compiles)
        _, outcomes = run([video_job()], out, batch=COLD, model=choice)
        timings, share = outcomes["job"].timings_s, outcomes["job"].share_s
        told = (timings["compile"], timings["denoise_first"] + timings["denoise_rest"])
        assert told[not compiles] >= 40 > told[compiles]
        assert share.get("compile", 0.0) == pytest.approx(timings["compile"], abs=1e-3)
        counts = Summary(pictures_s=timings["total"])
        counts.finish(outcomes["job"])
        assert counts.compile_s == timings["compile"]
        expected = timings["total"] - timings["compile"]
        assert counts.seconds_per_picture == pytest.approx(expected)
    assert not callback_handler.start_callbacks
    assert not callback_handler.end_callbacks


def test_pixels_do_not_depend_on_order_or_company(jobs: list[VideoJob], tmp_path: Path) -> None:
    _, forward = run(jobs, tmp_path / "forward")
    _, backward = run(jobs[::-1], tmp_path / "backward")
    for job in jobs:
        _, alone = run([job], tmp_path / job.custom_id)
        name = job.custom_id
        assert pixels(forward[name]) == pixels(backward[name]) == pixels(alone[name])


def test_a_load_that_was_cut_short_begins_again(
    jobs: list[VideoJob], tmp_path: Path, studios: Studios
) -> None:
    session = Session(RunConfig(OutputConfig(tmp_path)))
    events = session.run(make_plan(jobs, registry.model_card))
    assert any(is_embedded(event) for event in events), "cut behind the first"
    events.close()
    again, outcomes = run(jobs, tmp_path, session=session)
    assert sum(isinstance(event, ModelLoaded) for event in again) == 1
    assert {outcome.status for outcome in outcomes.values()} == {"done"}
    assert [model.log.count("load") for model in studios.models] == [0, 1]


def test_no_more_than_two_pieces_of_a_film_are_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that is encoded and the one that is decoded, of 121 frames; the pixels are those of
    the whole film.
    """
    decode, alive, held = FakeVideo.decode_latents, list[Any](), list[int]()
    whole: list[np.ndarray] = []

    def counted(self: FakeVideo, *latents: Any) -> Iterator[np.ndarray]:
        for frames in decode(self, *latents):
            piece = frames.copy()
            whole.append(frames)
            alive.append(weakref.ref(piece))
            held.append(sum(one() is not None for one in alive))
            yield piece
            del piece

    monkeypatch.setattr(FakeVideo, "decode_latents", counted)
    _, outcomes = run([video_job(num_frames=121)], tmp_path, batch=COLD)
    assert len(held) == 61
    assert max(held) <= 2
    assert pixels(outcomes["job"]) == digest.of_bytes(np.concatenate(whole).tobytes())
    assert not [one() for one in alive if one() is not None], "nor any once it is written"


def test_a_film_without_a_place_is_only_decoded(studios: Studios) -> None:
    with Session(RunConfig(OutputConfig(Path("nowhere")), batch=COLD)) as session:
        events = list(session.run(make_plan([video_job()], registry.model_card)))
    (done,) = (event for event in events if is_done(event))
    assert done.outcome.outputs == ()
    assert "decode (2, 2, 3)" in studios.models[0].log


def test_what_cannot_be_written_is_one_jobs_failure(
    jobs: list[VideoJob], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = video.VideoWriter

    def refuses(path: Path, **named: Any) -> Any:
        if path.stem == "seeded":
            raise ValueError("the encoder takes no such frame")
        return inner(path, **named)

    monkeypatch.setattr(video, "VideoWriter", refuses)
    every = OutputConfig(tmp_path, checkpoint_every=1)
    _, outcomes = run(jobs, tmp_path, output=every)
    assert {name: one.status for name, one in outcomes.items()} == {
        "plain": "done", "seeded": "failed", "quoted": "done", "single": "done",
    }  # fmt: skip
    error = outcomes["seeded"].error
    assert error is not None
    assert error.message == "ValueError: the encoder takes no such frame"
    # What it was denoised to is kept for the next try.
    assert [path.stem for path in (tmp_path / "latents").iterdir()] == ["seeded"]


def test_nothing_of_an_earlier_film_stays_beside_a_new_one(tmp_path: Path) -> None:
    run([video_job()], tmp_path, output=OutputConfig(tmp_path, frames="png"))
    outputs = tmp_path / "outputs"
    names = {"job.mp4", "job.json", "job.frames"}
    assert {path.name for path in outputs.iterdir()} == names
    bare = OutputConfig(tmp_path, metadata=False)
    run([video_job(seed=9)], tmp_path, output=bare)
    assert {path.name for path in outputs.iterdir()} == {"job.mp4"}


def test_a_failing_neighbour_changes_nothing(jobs: list[VideoJob], tmp_path: Path) -> None:
    _, clean = run(jobs, tmp_path / "clean")
    broken = [
        video_job("in-text", prompt="unreadable"),
        video_job("in-step", prompt="it fails in step 2"),
    ]
    events, mixed = run([jobs[0], *broken, *jobs[1:]], tmp_path / "mixed")
    assert {name for name, outcome in mixed.items() if outcome.status == "failed"} == {
        "in-text", "in-step",
    }  # fmt: skip
    assert mixed["in-text"].error is not None
    assert mixed["in-text"].error.code == "job.text"
    assert all(pixels(mixed[name]) == pixels(clean[name]) for name in clean)
    assert len([e for e in events if is_done(e)]) == 4


def test_every_job_has_a_denoiser_of_its_own(
    jobs: list[VideoJob], studios: Studios, tmp_path: Path
) -> None:
    run(jobs, tmp_path, batch=COLD)
    (model,) = studios.models
    assert [d.job.custom_id for d in model.denoisers] == ["plain", "seeded", "single", "quoted"]


def test_a_retry_starts_afresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, clean = run([video_job()], tmp_path / "clean")
    step, tries = FakeDenoiser.step, []

    def flaky(self: Any, index: int, latents: Any) -> Any:
        if index == 2 and len(tries) < 2:
            tries.append(index)
            raise torch.OutOfMemoryError("too much")
        return step(self, index, latents)

    monkeypatch.setattr(FakeDenoiser, "step", flaky)
    policy = FailurePolicy(max_retries=1)
    _, again = run([video_job()], tmp_path / "again", failure=policy, batch=COLD)
    # Once more within the first attempt: see test_video_short_memory.
    assert (tries, again["job"].attempt) == ([2, 2], 2)
    assert pixels(again["job"]) == pixels(clean["job"])


def test_frames_that_are_no_video_fail_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = FakeVideo.decode_latents
    broken: dict[str, Callable[[Any], Any]] = {
        "constant": lambda pieces: (np.zeros_like(piece) for piece in pieces),
        "short": lambda pieces: list(pieces)[1:],
        "narrow": lambda pieces: (piece[:, :, :-1] for piece in pieces),
    }
    for name, change in broken.items():
        monkeypatch.setattr(
            FakeVideo, "decode_latents", lambda self, x, _, c=change: iter(c(decode(self, x)))
        )
        _, outcomes = run([video_job()], tmp_path / name, batch=COLD)
        error = outcomes["job"].error
        assert error is not None
        assert error.code == f"output-video.{'constant' if name == 'constant' else 'shape'}"
        assert not list((tmp_path / name / "outputs").iterdir())


def test_a_stop_request_ends_the_run_after_the_step(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as folder:
        session = Session(RunConfig(OutputConfig(tmp_path)))
        events = session.run(make_plan([video_job()], registry.model_card), folder)
        steps = [next(event for event in events if is_step(event))]
        session.request_stop(signal.SIGINT)
        with pytest.raises(Interrupted) as caught:
            steps.extend(event for event in events if is_step(event))
        assert caught.value.exit_code == 130
        assert len(steps) == 1
        assert folder.results() == {}


def stopped_behind(step: int, job: VideoJob, out: Path, every: int) -> Path:
    """A run that ended behind a denoise step, as a kill would end it; where its latents are."""
    with RunFolder(out) as folder:
        session = Session(RunConfig(OutputConfig(out, checkpoint_every=every), batch=COLD))
        for event in session.run(make_plan([job], registry.model_card), folder):
            if is_step(event) and event.done == step:
                break
        return folder.latents_for(job.custom_id)


@pytest.mark.parametrize(("stop", "every", "went_on"), [(1, 1, 1), (3, 2, 2), (5, 2, 4), (5, 5, 5)])
def test_a_job_goes_on_inside_itself(
    studios: Studios, tmp_path: Path, stop: int, every: int, went_on: int
) -> None:
    job = video_job(num_inference_steps=6)
    _, undisturbed = run([job], tmp_path / "undisturbed")
    kept = stopped_behind(stop, job, tmp_path / "stopped", every)
    assert kept.is_file()
    config = OutputConfig(tmp_path / "stopped", checkpoint_every=every)
    _, resumed = run([job], tmp_path / "stopped", output=config, batch=COLD)
    assert pixels(resumed["job"]) == pixels(undisturbed["job"])
    assert resumed["job"].outputs[0].sha256 == undisturbed["job"].outputs[0].sha256
    assert resumed["job"].denoise_steps == 6 - went_on
    assert any(f"after denoise step {went_on}" in note for note in resumed["job"].notes)
    assert not kept.exists()


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "other job", "more steps"])
def test_latents_that_are_not_the_jobs_are_left_aside(tmp_path: Path, damage: str) -> None:
    job = video_job(num_inference_steps=6)
    kept = stopped_behind(4, job, tmp_path, every=2)
    data = kept.read_bytes()
    changed = {
        "cut": data[:-9], "flipped": data[:-9] + b"\x00" + data[-8:], "empty": b"",
    }  # fmt: skip
    kept.write_bytes(changed.get(damage, data))
    if damage == "other job":
        job = replace(job, seed=1)
    if damage == "more steps":
        job = replace(job, num_inference_steps=3)
    _, outcomes = run([job], tmp_path, batch=COLD)
    _, clean = run([job], tmp_path / "clean", batch=COLD)
    assert pixels(outcomes["job"]) == pixels(clean["job"])
    assert outcomes["job"].denoise_steps == job.num_inference_steps
    noted = any("damaged latents" in note for note in outcomes["job"].warnings)
    assert noted == (damage in changed)


def test_a_plan_that_only_decodes_loads_no_more_until_another_needs_it(
    studios: Studios, tmp_path: Path
) -> None:
    """Of two sizes: the second is still known to be denoised when the first's latents are gone."""
    jobs = [video_job("small"), video_job("large", size=Size(48, 64))]
    for job in jobs:
        stopped_behind(job.num_inference_steps, job, tmp_path, every=0)
    studios.models.clear()
    with Session(RunConfig(OutputConfig(tmp_path))) as session:
        events, outcomes = run(jobs, tmp_path, session=session)
        log = studios.models[0].log
        assert [entry for entry in log if not entry.startswith("decode")] == ["vae"]
        assert [outcome.denoise_steps for outcome in outcomes.values()] == [0, 0]
        assert not [event for event in events if isinstance(event, PromptsReady | Prewarmed)]
        log.clear()
        events, outcomes = run([video_job("new")], tmp_path, session=session)
        assert log[:4] == ["encode a dog on a beach", "encode ", "release", "load"]
        assert sum(isinstance(event, ModelLoaded) for event in events) == 1
        assert outcomes["new"].denoise_steps == 4
    assert len(studios.models) == 1


def test_what_the_prompt_lost_is_told_by_a_job_that_is_only_decoded(tmp_path: Path) -> None:
    job = video_job(prompt="a dog " * 40)
    stopped_behind(job.num_inference_steps, job, tmp_path, every=0)
    _, outcomes = run([job], tmp_path, batch=COLD)
    assert outcomes["job"].denoise_steps == 0
    assert "the prompt was cut" in outcomes["job"].warnings


def test_latents_that_are_not_finite_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every later attempt would fail by them; those before them stay."""
    job = video_job(num_inference_steps=6)
    step = FakeDenoiser.step

    def breaks(self: Any, index: int, latents: Any) -> Any:
        return step(self, index, latents) / (index != 4)

    with monkeypatch.context() as patch:
        patch.setattr(FakeDenoiser, "step", breaks)
        stopped_behind(6, job, tmp_path, every=2)
    _, outcomes = run([job], tmp_path, batch=COLD)
    assert any("after denoise step 4" in note for note in outcomes["job"].notes)
    assert outcomes["job"].denoise_steps == 2


def test_latents_that_cannot_be_kept_cost_a_note(tmp_path: Path) -> None:
    (tmp_path / "latents").write_text("in the way")
    config = OutputConfig(tmp_path, checkpoint_every=1)
    _, outcomes = run([video_job()], tmp_path, output=config, batch=COLD)
    assert outcomes["job"].status == "done"
    assert any("latents" in note for note in outcomes["job"].warnings)


def test_frames_without_loss_and_no_metadata(tmp_path: Path) -> None:
    config = OutputConfig(tmp_path, metadata=False, frames="png")
    _, outcomes = run([video_job()], tmp_path, output=config)
    (file,) = outcomes["job"].outputs
    assert isinstance(file, VideoFile)
    assert file.frames_path == "outputs/job.frames"
    shots = sorted((tmp_path / file.frames_path).iterdir())
    assert [shot.name for shot in shots] == [f"{n:04d}.png" for n in range(5)]
    raw = b"".join(np.asarray(Image.open(shot)).tobytes() for shot in shots)
    assert digest.of_bytes(raw) == file.pixel_sha256
    assert sorted(p.name for p in (tmp_path / "outputs").iterdir()) == ["job.frames", "job.mp4"]
    with av.open(str(tmp_path / file.path)) as container:
        assert "comment" not in container.metadata


def test_what_is_done_is_skipped_until_frames_are_asked_for(tmp_path: Path) -> None:
    job, config = video_job(), RunConfig(OutputConfig(tmp_path))
    run([job], tmp_path)
    folder, policy = RunFolder(tmp_path), ResumePolicy()
    assert resume(folder, [job], config, policy).done == ["job"]
    with_frames = RunConfig(OutputConfig(tmp_path, frames="png"))
    assert resume(folder, [job], with_frames, policy).to_run == [job]
    run([job], tmp_path, output=with_frames.output)
    assert resume(folder, [job], with_frames, policy).done == ["job"]
    (tmp_path / "outputs/job.frames/0003.png").unlink()
    assert resume(folder, [job], with_frames, policy).to_run == [job]


def test_keys_hold_what_changes_the_file(tmp_path: Path) -> None:
    config = RunConfig(OutputConfig(tmp_path))

    def key(**changes: Any) -> str:
        return job_keys([video_job(**changes)], config)["job"]

    same = [{"metadata_json": '"x"'}, {"source_line": "b:9"}]
    other = [
        {"prompt": "x"}, {"negative_prompt": "x"}, {"seed": 1}, {"size": Size(48, 32)},
        {"num_frames": 9}, {"fps": 9}, {"num_inference_steps": 5}, {"guidance_scale": 2.0},
        {"flow_shift": 1.0}, {"guidance_scale_2": 3.0},
    ]  # fmt: skip
    assert {key(**changes) for changes in same} == {key()}
    assert len({key(), *(key(**changes) for changes in other)}) == len(other) + 1
    unused = {"guidance_scale": 1.0}
    assert key(**unused) == key(**unused, negative_prompt="nobody reads it")


def test_a_full_disk_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_arguments: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("hyimg_cli.files.sync", full)
        with pytest.raises(StorageError, match="full"):
            run([video_job()], tmp_path)
    assert not list((tmp_path / "outputs").glob("*.mp4"))
    assert run([video_job()], tmp_path)[1]["job"].status == "done"


# --- prompts -----------------------------------------------------------------------------------

PROMPTS = ("a dog", 'a sign "open"', "clouds")


def ten_jobs() -> list[VideoJob]:
    return [
        video_job(f"job-{n}", prompt=PROMPTS[n % 3], seed=n, num_inference_steps=1 + n % 2)
        for n in range(10)
    ]


def runs_of(outcomes: dict[str, Outcome]) -> dict[str, int]:
    """Counts until the last job's line: those of all jobs."""
    return list(outcomes.values())[-1].cache["encoder_runs"]


def counts_of(outcomes: dict[str, Outcome]) -> dict[str, int]:
    return list(outcomes.values())[-1].cache["prompt_embeddings"]


def test_each_distinct_string_is_embedded_once_and_then_never(
    studios: Studios, tmp_path: Path
) -> None:
    cache = CacheConfig(tmp_path / "cache")
    events, first = run(ten_jobs(), tmp_path / "first", cache=cache)
    # Three prompts and the empty negative one; one of them quotes.
    assert runs_of(first) == {"text": 4, "glyph": 1}
    (ready,) = [event for event in events if isinstance(event, PromptsReady)]
    assert (ready.strings, ready.encoded) == (4, 4)
    assert counts_of(first) == {
        "memory_hits": 20, "disk_hits": 0, "misses": 4,
    }  # fmt: skip
    _, second = run(ten_jobs(), tmp_path / "second", cache=cache)
    assert runs_of(second) == {}
    assert counts_of(second)["disk_hits"] == 4
    assert not studios.models[1].prompts.is_loaded
    off, none = ReuseConfig(prompt_cache=False), CacheConfig()
    _, plain = run(ten_jobs(), tmp_path / "plain", cache=none, reuse=off, batch=COLD)
    assert runs_of(plain) == {"text": 20, "glyph": 3}
    for name in first:
        assert pixels(first[name]) == pixels(second[name]) == pixels(plain[name])


def test_encoders_leave_before_the_transformer_comes(studios: Studios, tmp_path: Path) -> None:
    run(ten_jobs(), tmp_path)
    log = studios.models[0].log
    first_four = [f"encode {text}" for text in (PROMPTS[0], "", *PROMPTS[1:])]
    assert sorted(log[:4]) == sorted(first_four)
    assert log[4:6] == ["release", "load"]


def test_another_template_is_a_miss_and_another_seed_a_hit(
    studios: Studios, tmp_path: Path
) -> None:
    cache = CacheConfig(tmp_path / "cache")
    run(ten_jobs()[:3], tmp_path / "a", cache=cache)
    shaped = [replace(job, seed=99, size=Size(48, 32)) for job in ten_jobs()[:3]]
    _, hits = run(shaped, tmp_path / "b", cache=cache)
    assert runs_of(hits) == {}
    studios.template = "changed"
    _, misses = run(ten_jobs()[:3], tmp_path / "c", cache=cache)
    assert runs_of(misses) == {"text": 4, "glyph": 1}


@pytest.mark.parametrize("keep", [0, 40, -1])
def test_a_damaged_entry_is_a_miss_and_a_warning(tmp_path: Path, keep: int) -> None:
    cache = CacheConfig(tmp_path / "cache")
    _, first = run([video_job(negative_prompt="a dog on a beach")], tmp_path / "a", cache=cache)
    (entry,) = (tmp_path / "cache/prompt-embeddings").iterdir()
    entry.write_bytes(entry.read_bytes()[:keep])
    _, second = run([video_job(negative_prompt="a dog on a beach")], tmp_path / "b", cache=cache)
    assert runs_of(second)["text"] == 1
    assert any("damaged entry" in note for note in second["job"].warnings)
    assert pixels(first["job"]) == pixels(second["job"])
    _, third = run([video_job(negative_prompt="a dog on a beach")], tmp_path / "c", cache=cache)
    assert runs_of(third) == {}


def test_a_cache_that_is_too_small_costs_time_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, roomy = run(ten_jobs(), tmp_path / "roomy")
    monkeypatch.setattr("hyimg_cli.pipelines.encoded_inputs.ENCODED_BYTES", 1)
    _, narrow = run(ten_jobs(), tmp_path / "narrow")
    assert runs_of(narrow)["text"] > 4
    assert all(pixels(narrow[name]) == pixels(roomy[name]) for name in roomy)


def test_a_cut_prompt_is_noted_in_its_line(tmp_path: Path) -> None:
    _, outcomes = run([video_job(prompt="long " * 50)], tmp_path)
    assert outcomes["job"].warnings == ("the prompt was cut",)


# --- prewarm -----------------------------------------------------------------------------------


def test_a_cpu_has_nothing_to_prewarm(tmp_path: Path) -> None:
    events, _ = run([video_job(f"job-{n}", seed=n) for n in range(3)], tmp_path)
    assert not [event for event in events if isinstance(event, Prewarmed)]


def test_prewarm_runs_a_step_of_each_shape_of_three_jobs_and_leaves_no_trace(
    jobs: list[VideoJob], studios: Studios, tmp_path: Path
) -> None:
    # With guidance: two, and one of more frames. Without: three.
    single = [replace(jobs[3], custom_id=f"single-{n}", seed=n) for n in range(3)]
    jobs = [*jobs[:3], *single]
    state = torch.get_rng_state()
    events, warm = run(jobs, tmp_path / "warm", batch=WARM)
    assert torch.equal(torch.get_rng_state(), state)
    _, cold = run(jobs, tmp_path / "cold", batch=COLD)
    assert [event.shapes for event in events if isinstance(event, Prewarmed)] == [1]
    warmed, plain = (model.denoisers for model in studios.models)
    assert len(warmed) - len(plain) == 1
    (stand_in,) = (d for d in warmed if d.job.custom_id == "prewarm")
    assert (stand_in.steps, stand_in.job.size) == (1, single[0].size)
    assert stand_in.job.branch_count == 1
    decodes = [[e for e in model.log if e.startswith("decode")] for model in studios.models]
    assert decodes[0] == decodes[1]
    assert len(decodes[0]) == len(jobs)
    assert warm.keys() == cold.keys()
    assert all(pixels(warm[name]) == pixels(cold[name]) for name in warm)
    assert counts_of(warm) == counts_of(cold)


def test_a_shape_that_fails_is_not_counted(tmp_path: Path) -> None:
    wrong = video_job("broken", prompt="it fails in step 0", size=Size(64, 64))
    broken = [replace(wrong, custom_id=f"broken-{n}", seed=n) for n in range(3)]
    whole = [video_job(f"job-{n}", seed=n) for n in range(3)]
    events, outcomes = run([*broken, *whole], tmp_path, batch=WARM)
    assert [event.shapes for event in events if isinstance(event, Prewarmed)] == [1]
    assert [outcomes[name].status for name in ("broken-0", "job-0")] == ["failed", "done"]


# --- pictures and videos in one plan -----------------------------------------------------------


@pytest.mark.parametrize("fits", [True, False])
def test_pictures_and_videos_in_one_run(
    job: ImageJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fits: bool
) -> None:
    picture = replace(job, custom_id="picture", bot_task="none", num_inference_steps=2)
    session = Session(RunConfig(OutputConfig(tmp_path)))
    # Little is left beside the video model; enough when it has gone.
    little = lambda: 10**7 if session._videos.model and not fits else 10**12  # noqa: E731
    monkeypatch.setattr(available, "available_bytes", little)
    mixed = [video_job("first"), picture, video_job("last", num_frames=1)]
    events, outcomes = run(mixed, tmp_path, session=session)
    assert {name: o.status for name, o in outcomes.items()} == dict.fromkeys(
        ("first", "picture", "last"), "done"
    )
    loaded = {event.model: event.beside for event in events if isinstance(event, ModelLoaded)}
    released = [event.model for event in events if isinstance(event, ModelReleased)]
    if fits:
        assert (loaded, released) == ({"tiny-video": (), "tiny-image": ("tiny-video",)}, [])
    else:
        assert (loaded, released) == ({"tiny-video": (), "tiny-image": ()}, ["tiny-video"])
    readiness = [event for event in events if isinstance(event, ModelLoading | ModelLoaded)]
    assert [type(event) for event in readiness] == [ModelLoading, ModelLoaded] * 2
    assert [event.model for event in readiness[::2]] == [event.model for event in readiness[1::2]]
    # Each pipeline's own counters.
    assert "source_images" in outcomes["picture"].cache
    assert "encoder_runs" not in outcomes["picture"].cache
    assert outcomes["last"].cache.keys() == {"prompt_embeddings", "encoder_runs"}


@pytest.mark.parametrize(("times", "stays"), [(1.5, False), (2.5, True)])
def test_a_video_model_stays_beside_where_as_much_again_is_left(
    job: ImageJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: float, stays: bool
) -> None:
    """What its work takes is not known: room for the weights alone is not enough."""
    settings = RunConfig(OutputConfig(tmp_path), batch=COLD)
    picture = replace(job, bot_task="none", num_inference_steps=2)
    weights = need("tiny-video", [video_job()], settings).weights
    with Session(settings) as session:
        list(session.run(make_plan([picture], registry.model_card)))
        with_main_memory(monkeypatch, times * weights)
        events = list(session.run(make_plan([video_job()], registry.model_card)))
    released = [event.model for event in events if isinstance(event, ModelReleased)]
    assert released == ([] if stays else ["tiny-image"])
    assert [event.beside for event in events if isinstance(event, ModelLoaded)] == [
        ("tiny-image",) if stays else ()
    ]


def test_a_session_keeps_its_model_for_the_next_plan(studios: Studios, tmp_path: Path) -> None:
    session = Session(RunConfig(OutputConfig(tmp_path / "a")))
    run([video_job()], tmp_path / "a", session=session)
    events, _ = run([video_job("other", seed=1)], tmp_path / "b", session=session)
    assert len(studios.models) == 1
    assert not [
        event for event in events if isinstance(event, ModelLoading | ModelLoaded | PromptsReady)
    ]


def test_pieces_of_a_plan_embed_all_of_its_prompts_with_the_first(
    studios: Studios, tmp_path: Path
) -> None:
    """A replica gets its plan in pieces; its text encoders never come back beside the model."""
    whole = make_plan(ten_jobs(), registry.model_card)
    pieces = [make_plan([job], registry.model_card) for job in whole.jobs]
    settings = RunConfig(OutputConfig(tmp_path), batch=COLD)
    with RunFolder(tmp_path) as folder, Session(settings) as session:
        told = [list(session.run(piece, folder, whole=whole)) for piece in pieces]
    ready = [[e for e in events if isinstance(e, PromptsReady)] for events in told]
    assert [one.strings for one in ready[0]] == [4]
    assert not any(ready[1:])
    assert studios.models[0].log.count("release") == 1
    assert sum(is_done(event) for events in told for event in events) == 10


def test_latents_of_what_is_done_or_starts_afresh_are_removed(tmp_path: Path) -> None:
    """A kill between a line and the end of its latents leaves both."""
    jobs = [video_job("done"), video_job("begun")]
    run(jobs[:1], tmp_path)
    with RunFolder(tmp_path) as folder:
        folder.latents_for("done").parent.mkdir()
        for name in ("done", "begun"):
            folder.latents_for(name).write_text("left")

        def prepared(policy: ResumePolicy) -> RunPlan:
            manifest, config = manifest_of(b"", "jobs.jsonl"), RunConfig(OutputConfig(tmp_path))
            request = RunRequest(manifest, config, {}, policy=policy)
            return begin(Preparation(request, tuple(jobs), (), (), jobs, None), folder)

        assert prepared(ResumePolicy()).summary.skipped == 1
        assert [path.name for path in (tmp_path / "latents").iterdir()] == ["begun.safetensors"]
        prepared(ResumePolicy(resume=False, force=True))
        assert not list((tmp_path / "latents").iterdir())
