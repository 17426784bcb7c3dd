"""Commands that the reproduction runs: what failed is never taken for a result."""

import pytest

from joulery.domain.errors import DataError
from reproduce import product


@pytest.mark.parametrize("code", [1, 2, 4])
def test_the_output_of_a_command_that_failed_is_no_result(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def failing(arguments: list[str]) -> int:
        print("{}")
        return code

    monkeypatch.setattr(product, "main", failing)
    with pytest.raises(DataError, match=f"exit code {code}"):
        product.joulery_json("plan", "site.yaml")


def test_an_infeasible_plan_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def infeasible(arguments: list[str]) -> int:
        print('{"feasible": false}')
        return 3

    monkeypatch.setattr(product, "main", infeasible)
    assert product.joulery_json("plan", "site.yaml") == {"feasible": False}


def test_a_command_that_prints_nothing_is_an_error() -> None:
    with pytest.raises(DataError, match="exit code 2"):
        product.joulery_json("plan", "no-such-site.yaml")
