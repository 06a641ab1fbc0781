"""Answers about pictures: the published code's ids and logits, and what its prompts hold."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from questions import question, written_anew
from safetensors.torch import load_file

from hyimg_cli.errors import JobError
from hyimg_cli.models.bagel.family import Bagel
from hyimg_cli.models.bagel.prompter import ANSWER_PROMPT
from hyimg_cli.pipelines.image.stages import ImageRequest

from .conftest import GOLDEN, Runs

FACTS: dict[str, Any] = json.loads((GOLDEN / "questions.json").read_text())


@pytest.mark.parametrize("name", sorted(FACTS))
def test_the_published_answer(
    bagel: Bagel, pictures: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    facts, logits = FACTS[name], list[torch.Tensor]()
    job = question(
        name,
        facts["prompt"],
        [pictures(facts["mode"])],
        tokens=facts["max_length"],
        model="bagel",
        bot_task="think" if facts["think"] else "none",
    )
    logits_of = bagel.network.text_logits

    def spied(hidden_RM: torch.Tensor) -> torch.Tensor:
        logits.append(logits_of(hidden_RM).clone())
        return logits[-1].clone()

    monkeypatch.setattr(bagel.network, "text_logits", spied)
    done = Runs(bagel).one(job)
    answer = done.answer
    assert answer is not None
    assert (list(answer.ids), answer.text) == (facts["decoded_ids"], facts["text"])
    assert answer.finish == ("stop" if facts["stopped_by"] == "eos" else "length")
    assert (answer.thought, bool(answer.warnings)) == (None, answer.finish == "length")
    golden = load_file(GOLDEN / "questions.safetensors")[f"{name}.logits"]
    ours = torch.cat(logits)
    # The published loop computes one more at its limit.
    torch.testing.assert_close(ours, golden[: len(ours)], atol=2e-4, rtol=1e-4)
    assert len(ours) >= len(golden) - 1
    layout = done.context.layout
    blocks = layout.blocks[:-1]  # without the answer's first marker
    assert blocks[-1].stop == facts["context_kv_len"]
    assert blocks[-1].next_rope == facts["context_rope_next"]
    texts = [list(layout.ids[b.start : b.stop]) for b in blocks if b.kind == "text"]
    assert texts == facts["texts"]


def test_a_thought_is_apart_from_the_answer(bagel: Bagel) -> None:
    from hyimg_cli.models.protocols import GeneratedText

    words, prompter = bagel.prompter.vocabulary, bagel.prompter
    said = "<think> a house </think> red"
    marks = prompter.markers
    text = GeneratedText((marks.bos, *words.encode(said), marks.eos), said)
    found = prompter.answer(question("q", "?", bot_task="think"), text)
    assert (found.thought, found.text) == ("a house", "red")
    assert prompter.answer(question("q", "?"), text).text == said


def test_questions_about_one_picture_compute_it_once(bagel: Bagel, pictures: Any) -> None:
    picture = [pictures("RGB")]
    jobs = [
        question("a", "what is in the picture?", picture, model="bagel"),
        question("b", "is it a house?", picture, model="bagel", choices=("yes", "no")),
        question("c", "what is in the sea?", picture, model="bagel"),
    ]
    alone = {one.custom_id: told(Runs(bagel).one(one)) for one in jobs}
    ends = Runs(bagel).all(jobs)
    assert {name: told(end) for name, end in ends.items()} == alone
    assert [ends[name].shared for name in "abc"] == [0, 50, 50]


def told(end: ImageRequest) -> Any:
    return end.answer, end.choice and (end.choice.shares, end.choice.mass)


@pytest.mark.parametrize("kind", ["en_unified", "custom"])
def test_a_system_prompt_is_refused(bagel: Bagel, kind: Any) -> None:
    job = question("q", "?", use_system_prompt=kind, system_prompt="Be brief.")
    with pytest.raises(JobError):
        bagel.prompter.check(job)


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("modes", [(), ("RGB", "RGBA"), ("RGBA", "RGB", "RGB")])
def test_the_answer_of_a_twin_that_keeps_nothing(
    bagel: Bagel, pictures: Any, modes: tuple[str, ...], thinks: bool
) -> None:
    """The sequence is spelled out, and each token is computed with all before it anew."""
    job = question("q", "which one has a house?", [pictures(one) for one in modes], tokens=7)
    job = replace(job, model="bagel", bot_task="think" if thinks else "none")
    done = Runs(bagel).one(job)
    words, marks = bagel.prompter.vocabulary, bagel.prompter.markers
    texts = [ANSWER_PROMPT, job.prompt] if thinks else [job.prompt]
    ids, system = list[int](), texts[:-1]
    for text in system:
        ids += [marks.bos, *words.encode(text), marks.eos]
    for source in done.sources:
        shape: Any = source.shape
        ids += [marks.start, *[-2] * shape.vit.cells, marks.end]
    ids += [marks.bos, *words.encode(job.prompt), marks.eos, marks.bos]
    layout = bagel.prompter.opening(job, [one.shape for one in done.sources]).layout
    assert list(layout.ids) == ids
    assert done.text.ids is not None
    # At the limit, which counts the first marker, the last one closes it.
    is_cut = done.answer is not None and done.answer.finish == "length"
    written = list(done.text.ids[1 : -1 if is_cut else None])
    found = written_anew(bagel, layout, ids, done.sources, len(written))
    assert written == found
    assert len(found) == 6 or not is_cut
