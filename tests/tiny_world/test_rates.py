"""The embedded checkpoint follows prompts and edits that its training never saw."""

from pathlib import Path

import pytest
from tiny_world.evaluate import Question, answers, questions, rates

from hyimg_cli.models import registry

COUNT = 12


def _asked(*kinds: str) -> list[Question]:
    asked = [question for question in questions(COUNT) if question.kind in kinds]
    assert len(asked) == COUNT * len(kinds)
    return asked


@pytest.mark.thorough
def test_prompts_and_edits(tmp_path: Path) -> None:
    """The model card has rates near one; the margin is for the rounding of other machines."""
    assert registry.model_card(registry.EMBEDDED).is_trained
    folder = registry.resolve_model(registry.EMBEDDED)
    measured = rates(answers(folder, _asked("new", "edit"), tmp_path))
    new, edit = measured["new"], measured["edit"]
    assert (new["n"], edit["n"]) == (COUNT, COUNT)
    assert min(new["shape"], new["colour"], new["background"]) >= 0.9
    assert edit["right"] >= 0.8
    assert min(new["text"], edit["text"]) >= 0.9
