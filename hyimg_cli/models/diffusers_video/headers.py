"""Faults of a checkpoint's files that loading would find, from their headers alone; no torch.

Each tensor is compared with the library's empty networks as a checkpoint is loaded (`weights`).
Here a block is compared with the other blocks of its list, and their number with the configuration.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from hyimg_cli.loading.checkpoint import Tensors, fault, refuse_packed, without_few_eights
from hyimg_cli.models.diffusers_video.layout import CheckpointLayout, Component
from hyimg_cli.models.diffusers_video.tokenizers import refuse_unreadable
from hyimg_cli.spec.units import names_text

# A tensor of a list of blocks that are all alike: the list, the block's number, the rest.
_IN_BLOCK = re.compile(r"((?:\w+\.)*?\w*(?:blocks|layers))\.(\d+)\.(.+)")
# Parts whose blocks are alike; a VAE's are not.
_UNIFORM = ("transformer", "text_encoder")
# By the name of a list: its number of blocks in the configuration.
_COUNTS = {
    "transformer_blocks": "num_layers",
    "single_transformer_blocks": "num_single_layers",
    "blocks": "num_layers",
    "layers": "n_layers",
}
_HINT = "use config.json and weights of the same checkpoint"


def check_headers(layout: CheckpointLayout) -> None:
    """Raise CheckpointError for files that are missing, damaged, or not of one checkpoint."""
    for part in layout.components.values():
        if not part.has_weights:
            refuse_unreadable(part)
            continue
        stored = part.tensors()
        refuse_packed(without_few_eights(stored), part.folder, part.name)
        if part.name.startswith(_UNIFORM):
            _refuse_uneven(part, stored)


def _refuse_uneven(part: Component, stored: Tensors) -> None:
    """Raise CheckpointError for a block that is not like the others, or another number of them."""
    lists: Mapping[str, dict[int, dict[str, Any]]] = defaultdict(lambda: defaultdict(dict))
    for name, info in stored.items():
        if found := _IN_BLOCK.fullmatch(name):
            lists[found[1]][int(found[2])][found[3]] = info.shape
    for own, blocks in lists.items():
        usual = Counter(pair for block in blocks.values() for pair in block.items())
        for number, block in sorted(blocks.items()):
            # What most blocks have, and what only this one has.
            lost = [one for (one, _), count in usual.items() if count * 2 > len(blocks)]
            absent = [f"{own}.{number}.{one}" for one in lost if one not in block]
            odd = [one for one, shape in block.items() if usual[one, shape] * 2 <= len(blocks)]
            if len(blocks) > 2 and (absent or odd):
                extra = [f"{own}.{number}.{one}" for one in odd]
                what = f"{part.name}: block {number} of {own} is not like the others: "
                what += names_text(sorted({*absent, *extra}))
                raise fault("mismatch", what, part.folder, _HINT)
        key = _COUNTS.get(own)
        expected = part.config().values.get(key) if key else None
        if isinstance(expected, int) and len(blocks) != expected:
            what = f"{part.name}: the weights have {len(blocks)} {own}, and {key} is {expected}"
            raise fault("mismatch", what, part.folder, _HINT)
