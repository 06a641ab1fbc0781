"""Golden token ids back into layouts, through the product's own builder."""

from dataclasses import dataclass
from typing import Any

from hyimg_cli.models.common.spans import Grid
from hyimg_cli.models.hunyuan_image3.sequence import (
    Layout,
    LayoutBuilder,
    Section,
    SourceShape,
    Target,
)
from hyimg_cli.models.hunyuan_image3.vocabulary import Vocabulary


@dataclass(frozen=True)
class Grids:
    """What ids alone do not tell: token grids of the picture and of each source's two halves."""

    target: Grid
    vae: tuple[Grid, ...] = ()
    vit: tuple[Grid, ...] = ()


def layout_of(
    conditional: list[int],
    unconditional: list[int],
    *,
    grids: Grids,
    vocabulary: Vocabulary,
    is_joint: bool,
) -> Layout:
    """The layout whose ids these are; asserts that it says so itself."""
    draft = LayoutBuilder(vocabulary, has_joint_source_span=is_joint)
    at = sources = 0
    while at < len(conditional):
        if conditional[at] == vocabulary.boi and at + 3 < len(conditional):
            ratio = vocabulary.ratios.index(conditional[at + 2])
            images = _image_runs(conditional, at, vocabulary)
            if vocabulary.joint_img_sep in conditional[at : images[-1][1]]:
                (_, _), (vit_start, vit_stop) = images
                draft.source(
                    SourceShape(ratio, grids.vae[sources], grids.vit[sources], vit_stop - vit_start)
                )
                sources += 1
            else:
                between = conditional[at : images[0][0]]
                draft.target(
                    Target(
                        ratio,
                        grids.target,
                        vocabulary.guidance in between,
                        vocabulary.timestep_r in between,
                    )
                )
            at = images[-1][1] + 1
        else:
            pair = conditional[at], unconditional[at]
            draft.section(Section(pair[:1], is_replaceable=pair[0] != pair[1]))
            at += 1
    layout = draft.layout()
    assert list(layout.ids) == conditional
    assert list(layout.unconditional_ids) == unconditional
    return layout


def target_grid(case: Any) -> Grid:
    """Rows and columns of the picture's tokens, from whichever tensor tells them."""
    if "gen_token_hw" in case:
        return Grid(*case["gen_token_hw"].tolist())
    return Grid(*case["initial_latents"].shape[-2:])


def target_ratio(case: Any, vocabulary: Vocabulary) -> int:
    """The picture's ratio index: the last ratio token of the sequence."""
    ids = case["input_ids"][0].tolist()
    return vocabulary.ratios.index([id_ for id_ in ids if id_ in vocabulary.ratios][-1])


def _image_runs(ids: list[int], boi: int, vocabulary: Vocabulary) -> list[tuple[int, int]]:
    """Runs of `<img>` between `<boi>` and `<eoi>`."""
    runs: list[tuple[int, int]] = []
    at = boi
    while ids[at] != vocabulary.eoi:
        start = at
        while ids[at] == vocabulary.img:
            at += 1
        if at > start:
            runs.append((start, at))
        else:
            at += 1
    return runs
