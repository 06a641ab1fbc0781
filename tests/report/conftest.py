"""A browser that is started once for all tests that look at pages."""

from collections.abc import Iterator

import pytest
from report.browser import FOUND, Tab


@pytest.fixture(scope="session")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    if FOUND is None:
        pytest.skip("no browser here")
    browser = Tab(tmp_path_factory.mktemp("browser"))
    yield browser
    browser.close()
