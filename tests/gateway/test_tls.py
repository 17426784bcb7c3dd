"""HTTPS: who gets an answer, what a client that speaks something else gets, and files that cannot be used."""

import asyncio
import json
import signal
import ssl
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest

from joulery.domain.errors import ConfigError
from joulery.domain.serving.engine import Outcome
from joulery.gateway.app import Gateway
from joulery.gateway.server import GatewayServer, ServerLimits
from joulery.gateway.tls import TlsFiles
from tests.adapters.engines.support import until
from tests.gateway.certificates import made
from tests.gateway.support import INFER, FakeEngine, body


def trusting(files: TlsFiles) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(files.certificate))


async def test_answers_over_tls_are_those_of_the_gateway(tmp_path: Path) -> None:
    files = made(tmp_path)
    engine = FakeEngine()
    server = GatewayServer(Gateway(engine), "127.0.0.1", 0, tls=files)
    await server.start()
    try:
        assert server.url == f"https://127.0.0.1:{server.port}"
        async with httpx.AsyncClient(trust_env=False, verify=trusting(files)) as client:
            for _ in range(3):
                answer = await client.post(f"{server.url}{INFER}", content=body())
                assert answer.status_code == 200
            assert len(engine.asked) == 3
            # A body that is refused before it was read: the answer is read, then the connection ends.
            large = await client.post(f"{server.url}{INFER}", content=b"x" * (17 << 20))
            assert large.status_code == 413
        async with httpx.AsyncClient(trust_env=False) as stranger:
            with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
                await stranger.get(f"{server.url}/v2/health/live")
        plain = httpx.AsyncClient(trust_env=False)
        with pytest.raises(httpx.TransportError):
            await plain.get(f"http://127.0.0.1:{server.port}/v2/health/live")
        await plain.aclose()
    finally:
        await server.stop()


async def test_a_client_that_vanishes_cancels_its_request(tmp_path: Path) -> None:
    files, engine, records = made(tmp_path), FakeEngine(), []
    engine.reply = lambda request: asyncio.Event().wait()
    server = GatewayServer(Gateway(engine, telemetry=[records.append]), "127.0.0.1", 0, tls=files)
    await server.start()
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=trusting(files))
        writer.write(
            b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (INFER.encode(), len(body()), body())
        )
        await until(lambda: bool(engine.asked))
        writer.transport.abort()
        await until(lambda: bool(records))
        assert records[0].outcome is Outcome.CANCELLED
    finally:
        await server.stop()


async def test_a_client_that_never_shakes_hands_is_let_go(tmp_path: Path) -> None:
    server = GatewayServer(
        Gateway(FakeEngine()), "127.0.0.1", 0, tls=made(tmp_path), limits=ServerLimits(receive_s=0.2)
    )
    await server.start()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert b"HTTP" not in await reader.read()
        writer.close()
    finally:
        await server.stop()


async def test_files_that_cannot_be_used_are_one_error(tmp_path: Path) -> None:
    files, other = made(tmp_path), made(tmp_path, "other")
    locked = made(tmp_path, "locked", passphrase="secret")
    (tmp_path / "text.pem").write_text("no certificate")
    wrong = {
        "cannot be read": TlsFiles(tmp_path / "none.pem", files.key),
        "cannot be used": TlsFiles(files.certificate, other.key),
        "has a passphrase": locked,
        "the certificate and key": TlsFiles(tmp_path / "text.pem", files.key),
    }
    for words, pair in wrong.items():
        with pytest.raises(ConfigError, match=words):
            await GatewayServer(Gateway(FakeEngine()), "127.0.0.1", 0, tls=pair).start()


@pytest.mark.e2e
def test_joulery_serves_https_and_its_load_generator_speaks_it(tmp_path: Path) -> None:
    files = made(tmp_path)
    (tmp_path / "shop.py").write_text("def double(inputs):\n    return {'y': inputs['x'] * 2}\n")
    np.savez(tmp_path / "inputs.npz", x=np.ones((4, 2), np.float32))
    line = [sys.executable, "-m", "joulery", "serve", "--model", "numbers=shop:double", "--listen", "127.0.0.1:0"]
    line += ["--tls-certificate", str(files.certificate), "--tls-key", str(files.key), "--json"]
    with subprocess.Popen(line, cwd=tmp_path, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        url = json.loads(server.stdout.readline())["url"]
        assert url.startswith("https://")
        load = [sys.executable, "-m", "joulery.runtime.load", "--url", url, "--service", "numbers"]
        load += ["--inputs", "inputs.npz", "--rate-rps", "50", "--duration-s", "1", "--out", "load.parquet"]
        trusted = subprocess.run(
            [*load, "--certificate", str(files.certificate)], cwd=tmp_path, capture_output=True, check=True
        )
        summary = json.loads(trusted.stdout)
        assert summary["ok"] == summary["requests"] > 0
        unknown = subprocess.run(load, cwd=tmp_path, capture_output=True, check=True)
        assert json.loads(unknown.stdout)["ok"] == 0
        server.send_signal(signal.SIGTERM)
    assert server.returncode == 0


@pytest.mark.e2e
@pytest.mark.parametrize("flag", ["--tls-certificate", "--tls-key"])
def test_one_file_without_the_other_is_an_error(flag: str, tmp_path: Path) -> None:
    line = [sys.executable, "-m", "joulery", "serve", "--model", "m=shop:double", flag, str(tmp_path / "x.pem")]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert "a certificate and its key" in done.stderr
