"""The commands of docs/datasets.md run unchanged, in the order of the page."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "datasets.md"


@pytest.mark.usefixtures("fake_session")
def test_the_page_works_as_it_is_typed(run_cli: Any) -> None:
    pytest.importorskip("pyarrow", reason="the extra [export] is not installed")
    commands = "\n".join(re.findall(r"```console\n(.*?)```", PAGE.read_text(), re.S)).splitlines()
    for command in filter(None, commands):
        ran = run_cli(*shlex.split(command)[1:])
        assert ran.code == 0, (command, ran.err)
    for folder in ("splits", "tars"):
        assert run_cli("export", "--verify", folder).code == 0
