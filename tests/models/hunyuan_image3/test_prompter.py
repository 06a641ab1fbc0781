"""What `check` passes can be built, and what it refuses names the field."""

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from layouts import shared_length

from hyimg_cli.errors import CheckpointError, JobError
from hyimg_cli.models import registry
from hyimg_cli.models.common.spans import Grid
from hyimg_cli.models.hunyuan_image3 import system_prompt
from hyimg_cli.models.hunyuan_image3.prompter import Prompter
from hyimg_cli.models.hunyuan_image3.sequence import Layout, Section, SourceShape
from hyimg_cli.models.hunyuan_image3.vocabulary import Vocabulary
from hyimg_cli.spec.job import ImageJob, SizeRequest
from hyimg_cli.spec.options import TextSampling

_BOTH = "<think>a</think><recaption>b</recaption>"


@pytest.fixture(scope="module")
def prompter() -> Prompter:
    return registry.sequences(registry.EMBEDDED)


def test_a_ratio_is_told_as_one(prompter: Prompter) -> None:
    bucket, note = prompter.fit(9, 16, is_ratio=True)
    assert note.startswith(f"16:9 fitted to {bucket.size}: tiny-image makes ")
    assert prompter.fit(720, 1280)[1].startswith(f"1280x720 fitted to {bucket.size}: ")


@pytest.mark.parametrize(("ids", "shared"), [((), 5), ((9,), 5), ((9, 4), 3), ((4,), 2)], ids=str)
def test_branches_share_what_is_before_the_first_token_that_differs(
    ids: tuple[int, ...], shared: int
) -> None:
    """A tokenizer may read a text as no token, or as <cfg> itself."""
    sections = (Section((1, 2)), Section(ids, is_replaceable=True), Section((3,) * (3 - len(ids))))
    assert shared_length(Layout(sections, 9, (), None, ())) == shared


def a_job(**changes: Any) -> ImageJob:
    fields: dict[str, Any] = {
        "custom_id": "job",
        "task": "it2i" if changes.get("images") else "t2i",
        "prompt": "a red circle",
        "images": (),
        "model": registry.EMBEDDED,
        "seed": 1,
        "size": SizeRequest(64, 64),
        "num_inference_steps": 2,
        "guidance_scale": 3.0,
        "flow_shift": 2.0,
        "bot_task": "none",
        "text": TextSampling(temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=8),
    }
    return ImageJob(**(fields | changes))


@pytest.mark.parametrize(
    ("changes", "field", "slug"),
    [
        ({"prompt": "a <boi> b"}, "prompt", "control-token"),
        ({"prompt": "a <think>"}, "prompt", "control-token"),
        ({"cot_text": "<think>a</think> <img>"}, "cot_text", "control-token"),
        ({"cot_token_ids": (1, 10**6)}, "cot_token_ids", "unknown-token"),
        ({"prompt": "word " * 5000}, "prompt", "too-long"),
        ({"prompt": "word " * 5000, "bot_task": "think"}, "prompt", "too-long"),
        ({"cot_text": "word " * 5000}, "cot_text", "too-long"),
        ({"cot_token_ids": (1,) * 5000}, "cot_token_ids", "too-long"),
        (
            {"use_system_prompt": "custom", "system_prompt": "b " * 5000},
            "system_prompt",
            "too-long",
        ),
        ({"use_system_prompt": "en_unified"}, "use_system_prompt", "system-prompt"),
        ({"use_system_prompt": "dynamic"}, "use_system_prompt", "system-prompt"),
        (
            {"system_prompt": "Be.", "drop_think": True, "bot_task": "think_recaption"},
            "drop_think",
            "system-prompt",
        ),
        (
            {"system_prompt": "Be.", "drop_think": True, "cot_text": _BOTH},
            "drop_think",
            "system-prompt",
        ),
    ],
)
def test_what_the_checkpoint_cannot_take_names_its_field(
    prompter: Prompter, changes: dict[str, Any], field: str, slug: str
) -> None:
    with pytest.raises(JobError) as caught:
        prompter.check(a_job(**changes))
    assert (caught.value.where, caught.value.code) == (field, f"job.{slug}")
    assert caught.value.hint


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"images": ("a.png", "b.png")},
        {"cot_text": "<think>a</think><recaption>b</recaption>"},
        {"cot_token_ids": (1, 2, 3)},
        {"system_prompt": "Be brief."},
        {"system_prompt": "Be.", "drop_think": True, "bot_task": "recaption"},
        {"system_prompt": "Be.", "drop_think": True, "bot_task": "think"},
        {"use_system_prompt": "dynamic", "bot_task": "think_recaption"},
        {"bot_task": "think_recaption", "size": SizeRequest()},
        {"size": SizeRequest()},
    ],
)
def test_the_longest_prompt_that_passes_is_the_longest_that_can_be_built(
    prompter: Prompter, changes: dict[str, Any]
) -> None:
    smallest = min(prompter.card.buckets, key=lambda b: b.size.height * b.size.width)
    shapes = [prompter.source_shape(smallest, Grid(1, 1))] * len(changes.get("images", ()))

    def build(job: ImageJob) -> None:
        _build(prompter, job, shapes)

    passing = _longest(lambda count: _passes(prompter.check, a_job(prompt="x" * count, **changes)))
    built = _longest(lambda count: _passes(build, a_job(prompt="x" * count, **changes)))
    assert 1 < passing == built < 10_000


