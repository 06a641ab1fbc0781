"""Configurations of other networks than those that were released; no torch."""

from collections.abc import Mapping
from typing import Any

from hyimg_cli.loading.config import Config


def refuse_unreleased(config: Config, released: Mapping[str, Any]) -> None:
    """Passes a configuration whose keys, where it has them, say what was `released`: other values
    exist in unreleased code alone, and would be computed wrongly. Raises CheckpointError.
    """
    for key, only in released.items():
        value = config.values.get(key)
        if value is not None and value != only:
            raise config.fault(key, value, f"{only!r}, the only one that was released")
