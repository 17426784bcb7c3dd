"""Certificates for tests, made by OpenSSL's command line."""

import shutil
import subprocess
from pathlib import Path

import pytest

from joulery.gateway.tls import TlsFiles


def made(folder: Path, name: str = "gateway", *, passphrase: str = "") -> TlsFiles:
    """A certificate for ``gateway.test`` that signs itself, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    files = TlsFiles(folder / f"{name}.pem", folder / f"{name}-key.pem")
    secret = ["-passout", f"pass:{passphrase}"] if passphrase else ["-noenc"]
    line = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2"]
    line += ["-subj", "/CN=gateway.test", "-addext", "subjectAltName=DNS:gateway.test,IP:127.0.0.1", *secret]
    line += ["-keyout", str(files.key), "-out", str(files.certificate)]
    subprocess.run(line, check=True, capture_output=True)
    return files