def _build(prompter: Prompter, job: ImageJob, shapes: Sequence[SourceShape]) -> None:
    prompter.opening(job, shapes)
    prompter.picture(job, shapes, [] if job.writes_text else None, prompter.card.buckets[0])


def _passes(act: Callable[[ImageJob], None], job: ImageJob) -> bool:
    try:
        act(job)
    except JobError:
        return False
    return True


def _longest(fits: Callable[[int], bool]) -> int:
    low, high = 1, 10_000
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def test_each_distinct_prompt_is_encoded_once() -> None:
    fresh = Prompter(registry.resolve_model(registry.EMBEDDED), registry.EMBEDDED)
    fresh.check(a_job(prompt="another"))
    before = fresh.memo_counts()["prompt_tokens"]["misses"]
    for seed in range(5):
        fresh.check(a_job(prompt="only once", seed=seed))
    assert fresh.memo_counts()["prompt_tokens"]["misses"] == before + 1


def test_a_shipped_system_prompt_is_read_and_a_broken_file_is_the_jobs_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(registry.resolve_model(registry.EMBEDDED), folder)
    monkeypatch.setitem(system_prompt.DIGESTS, "en_unified", _digest("Be kind."))
    script = folder / "system_prompt.py"
    script.write_text("unified = '''\nBe kind.\n'''\n")
    own = Prompter(folder, str(folder))
    own.check(a_job(use_system_prompt="en_unified"))
    with pytest.raises(JobError, match="does not have the text"):
        own.check(a_job(use_system_prompt="en_vanilla"))
    script.write_text("this is not Python, and it is longer")
    with pytest.raises(JobError, match="cannot be read"):
        own.check(a_job(use_system_prompt="en_unified"))


