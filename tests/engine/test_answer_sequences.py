"""Answers against sequences that are spelled out here, and a twin that keeps no keys and values.

Other prompts, pictures and system texts than the golden cases have. The twin computes prompt and
text anew for every token, each in one forward, and takes the most likely one.
"""

from collections.abc import Sequence
from typing import Any

from engine.test_shared_texts import run, sharing
from questions import question, written_anew

from hyimg_cli.kv.tree import KVTree
from hyimg_cli.pipelines.image.stages import ImageRequest
from hyimg_cli.spec.job import TextJob

SYSTEM = "You name shapes and colours.\nBe brief."
TOKENS = 9


def questions(sources: Sequence[str]) -> list[TextJob]:
    two, custom = sources[:2], {"use_system_prompt": "custom", "system_prompt": SYSTEM}
    more: list[tuple[str, Sequence[str], dict[str, Any]]] = [
        ("which of them is darker, and why?", two, custom),
        ("how many shapes are there? 3, 4 or more", two, {"bot_task": "think"}),
        ("is the second one red\nor green?", sources[1:3], {"bot_task": "think"} | custom),
        ("describe it", sources[2:3], custom),
        ("name a colour", (), custom),
        ("name a shape", (), {"bot_task": "think"}),
    ]
    return [
        question(str(n), text, images, tokens=TOKENS, **rest)
        for n, (text, images, rest) in enumerate(more)
    ]


def spelled_out(family: Any, job: TextJob, end: ImageRequest) -> tuple[list[int], list[Any]]:
    """The prompt's ids, and its spans with full attention; each part is encoded alone."""
    words, found, spans = family.prompter.vocabulary, list[int](), []
    found.append(words.bos)
    if job.system_prompt:
        found += [*words.encode(SYSTEM), *words.encode("\n\n")]
    found += words.encode("User: ")
    for source in end.sources:
        shape: Any = source.shape
        found += [words.boi, words.img_size, words.ratios[shape.ratio_index], words.timestep]
        start = len(found)
        found += [words.img] * shape.vae_grid.cells + [words.joint_img_sep]
        found += [words.img] * shape.vit_slots
        spans.append((start, len(found)))
        found.append(words.eoi)
    trigger = "<think>" if job.bot_task == "think" else ""
    found += [*words.encode(job.prompt), *words.encode("\n\n")]
    return found + words.encode(f"Assistant: {trigger}"), spans


def test_answers_are_those_of_the_twin(family: Any, sources: tuple[str, ...]) -> None:
    jobs = questions(sources)
    ends = run(jobs, sharing(family, KVTree(10**9)), len(jobs))
    texts = set()
    for job in jobs:
        end = ends[job.custom_id]
        assert isinstance(end, ImageRequest)
        assert end.text.ids is not None
        layout = family.prompter.opening(job, [one.shape for one in end.sources]).layout
        ids, spans = spelled_out(family, job, end)
        assert (list(layout.ids), list(layout.full_spans)) == (ids, spans), job.prompt
        tag = len(family.prompter.vocabulary.encode("<think>")) * (job.bot_task == "think")
        written = list(end.text.ids[tag : tag + TOKENS])
        assert written == written_anew(family, layout, ids, end.sources, TOKENS)[: len(written)], (
            job.prompt
        )
        assert len(written) == TOKENS or end.answer.finish != "length"
        texts.add(tuple(written))
    assert len(texts) == len(jobs)
