"""Which steps are recorded, as a person writes it."""

import pytest

from joulery.domain.errors import ConfigError
from joulery.domain.trace.tracing import Steps


def test_a_schedule_as_it_is_written() -> None:
    assert Steps.parse("skip=10,warmup=2,active=5,repeat=3") == Steps(10, 2, 5, 3)
    assert Steps.parse("active=7") == Steps(1, 1, 7, 3)
    assert Steps.parse("") == Steps()


@pytest.mark.parametrize("text", ["active=0", "skip=-1", "skip", "skip=1,skip=2", "steps=3", "active=x", "1,2,3,4"])
def test_what_is_no_schedule_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not a schedule of steps"):
        Steps.parse(text)
