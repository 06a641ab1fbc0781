"""A command that makes a dataset."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from export.runs import LICENSED


@pytest.fixture
def export(run_cli: Any) -> Callable[..., dict[str, Any]]:
    """Runs a command that is to end with `code`: what dataset.json holds."""

    def run(*words: Any, code: int = 0) -> dict[str, Any]:
        ran = run_cli("export", *map(str, words), *LICENSED, "--json")
        assert ran.code == code, ran.err
        return dict(json.loads(ran.out)["dataset"])

    return run
