"""Answers in the engine: batched as alone, chosen without a decode, mixed with pictures."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine.conftest import studio_of
from engine.test_shared_texts import run, sharing
from questions import question

from hyimg_cli.kv.tree import KVTree
from hyimg_cli.pipelines.image import choices as choosing
from hyimg_cli.pipelines.image.choices import choose_answer
from hyimg_cli.pipelines.image.stages import NO_CHOICE, ImageRequest
from hyimg_cli.pipelines.image.think import DecodeLoop
from hyimg_cli.spec.job import ImageJob, TextJob

# Of the embedded vocabulary, one token and several.
COLOURS = ("red", "a large blue circle", "blue")


def told(ends: Any) -> dict[str, Any]:
    found = {}
    for name, end in ends.items():
        assert isinstance(end, ImageRequest), end
        found[name] = end.answer, end.choice and (end.choice.shares, end.choice.mass)
    return found


def asked(sources: Sequence[str]) -> list[TextJob]:
    jobs = [question(f"free-{n}", f"what is {n}?", sources[:1], tokens=5 + n) for n in range(8)]
    jobs += [question(f"pick-{n}", f"is it {n}?", sources[:1], choices=COLOURS) for n in range(4)]
    jobs += [question(f"text-{n}", "name a colour", seed=n, ar_seed=n) for n in range(3)]
    jobs += [question("two", "which is darker?", sources[:2], bot_task="think")]
    return jobs


@pytest.fixture(autouse=True)
def any_mass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy was not taught to answer: whatever it says counts here."""
    monkeypatch.setattr(choosing, "LEAST_MASS", 0.0)


def test_sixteen_together_and_in_another_order_answer_as_each_alone(
    family: Any, sources: tuple[str, ...]
) -> None:
    jobs = asked(sources)
    alone = told({one.custom_id: _one(family, one) for one in jobs})
    assert len({answer.text for answer, _ in alone.values()}) > 4
    for order in (jobs, jobs[::-1], jobs[::3] + jobs[1::3] + jobs[2::3]):
        assert told(run(order, sharing(family, KVTree(10**9)), 16)) == alone
    assert told(run(jobs, studio_of(family), 3)) == alone


def _one(family: Any, job: TextJob) -> Any:
    (end,) = run([job], studio_of(family), 1).values()
    return end


def test_eight_questions_compute_their_picture_once(family: Any, sources: tuple[str, ...]) -> None:
    jobs = [question(str(n), f"what is {n}?", sources[:1]) for n in range(8)]
    ends = [*run(jobs, sharing(family, KVTree(10**9)), 8).values()]
    first = ends[0]
    assert isinstance(first, ImageRequest)
    opening = family.prompter.opening(jobs[0], [source.shape for source in first.sources])
    picture = opening.layout.cuts[-1]
    assert picture == 42
    assert sorted(end.shared for end in ends) == [0] + [picture] * 7
    lengths = [len(family.prompter.opening(one, [first.sources[0].shape]).ids) for one in jobs]
    assert sum(end.computed for end in ends) == sum(lengths) - 7 * picture


def test_a_choice_is_what_forced_texts_have_and_nothing_is_decoded(
    family: Any, sources: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the sum of log p that each answer has where it is fed token by token."""
    job = question("pick", "is it red?", sources[:1], choices=COLOURS)
    steps = list[int]()
    monkeypatch.setattr(DecodeLoop, "step", lambda self, going: steps.append(len(going)) or {})
    end = _one(family, job)
    assert not any(steps), "no decode step"
    assert end.choice is not None
    assert sum(end.choice.shares.values()) == pytest.approx(1, abs=1e-6)
    words, sums, first = family.prompter.vocabulary, {}, set[int]()
    for text in COLOURS:
        context = _fresh(family, job, sources)
        total = 0.0
        for id_ in words.encode(text):
            logprobs = family.text_logits([context])[0].double().log_softmax(0)
            total += float(logprobs[id_])
            family.feed([(context, [id_])])
        sums[text] = total
        first.add(words.encode(text)[0])
    context = _fresh(family, job, sources)
    logprobs = family.text_logits([context])[0].double().log_softmax(0)
    assert end.choice.mass == pytest.approx(sum(math.exp(logprobs[id_]) for id_ in first), abs=1e-9)
    total = sum(map(math.exp, sums.values()))
    for text, logprob in sums.items():
        assert end.choice.shares[text] == pytest.approx(math.exp(logprob) / total, abs=1e-5)
    assert end.answer == (end.choice.best, tuple(words.encode(end.choice.best)), "stop", None, ())
    # The buffer is as it was: the same again.
    length = context.buffer.length
    again = choose_answer(family, context, COLOURS)
    assert again.shares == pytest.approx(end.choice.shares)
    assert context.buffer.length == length


def _fresh(family: Any, job: TextJob, sources: Sequence[str]) -> Any:
    stages = studio_of(family)
    (end,) = run([replace(job, custom_id="fresh")], stages, 1).values()
    assert isinstance(end, ImageRequest)
    return end.context


def test_yes_counts_in_both_spellings(family: Any, sources: tuple[str, ...]) -> None:
    def chosen(*choices: str) -> Any:
        return _one(family, question("q", "is it red?", sources[:1], choices=choices)).choice

    pair, four = chosen("yes", "no"), chosen("yes", "no", "Yes", "No")
    both = four.shares["yes"] + four.shares["Yes"]
    assert pair.shares["yes"] == pytest.approx(both, abs=1e-9)
    assert pair.mass == pytest.approx(four.mass, abs=1e-12)


def test_another_answer_is_never_a_guess(
    family: Any, sources: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choosing, "LEAST_MASS", 0.05)
    end = _one(family, question("q", "is it?", sources[:1], choices=("zebra", "quartz")))
    assert end.choice.mass < 0.05
    assert (end.choice.shares, end.choice.best) == ({}, None)
    assert (end.answer.text, end.answer.ids) == ("", ())
    assert any(text.startswith(NO_CHOICE) for text in end.warnings)


def test_pictures_among_answers_keep_their_bits(
    family: Any, job: ImageJob, sources: tuple[str, ...]
) -> None:
    edit = replace(job, custom_id="edit", task="it2i", images=sources[:1], prompt="make it blue")
    pictures = [replace(job, custom_id="new", num_inference_steps=2), edit]
    stages = sharing(family, KVTree(10**9))
    plain = run(pictures, stages, 4)
    mixed = [*asked(sources)[:6], pictures[0], *asked(sources)[6:], pictures[1]]
    ends = run(mixed, sharing(family, KVTree(10**9)), 4)
    for one in pictures:
        a, b = plain[one.custom_id], ends[one.custom_id]
        assert isinstance(a, ImageRequest)
        assert isinstance(b, ImageRequest)
        assert a.text == b.text
        assert torch.equal(a.denoise_state.latents, b.denoise_state.latents)
        assert (a.pixels == b.pixels).all()
