"""The recipes of known scorers, each in its process against a stand-in for its package."""

from collections.abc import Callable
from pathlib import Path

import pytest
from asked_scorers import in_order

from hyimg_cli.scoring.process import Score, ScorerProcess
from hyimg_cli.scoring.scorers import scorers_of
from hyimg_cli.settings.run import CandidatesConfig

RECIPES = Path(__file__).parents[2] / "recipes" / "scorers"
# The calls that each package takes, in the versions that the recipes name.
OPEN_CLIP = """
import torch

class Model:
    def eval(self):
        return self
    def encode_image(self, images):
        assert images.shape[1:] == (3,), images.shape
        return images
    def encode_text(self, texts):
        return texts

def create_model_and_transforms(model, pretrained=None):
    assert (model, pretrained) == ("ViT-B-32", "laion2b_s34b_b79k")
    preprocess = lambda image: torch.tensor([1.0, 0.0, 0.0])
    return Model(), None, preprocess

def get_tokenizer(model):
    rows = {"a cat": [1.0, 0.0, 0.0], "a dog": [0.0, 1.0, 0.0]}
    return lambda texts: torch.tensor([rows[text] for text in texts])
"""
HPSV3 = """
class Number:
    def __init__(self, value):
        self.value = value
    def __float__(self):
        return self.value

class HPSv3RewardInferencer:
    def __init__(self, config_path=None, checkpoint_path=None, device="cuda", differentiable=False):
        pass
    def reward(self, image_paths, prompts):
        assert all(path.endswith(".png") for path in image_paths)
        return [[Number(len(prompt) - 7.5), Number(0.1)] for prompt in prompts]
"""
EDITSCORE = """
class EditScore:
    def __init__(self, backbone="gpt-4.1", model_name_or_path="", score_range=25, num_pass=1,
                 lora_path=None):
        assert (backbone, num_pass) == ("qwen25vl", 1)
    def evaluate(self, image_prompts, text_prompt):
        source, result = image_prompts
        assert source.mode == result.mode == "RGB"
        reason = "guess_if_cannot_parse | I am" if text_prompt == "a dog" else "It is red."
        return {"prompt_following": 8.0, "consistency": 6.0, "perceptual_quality": 9.0,
                "overall": 7.3, "SC_reasoning": reason, "PQ_reasoning": "Sharp."}
"""


@pytest.fixture
def scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_picture: Callable[..., Path]
) -> Callable[..., list[Score]]:
    """Scores of a cat and a dog by a recipe, beside a stand-in for its package."""

    def run(recipe: str, package: str, source: str) -> list[Score]:
        monkeypatch.chdir(tmp_path)
        (tmp_path / f"{package}.py").write_text(source)
        picture = str(write_picture())
        (scorer,) = scorers_of(CandidatesConfig(score=(f"{RECIPES}/{recipe}",)))
        case = {"sources": [picture], "kept_source": 1, "result": picture}
        with ScorerProcess(scorer, 60.0, print) as process:
            return in_order(process, [case | {"prompt": prompt} for prompt in ("a cat", "a dog")])

    return run


def test_clip(scored: Callable[..., list[Score]]) -> None:
    assert [one.value for one in scored("clip.py:clip", "open_clip", OPEN_CLIP)] == [1.0, 0.0]


def test_hpsv3(scored: Callable[..., list[Score]]) -> None:
    assert [one.value for one in scored("hpsv3.py:hpsv3", "hpsv3", HPSV3)] == [-2.5, -2.5]


def test_a_number_that_editscore_made_up_is_null(scored: Callable[..., list[Score]]) -> None:
    fine, guessed = scored("editscore.py:edit", "editscore", EDITSCORE)
    parts = {"prompt_following": 8.0, "consistency": 6.0, "perceptual_quality": 9.0}
    assert (fine.value, fine.parts, fine.reason) == (7.3, parts, "It is red. Sharp.")
    assert (guessed.value, guessed.fault) == (None, "reply not readable: the scorer guessed")
