"""``joulery serve``: what is refused before anything starts."""

import pytest

from joulery.ui.cli import main


@pytest.mark.parametrize(
    ("models", "twice"),
    [(["toy=m:a", "toy=m:b"], "toy/toy"), (["n/small=m:a", "n/large=m:b", "n/small=m:c"], "n/small")],
)
def test_two_models_of_one_name_are_refused(models: list[str], twice: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each would have answered half of the requests."""
    flags = [word for model in models for word in ("--model", model)]
    assert main(["serve", "--listen", "127.0.0.1:0", *flags]) == 2
    first, hint = capsys.readouterr().err.splitlines()
    assert first == f"joulery: --model: two models have the same name and variant (got {twice})"
    assert "--replicas" in hint
