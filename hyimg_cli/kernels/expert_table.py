"""The one table of kernels for a layer's experts on a GPU, by card and by how weights are held.

    kernel    whose       what                                            where
    decode    ours        each row reads its chosen experts               Triton; e4m3 from 8.9 on
    grouped   torch's     grouped_mm; quantised weights made dense        everywhere
    scaled    torch's     scaled_grouped_mm, both factors in FP8          9.x
    scaled_1  torch's     the same, no group of rows padded to 16         9.x, where it was measured
    quack     quack's     grouped product with gathered rows, dense       9.x and 10.x, its package

A card's own rows are in `experts.json`, which `benchmarks/expert_kernels.py --table` writes. Every
other card has the rows below, which are reckoned. A kernel that a card cannot run gives way to
`grouped`; where the card's own rows asked for it, that is told.
"""

import json
import logging
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hyimg_cli.errors import MachineError
from hyimg_cli.settings.run import Quantization

_LOG = logging.getLogger(__name__)
Capability = tuple[int, int]
MEASURED = Path(__file__).with_name("experts.json")
KERNELS = ("decode", "grouped", "scaled", "scaled_1", "quack")
# Those that are held against the libraries', and go where they do not win.
OURS = ("decode",)


@dataclass(frozen=True)
class ExpertRow:
    """Up to `most_few` rows the kernel `few` multiplies, above them `many`."""

    few: str
    many: str
    most_few: int = 10


_RECKONED: dict[Quantization, ExpertRow] = {
    "none": ExpertRow("decode", "grouped"),
    "fp8": ExpertRow("decode", "scaled"),
    "nf4": ExpertRow("decode", "grouped"),
}
# To be made dense first, all 64 experts' bytes are moved eight or nine times for a product: up to
# here each row's own eight are fewer.
_MOST_QUANTISED = 64


def row_for(card: str, capability: Capability, form: Quantization) -> ExpertRow:
    """The row of a card, by name where it was measured, with kernels that run there."""
    measured = _measured(MEASURED).get(card, {}).get(form)
    row = measured or _RECKONED[form]
    few, many = (
        _there(name, capability, form, measured is not None) for name in (row.few, row.many)
    )
    most = row.most_few
    if measured is None and many == "grouped" and form != "none":
        most = _MOST_QUANTISED
    return ExpertRow(few, many, 0 if few == many else most)


def runs(name: str, capability: Capability, form: Quantization) -> bool:
    """True if a GPU can run the kernel on weights that are held so."""
    match name:
        case "decode":
            return _is_installed("triton") and (form != "fp8" or reads_e4m3(capability))
        case "scaled" | "scaled_1":
            return form == "fp8" and takes_scaled(capability)
        case "quack":
            return form == "none" and capability[0] in (9, 10) and _is_installed("quack")
    return True


def takes_scaled(capability: Capability) -> bool:
    """True if torch multiplies groups of FP8 rows."""
    return capability[0] == 9


def reads_e4m3(capability: Capability) -> bool:
    """Older GPUs have no instructions for e4m3, and Triton no way around it."""
    return capability >= (8, 9)


def _is_installed(package: str) -> bool:
    return find_spec(package) is not None


def _there(name: str, capability: Capability, form: Quantization, is_measured: bool) -> str:
    if runs(name, capability, form):
        return name
    if is_measured:
        _tell(name)
    return "grouped"


@lru_cache
def _tell(name: str) -> None:
    _LOG.warning(
        "the table of expert kernels has %s for this card, which is not installed here: torch's "
        "grouped product is taken, which may be slower",
        name,
    )


@lru_cache(maxsize=2)
def _measured(path: Path) -> dict[str, dict[str, ExpertRow]]:
    """Rows by card and format. Raises MachineError for a file that cannot be one."""
    if not path.is_file():
        return {}
    try:
        cards: dict[str, Any] = json.loads(path.read_bytes())
        found = {
            card: {form: ExpertRow(**row) for form, row in rows.items()}
            for card, rows in cards.items()
        }
        for row in (row for rows in found.values() for row in rows.values()):
            if not {row.few, row.many} <= set(KERNELS) or not row.most_few >= 0:
                raise ValueError(f"{row} is no row of it")
    except (ValueError, TypeError, AttributeError) as error:
        raise MachineError(
            f"the table of expert kernels cannot be read: {error}",
            hint=f"remove {path.name}: without it kernels are taken by compute capability",
            code="machine.expert-table",
        ) from None
    return found
