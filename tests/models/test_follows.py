"""Options of jobs on a model of every family: each is followed, or refused in a line, or reported
for a whole run; a family that does not name a new option refuses it.
"""

import io
import json
from dataclasses import replace
from typing import Any

import pytest
from every_checkpoint import FOLDERS, WRITERS
from settings.examples import example

from hyimg_cli.errors import HyimgError
from hyimg_cli.manifest.fields import OF_MODELS
from hyimg_cli.manifest.manifest import read_manifest
from hyimg_cli.manifest.resolve import resolve_jobs
from hyimg_cli.models import registry
from hyimg_cli.settings.config import settle
from hyimg_cli.settings.run import JobKind
from hyimg_cli.settings.table import SETTINGS, Field
from hyimg_cli.spec.card import ModelCard, VideoCard

Card = ModelCard | VideoCard
PROMPTS: dict[JobKind, dict[str, Any]] = {
    "pictures": {"prompt": "a dog"},
    "videos": {"prompt": "a dog", "task": "t2v"},
}
# What else a line needs for the option.
BESIDE: dict[str, dict[str, Any]] = {
    "written": {"cot_text": "a"},
    "ratio_index": {"cot_text": "a"},
    **{name: {"task": "i2v", "images": ["a.png"]} for name in ("camera", "fit")},
    "infer_align_image_size": {"images": ["a.png"]},
    **{name: {"bot_task": "think"} for name in ("drop_think", "ar_seed", "temperature")},
    **{name: {"bot_task": "think"} for name in ("top_k", "top_p", "max_new_tokens")},
}


def fewest(card: Card) -> int:
    """The smallest number of source pictures of a job."""
    if isinstance(card, ModelCard):
        return card.fewest_images
    return card.start.fewest if card.start and card.needs_start else 0


def read(card: Card, kind: JobKind, line: dict[str, Any], **flags: Any) -> Any:
    """The jobs and the faults of a line for a model with this card."""
    sources = ["a.png"] * fewest(card)
    starts = {"images": sources, "task": "i2v" if kind == "videos" else "it2i"} if sources else {}
    text = json.dumps(PROMPTS[kind] | starts | line | {"custom_id": "a"})
    manifest = read_manifest("-", io.StringIO(f"{text}\n"))
    assert not manifest.faults
    return resolve_jobs(manifest, settle(flags, {}, {}), lambda _: card, lambda _: card)  # type: ignore[arg-type, return-value]


def unfollowed(faults: list[HyimgError]) -> set[str]:
    return {one.where.rpartition(": ")[2] for one in faults if one.code == "manifest.not-followed"}


MODELS = [*FOLDERS, *(pytest.param(one, marks=pytest.mark.thorough) for one in WRITERS)]


@pytest.fixture(scope="module", params=MODELS)
def known(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[JobKind, Card]:
    """The card of a checkpoint of every family and pipeline, and its kind of jobs."""
    folder = FOLDERS.get(request.param) or tmp_path_factory.mktemp("model") / "checkpoint"
    if request.param in WRITERS:
        WRITERS[request.param](folder)
    try:
        return "pictures", registry.model_card(str(folder))
    except HyimgError:
        return "videos", registry.video_card(str(folder))


def options(kind: JobKind) -> list[Field]:
    """Options that a line may have; fields that go with a given text come with another one."""
    apart = ("cot_token_ids", "written", "ratio_index")
    every = [field for field in OF_MODELS if field.concerns(kind, denoises_latents=True)]
    return [field for field in every if field.name not in apart]


def test_every_option_of_a_line_is_followed_or_refused(known: tuple[JobKind, Card]) -> None:
    kind, card = known
    assert card.follows <= {field.name for field in OF_MODELS}
    for field in options(kind):
        if field.name == "choices":  # of answers, which are no pictures
            continue
        value = "none-9" if field.name == "camera" else example(field)
        _, faults = read(card, kind, BESIDE.get(field.name, {}) | {field.name: value})
        assert (field.name in unfollowed(faults)) is (field.name not in card.follows), field.name


def test_an_option_that_a_family_forgets_is_refused_or_left_out(
    known: tuple[JobKind, Card],
) -> None:
    """As a new one is, which no family names yet."""
    kind, card = known
    plain, _ = read(card, kind, {})
    for field in (one for one in options(kind) if one.name in card.follows & SETTINGS.keys()):
        forgetful, value = replace(card, follows=card.follows - {field.name}), example(field)
        _, faults = read(forgetful, kind, BESIDE.get(field.name, {}) | {field.name: value})
        assert field.name in unfollowed(faults), field.name
        # For the whole run it is refused too, unless it is declared for some kind of models.
        jobs, faults = read(forgetful, kind, {}, **{field.name: value})
        is_for_some = field.only not in (None, "pictures", "videos")
        assert (field.name in unfollowed(faults)) is not is_for_some, field.name
        assert not is_for_some or jobs == plain, field.name
