from collections.abc import Iterator

import pytest

from tests.browser import Browser


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One headless browser for all tests that look at a page."""
    with Browser() as one:
        yield one
