"""The load of language models: its site files are valid in every order, and its client reads whole streams."""

from pathlib import Path

import httpx
import pytest

from benchmarks._llm_load import _ORDERS, BUNDLED, SITE, _streamed
from joulery.config import load

USAGE = b'data: {"choices": [], "usage": {"completion_tokens": 3}}\n\n'


@pytest.mark.parametrize("order", _ORDERS.values())
def test_every_order_is_one_that_a_site_file_takes(tmp_path: Path, order: str) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(SITE.format(engine=BUNDLED, order=order.replace("%g", "12.5"), cache=0))
    assert load(path).language_models[0].order.kind in order


async def test_the_usage_of_a_stream_that_ended_is_counted_and_a_broken_stream_is_an_error() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        done = b": joulery energy_j=1\n\ndata: [DONE]\n\n" if b"whole" in request.content else b'data: {"error": 1}\n\n'
        return httpx.Response(200, content=USAGE + done)

    async with httpx.AsyncClient(base_url="http://joulery", transport=httpx.MockTransport(answer)) as client:
        assert (await _streamed(client, {"prompt": "whole"}))["completion_tokens"] == 3
        with pytest.raises(RuntimeError, match="error"):
            await _streamed(client, {"prompt": "broken"})
