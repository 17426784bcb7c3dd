import json

import httpx
import pytest

from joulery.gateway import app, feedback
from joulery.gateway.body import RefusedError
from joulery.gateway.feedback import Feedback
from tests.gateway.support import INFER, FakeEngine, body, serving


def labels(*pairs: tuple[str, bool]) -> bytes:
    return json.dumps({"labels": [{"id": name, "correct": right} for name, right in pairs]}).encode()


async def test_labels_are_counted_by_the_variant_that_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Feedback()
    monkeypatch.setattr(app, "Feedback", lambda: kept)
    async with serving(FakeEngine()) as gateway, httpx.AsyncClient(base_url=gateway.server.url) as client:
        for name in ("a", "b", None):
            rest = {} if name is None else {"id": name}
            assert (await client.post(INFER, content=body(**rest))).status_code == 200
        found = await client.post("/v2/models/toy/feedback", content=labels(("a", True), ("b", False), ("c", True)))
        assert found.json() == {"accepted": 2, "unknown": 1}
        again = await client.post("/v2/models/toy/feedback", content=labels(("a", True)))
        assert again.json() == {"accepted": 0, "unknown": 1}, "an answer is labelled once"
        assert kept.tally("toy") == {"small": (1, 2)} and kept.tally("other") == {}


async def test_the_route_needs_post_a_service_and_its_token() -> None:
    async with serving(FakeEngine(), token="t", protected=True) as gateway:
        url = gateway.server.url
        async with httpx.AsyncClient(base_url=url, headers={"authorization": "Bearer t"}) as client:
            assert (await client.get("/v2/models/toy/feedback")).status_code == 405
            assert (await client.post("/v2/models/none/feedback", content=labels())).status_code == 404
            assert (await client.post("/v2/models/toy/feedback", content=b"[1]")).status_code == 400
        async with httpx.AsyncClient(base_url=url) as client:
            assert (await client.post("/v2/models/toy/feedback", content=labels(("a", True)))).status_code == 401


@pytest.mark.parametrize(
    "wrong",
    [b"{", b"[]", b"{}", b'{"labels": 1}', b'{"labels": [{"id": "a"}]}', b'{"labels": [{"id": 1, "correct": true}]}'],
)
def test_what_is_no_label_counts_nothing(wrong: bytes) -> None:
    kept = Feedback()
    kept.answered("toy", "a", "small")
    with pytest.raises(RefusedError, match=r"JSON|labels|id"):
        kept.label("toy", wrong)
    assert kept.tally("toy") == {}


def test_a_wrong_entry_refuses_the_whole_call() -> None:
    kept = Feedback()
    kept.answered("toy", "a", "small")
    mixed = b'{"labels": [{"id": "a", "correct": true}, {"id": "b", "correct": "yes"}]}'
    with pytest.raises(RefusedError, match="label 1"):
        kept.label("toy", mixed)
    assert kept.label("toy", labels(("a", True))) == {"accepted": 1, "unknown": 0}


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feedback, "MOST_ANSWERS", 2)
    kept = Feedback()
    for name in ("a", "b", "c"):
        kept.answered("toy", name, "small")
    kept.answered("toy", "x" * 200, "small")
    assert kept.label("toy", labels(("a", True), ("b", True), ("c", False))) == {"accepted": 2, "unknown": 1}
    assert kept.tally("toy") == {"small": (1, 2)}