@pytest.fixture
def with_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prompter:
    """The embedded checkpoint, with texts of its own for two kinds of system prompt."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(registry.resolve_model(registry.EMBEDDED), folder)
    for kind, text in (("en_think_recaption", "Think."), ("en_recaption", "Rewrite.")):
        monkeypatch.setitem(system_prompt.DIGESTS, kind, _digest(text))
    (folder / "system_prompt.py").write_text("a = '\\nThink.\\n'\nb = '\\nRewrite.\\n'\n")
    return Prompter(folder, str(folder))


def _start(prompter: Prompter, job: ImageJob, written: str | None) -> str:
    """What the picture's sequence begins with, up to the user's text."""
    ids = None if written is None else prompter.vocabulary.encode(written)
    layout = prompter.picture(job, [], ids, prompter.card.buckets[0])
    return prompter.vocabulary.decode(layout.ids).split("User: ")[0]


@pytest.mark.parametrize(
    ("bot_task", "written", "expected"),
    [
        # Upstream strips the system prompt, but not the one that it takes in its place.
        ("think_recaption", _BOTH, "\nRewrite.\n\n\n"),
        ("think", "<think>a</think>", "Be.\n\n"),
        ("recaption", "<recaption>b</recaption>", "Be.\n\n"),
    ],
)
def test_a_text_without_its_reasoning_has_the_recaption_prompt(
    with_prompts: Prompter, bot_task: str, written: str, expected: str
) -> None:
    """However the text came about: written now, or given as text or as ids."""
    fields = {"system_prompt": "Be.", "drop_think": True}
    ids = tuple(with_prompts.vocabulary.encode(written))
    now = _start(with_prompts, a_job(**fields, bot_task=bot_task), written)
    as_text = _start(with_prompts, a_job(**fields, cot_text=written), None)
    as_ids = _start(with_prompts, a_job(**fields, cot_token_ids=ids), None)
    assert {now, as_text, as_ids} == {"<|startoftext|>" + expected}
    assert _start(with_prompts, a_job(drop_think=True, bot_task=bot_task), written) == (
        "<|startoftext|>"
    )


@pytest.mark.parametrize(
    ("bot_task", "expected"),
    [("think", "Think.\n\n"), ("recaption", "Rewrite.\n\n"), ("think_recaption", "")],
)
def test_a_dynamic_system_prompt_is_upstreams(
    with_prompts: Prompter, bot_task: str, expected: str
) -> None:
    job = a_job(use_system_prompt="dynamic", bot_task=bot_task)
    assert _start(with_prompts, job, "x") == "<|startoftext|>" + expected


def test_what_a_tokenizer_file_carries_along_changes_no_ids(tmp_path: Path) -> None:
    """Truncation, padding, and control tokens that are not marked as such."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(registry.resolve_model(registry.EMBEDDED), folder)
    plain = Prompter(folder, "plain")
    stored = json.loads((folder / "tokenizer.json").read_text())
    stored["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    stored["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<pad>",
    }
    for token in stored["added_tokens"]:
        token["special"] = False
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    other = Prompter(folder, "other")
    text = "a red circle beside a blue square, seen from far above"
    assert other.vocabulary.encode(text) == plain.vocabulary.encode(text)
    for tag in ("<think>", "<img>", "<img_ratio_3>", "<|endoftext|>"):
        with pytest.raises(JobError, match="control token"):
            other.check(a_job(prompt=f"a {tag} b"))


def test_a_ratio_token_that_is_not_there_names_the_configs_key() -> None:
    folder = registry.resolve_model(registry.EMBEDDED)
    with pytest.raises(CheckpointError, match="<img_ratio_37>") as caught:
        Vocabulary.from_folder(folder, base_size=64, ratio_count=38)
    assert '"model_version": "HunyuanImage-3.0"' in caught.value.hint


def test_only_a_base_models_text_ends_at_the_end_of_text(
    prompter: Prompter, tmp_path: Path
) -> None:
    shutil.copytree(prompter.folder, tmp_path / "base")
    config = json.loads((prompter.folder / "config.json").read_text())
    config["model_version"] = "HunyuanImage-3.0"
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    job = a_job(bot_task="recaption")
    for one, is_end in ((prompter, False), (Prompter(tmp_path / "base", "base"), True)):
        assert bool(one.script(job).early_end(one.vocabulary.eos)) == is_end


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def test_the_ratio_prompt_is_the_start_of_the_picture(prompter: Prompter) -> None:
    """Text-mode and image-mode layouts of the same job agree up to the ratio token."""
    job = a_job(bot_task="none", size=SizeRequest())
    opening = prompter.opening(job, [])
    picture = prompter.picture(job, [], None, prompter.card.buckets[0])
    assert opening is not None
    assert picture.target is not None
    assert opening.ids == picture.ids[: picture.target.ratio]
