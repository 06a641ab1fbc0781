"""Golden case 15: answers of the official code, from a manifest's lines through the engine."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.conftest import studio_of
from engine.test_shared_texts import run
from PIL import Image

from hyimg_cli.engine import runner
from hyimg_cli.manifest.manifest import read_manifest
from hyimg_cli.manifest.resolve import resolve_jobs
from hyimg_cli.models import registry
from hyimg_cli.models.common.spans import Grid
from hyimg_cli.models.hunyuan_image3.sequence import SourceShape
from hyimg_cli.models.hunyuan_image3.vision import vision_inputs
from hyimg_cli.models.protocols import Encoded, GeneratedText
from hyimg_cli.pipelines.image.stages import ImageRequest
from hyimg_cli.settings.config import settle
from hyimg_cli.settings.run import ModelChoice
from hyimg_cli.spec.job import TextJob

pytestmark = pytest.mark.parity
CASES = (
    "15a_t2t_greedy",
    "15b_i2t_greedy",
    "15c_i2t_two_pictures",
    "15d_i2t_think",
    "15e_i2t_stop",
)


@pytest.fixture(scope="module")
def model(goldens: Path) -> Any:
    return registry.load(ModelChoice(str(goldens / "checkpoint"), device="cpu"))


class Question:
    """A golden case as a job made from a manifest's line, and the stages that answer it."""

    def __init__(self, case: Any, model: Any, folder: Path) -> None:
        self.case, self.model = case, model
        self.facts = json.loads(case.path.with_suffix(".json").read_text())
        paths = []
        for number in range(self.facts["pictures"]):
            paths.append(f"picture{number}.png")
            Image.fromarray(case[f"picture{number}.rgb"].numpy()).save(folder / paths[-1])
        line = {"custom_id": "one", "task": self.facts["task"], "prompt": self.facts["prompt"]}
        line |= {"max_new_tokens": self.facts["max_new_tokens"], "model": model.card.model}
        line |= {"images": paths} if paths else {}
        line |= {"system_prompt": self.facts["system"]} if self.facts["system"] else {}
        line |= {"bot_task": "think"} if self.facts["bot_task"] == "think" else {}
        (folder / "jobs.jsonl").write_text(json.dumps(line))
        manifest = read_manifest(folder / "jobs.jsonl")
        # Not checked: the sizes that the checkpoint lists are too long for its positions.
        (self.job,), faults = resolve_jobs(manifest, settle({}, {}, {}), runner.cards(None))
        assert not faults
        assert isinstance(self.job, TextJob)
        self.stages = replace(studio_of(model), encode=self._encoded)

    def _encoded(self, image: Any, scope: str = "") -> tuple[Encoded, float]:
        """The picture with the golden latents, whose size the official code was given."""
        shown = image.pixels.tobytes()
        pictures = (self.case[f"picture{n}.rgb"] for n in range(self.facts["pictures"]))
        number = [one.numpy().tobytes() for one in pictures].index(shown)
        latents = self.case[f"picture{number}.vae_latents"]
        inputs = vision_inputs(image.pixels, self.model.network.arch.vision)
        ratio = int(self.facts["picture_headers"][number][2].strip("<>").rpartition("_")[2])
        slots = self.model.card.source_vit_tokens
        shape = SourceShape(ratio, Grid(*latents.shape[-2:]), inputs.grid, slots)
        with torch.no_grad():
            rows = self.model.network.encode_source(latents, inputs)
        return Encoded(image.digest, shape, rows), 0.0


@pytest.mark.parametrize("name", CASES)
def test_an_answer_has_the_official_ids_and_logits(
    open_case: Any, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    case = open_case(name)
    one = Question(case, model, tmp_path)
    golden = case["generated_ids"].tolist()
    words, network = model.prompter.vocabulary, model.network
    assert words.eos == 316
    if name == "15e_i2t_stop":
        monkeypatch.setattr(words, "eos", golden[-1])
    openings, logits = [], list[torch.Tensor]()
    opening_of, logits_of = model.prompter.opening, network.text_logits

    def opening(job: Any, shapes: Any) -> Any:
        openings.append(opening_of(job, shapes))
        return openings[-1]

    def spied(hidden_RM: torch.Tensor) -> torch.Tensor:
        logits.append(logits_of(hidden_RM).clone())
        return logits[-1].clone()

    with monkeypatch.context() as patch:
        patch.setattr(model.prompter, "opening", opening)
        patch.setattr(network, "text_logits", spied)
        (end,) = run([one.job], one.stages, 1).values()
    assert isinstance(end, ImageRequest)
    case.equal("input_ids", list(openings[0].ids))
    assert [list(span) for span in openings[0].layout.full_spans] == case["full_spans"].tolist()
    # Ours stops where a picture begins; the official code has no such end.
    opens = {words.boi, words.img_size, *words.ratios}
    kept = next((n for n, id_ in enumerate(golden) if id_ in opens), len(golden))
    taken = [*(end.text.ids or ())][len(words.encode("<think>")) * (name == "15d_i2t_think") :]
    # One more than what is kept: the token that ends it, or at the limit one that closes it.
    assert taken[: min(kept + 1, len(golden))] == golden[: kept + 1]
    answer = end.answer
    assert answer is not None
    if name == "15e_i2t_stop":
        assert list(answer.ids) == golden[:-1], "the token that ends an answer is not part of it"
    elif name == "15d_i2t_think":
        assert (answer.text, answer.thought) == ("", words.decode(golden))
    else:
        assert list(answer.ids) == golden[:kept]
    assert answer.finish == ("stop" if "stop" in name else "picture" if kept < 12 else "length")
    stored = case["decode_logits"]
    ours = torch.cat(logits)
    torch.testing.assert_close(ours, stored[: len(ours)], atol=2e-4, rtol=1e-4)
    if len(ours) == len(stored):
        case.close("decode_logits", ours)


def _answer(model: Any, text: str, bot_task: str = "none") -> Any:
    ids = tuple(model.prompter.vocabulary.encode(text))
    job = TextJob.__new__(TextJob)
    object.__setattr__(job, "bot_task", bot_task)
    return model.prompter.answer(job, GeneratedText(ids, text))


def test_tags_around_an_answer_are_no_part_of_it(model: Any) -> None:
    for text in ("<answer>Yes</answer>", "Yes<|endoftext|>", "<answer>Yes<|endoftext|>"):
        found = _answer(model, text)
        assert (found.text, found.finish, found.warnings) == ("Yes", "stop", ()), text
    began = _answer(model, "<boi>")
    assert (began.text, began.ids, began.finish) == ("", (), "picture")
    assert began.warnings == ("the model began a picture: its answer ends before it",)
    tagged = _answer(model, "<recaption>Yes<|endoftext|>")
    assert tagged.text == "Yes"
    assert tagged.warnings == ("the model began a recaption: its tag is not part of the answer",)
    thought = _answer(model, "<think>so</think>Yes<|endoftext|>", "think")
    assert (thought.thought, thought.text) == ("so", "Yes")
