"""The play of ``python -m benchmarks kills``, small: every process is killed once."""

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import _killed_service
from benchmarks._killed_service import KILLS, Counts, Played, play
from benchmarks.kills import result


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.xdist_group("up")
def test_each_request_is_answered_once_and_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine server takes records with it that only gateways have then; a controller, rows that are not stored."""
    monkeypatch.setenv("JOULERY_CACHE", str(tmp_path / "cache"))
    asked = play(tmp_path, requests=300, switches=1, kills=5, connections=4, pause_s=0.02, answers_between=50)
    found = asyncio.run(asked)
    counts = found.counts
    assert found.kills == Counter({**dict.fromkeys(KILLS, 1), "replica": 2})
    assert counts.lost == counts.wrong == 0 and counts.requests >= 300
    assert counts.statuses.keys() <= {200, 503, 429} and counts.again <= 2 * 4, "only connections of dead gateways"
    assert found.agrees, f"{counts} against {found.recorded}"
    assert json.dumps(result(found).as_dict())


def test_the_books_tell_a_difference() -> None:
    def agrees(answered: int, refused: int, cut: int, again: int = 2) -> bool:
        counts = Counts(sent=110, again=again, statuses=Counter({200: 90, 503: 10}))
        recorded = Counter({"ok": answered, "unavailable": refused, "cancelled": cut})
        return Played(counts, recorded, 1, Counter(), {}, 1.0).agrees

    assert agrees(90, 10, 0) and agrees(90, 10, 2) and agrees(91, 10, 1)
    assert not agrees(89, 10, 0), "a row is missing"
    assert not agrees(89, 10, 1), "one that was answered is no row of a request that was cut off"
    assert not agrees(90, 9, 0) and not agrees(90, 10, 3) and not agrees(90, 11, 0, again=0)
    assert _killed_service.profile().entries


def test_a_wrong_answer_is_seen() -> None:
    """An answer twice on a connection, or that of another request, is counted."""

    async def asked(*answers: dict[str, object]) -> Counts:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"}]}")
            bodies = [json.dumps(answer).encode() for answer in answers]
            writer.write(b"".join(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(b), b) for b in bodies))
            await reader.read()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        clients = _killed_service.Clients(server.sockets[0].getsockname()[1], 1, 60.0)
        await clients.more(1)
        clients._tasks[0].cancel()
        await asyncio.gather(*clients._tasks, return_exceptions=True)
        server.close()
        await server.wait_closed()
        return clients.counts

    right = {"id": "0-1", "outputs": [{"data": [1.0]}]}
    assert asyncio.run(asked(right)).wrong == 0
    assert asyncio.run(asked({**right, "id": "0-2"})).wrong == 1
    assert asyncio.run(asked({**right, "outputs": [{"data": [2.0]}]})).wrong == 1
    assert asyncio.run(asked(right, right)).wrong == 1
