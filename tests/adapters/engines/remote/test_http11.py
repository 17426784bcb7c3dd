"""HTTP/1.1 to one server near by: whatever the server does, the client knows."""

import asyncio
from contextlib import asynccontextmanager

import httpx
import pytest

from joulery.adapters.engines.remote.http11 import Http11Transport
from tests.adapters.engines.support import until

PATIENCE = {"connect": 5.0, "read": 5.0, "write": 5.0, "pool": None}


class Scripted:
    """Answers each request of a connection with the next bytes of its script; None closes the connection."""

    def __init__(self, *script):
        self.script, self.asked, self.connections, self.gone = list(script), [], 0, 0

    async def __call__(self, reader, writer):
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                self.asked.append((head, await reader.readexactly(length)))
                for part in self.script.pop(0):
                    if part is None:
                        return
                    if callable(part):
                        await part()
                        continue
                    writer.write(part)
                    await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            self.gone += 1
        finally:
            writer.close()


@asynccontextmanager
async def talking(*script):
    scripted = Scripted(*script)
    server = await asyncio.start_server(scripted, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    transport = Http11Transport("127.0.0.1", port)
    try:
        yield scripted, transport, f"http://127.0.0.1:{port}/v1/x?y=1"
    finally:
        await transport.aclose()
        server.close()
        await server.wait_closed()


def post(url, body=b"hello", **patience):
    return httpx.Request("POST", url, content=body, extensions={"timeout": {**PATIENCE, **patience}})


async def ask(transport, request):
    response = await transport.handle_async_request(request)
    try:
        return response.status_code, b"".join([piece async for piece in response.aiter_bytes()])
    finally:
        await response.aclose()


WHOLE = b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\nx-a: b\r\n\r\nabc"
CHUNKED = b"HTTP/1.1 201 Created\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"


async def test_every_request_has_a_connection_of_its_own_and_nothing_of_one_answer_is_in_the_next() -> None:
    async with talking([WHOLE], [CHUNKED[:60], CHUNKED[60:]], [WHOLE]) as (server, transport, url):
        first = await transport.handle_async_request(post(url))
        assert first.headers["x-a"] == "b"
        await first.aclose()
        assert await ask(transport, post(url, b"")) == (201, b"abcde")
        assert await ask(transport, post(url)) == (200, b"abc")
        assert server.connections == 3
        assert server.asked[0][0].startswith(b"POST /v1/x?y=1 HTTP/1.1\r\n")
        assert all(b"connection: close\r\n" in head for head, _ in server.asked)
        assert [body for _, body in server.asked] == [b"hello", b"", b"hello"]


async def test_a_body_without_a_length_ends_with_its_connection() -> None:
    async with talking([b"HTTP/1.1 200 OK\r\n\r\nab", b"c", None]) as (_, transport, url):
        assert await ask(transport, post(url)) == (200, b"abc")


async def test_an_answer_that_says_to_go_on_is_not_the_answer() -> None:
    async with talking([b"HTTP/1.1 100 Continue\r\n\r\n", WHOLE]) as (_, transport, url):
        assert await ask(transport, post(url)) == (200, b"abc")


@pytest.mark.parametrize("script", [[None], [WHOLE[:20], None], [WHOLE[:-1], None], [CHUNKED[:-8], None]])
async def test_a_connection_that_ends_too_early_is_an_error(script) -> None:
    async with talking(script) as (_, transport, url):
        with pytest.raises(httpx.RemoteProtocolError, match="ended before"):
            await ask(transport, post(url))


async def test_what_is_no_http_is_an_error() -> None:
    async with talking([b"SSH-2.0-OpenSSH\r\n\r\n"]) as (_, transport, url):
        with pytest.raises(httpx.RemoteProtocolError, match="invalid HTTP"):
            await ask(transport, post(url))


async def test_silence_is_an_error_before_the_head_and_within_the_body() -> None:
    never = asyncio.Event()
    async with talking([never.wait], [WHOLE[:-1], never.wait]) as (server, transport, url):
        for _ in range(2):
            with pytest.raises(httpx.ReadTimeout, match=r"0\.1 s"):
                await ask(transport, post(url, read=0.1))
        never.set()
        await until(lambda: server.connections == 2)


async def test_an_absent_peer_is_an_error() -> None:
    transport = Http11Transport("127.0.0.1", 9)
    with pytest.raises(httpx.ConnectError):
        await ask(transport, post("http://127.0.0.1:9/"))


async def test_closing_a_response_that_is_not_complete_closes_its_connection() -> None:
    more = asyncio.Event()
    async with talking([CHUNKED[:60], more.wait, b"x" * 65536, b"x" * 65536, b"x" * 65536]) as (server, transport, url):
        response = await transport.handle_async_request(post(url))
        assert await anext(response.aiter_raw()) == b"abc"
        await response.aclose()
        more.set()
        await until(lambda: server.gone == 1)


async def test_a_long_body_waits_until_it_is_read() -> None:
    size = 8 << 20
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size
    async with talking([head, b"z" * size]) as (_, transport, url):
        response = await transport.handle_async_request(post(url))
        total, most = 0, 0
        async for piece in response.aiter_raw():
            total += len(piece)
            most = max(most, response.stream.connection.buffered_bytes)
            await asyncio.sleep(0)
        await response.aclose()
        assert total == size
        assert most < 2 << 20
