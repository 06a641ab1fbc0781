"""A value off its default for every setting, from its declaration alone."""

from typing import Any

from pydantic import TypeAdapter

from hyimg_cli.settings import kinds, paths
from hyimg_cli.settings.kinds import Kind
from hyimg_cli.settings.name_template import NAME_TEMPLATE
from hyimg_cli.settings.table import SETTINGS, Declaration, Field

# Of texts that have a form.
BY_KIND: dict[Kind, Any] = {
    kinds.STEP_CACHE: "taylor:interval=4",
    kinds.SPAN: [0.2, 0.9],
    kinds.SIZE: "96x160",
    kinds.NAMES: ("other",),
    kinds.GATES: ("judge.follows=7",),
    kinds.SCORER_NAMES: ("ask:Is it blue, or red?",),
    kinds.SCORER_OPTIONS: ("judge.temperature=1",),
    kinds.DEVICE: "cuda:1",
    kinds.DURATION: "8h",
    kinds.SHARE: "50%",
    paths.REGION: "1,2,30,40",
    paths.LORAS: "style.safetensors@0.5",
    NAME_TEMPLATE: "{stem}-{seed}",
}


def example(field: Field) -> Any:
    """A value as JSON has it, other than the default and than what checkpoints have."""
    default = field.default if isinstance(field, Declaration) else None
    if field.kind in BY_KIND:
        return BY_KIND[field.kind]
    if field.kind.schema is bool:
        return default is not True
    if field.kind.choices:
        others = [one for one in field.kind.choices if one != default]
        return others[min(1, len(others) - 1)]
    limits = TypeAdapter(field.kind.annotation).json_schema()
    lowest = limits.get("minimum", limits.get("exclusiveMinimum", 0))
    match limits["type"]:
        case "integer":
            return default + 1 if type(default) is int else lowest + 4
        case "number":
            return lowest + 0.37 * min(limits.get("maximum", 10) - lowest, 10)
    return "other"


EXAMPLES = {name: example(row) for name, row in SETTINGS.items()}
