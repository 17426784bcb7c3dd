"""The tests of the house share the trees of all sources: one worker runs them
(:mod:`tests.scheduling`), and frees the trees after the last."""

from collections.abc import Iterator

import pytest

from tests.house.syntax import forget


@pytest.fixture(scope="package", autouse=True)
def trees() -> Iterator[None]:
    """Trees of the sources, until the last test of this folder."""
    yield
    forget()
