"""Parse the address, bearer token and TLS files of the gateway."""

from __future__ import annotations

from pathlib import Path

from pydantic_core import PydanticCustomError

from joulery.config.serving import ServingConfig, split_address
from joulery.domain.errors import ConfigError
from joulery.gateway.tls import TlsFiles

MIN_TOKEN_LENGTH = 8


def address(text: str, pointer: str = "listen") -> tuple[str, int]:
    """Parse host and port of ``host:port``, ``[v6]:port`` or ``:port`` (loopback).

    Args:
        text: Text of the address.
        pointer: Flag or key of the address, for the error.

    Raises:
        ConfigError: The text is not such an address.
    """
    try:
        return split_address(text)
    except PydanticCustomError as error:
        raise ConfigError(
            "not an address", pointer=pointer, got=text, expected="HOST:PORT such as 127.0.0.1:8080"
        ) from error


def site_token(serving: ServingConfig) -> str | None:
    """The token that a site file requires; None where it requires none.

    Raises:
        ConfigError: The file of the token cannot be read.
    """
    if serving.token is not None:
        return serving.token.get_secret_value()
    return None if serving.token_file is None else read_token(serving.token_file)


def site_tls(serving: ServingConfig) -> TlsFiles | None:
    """The certificate and key that a site file names; None where it names none."""
    return None if serving.tls is None else TlsFiles(serving.tls.certificate, serving.tls.key)


def read_token(path: Path) -> str:
    """Read the bearer token in a file, without the white space around it.

    Raises:
        ConfigError: The file cannot be read, or has no token that can be sent in a header.
    """
    try:
        token = path.read_text().strip()
    except OSError as error:
        reason, hint = error.strerror or str(error), "name a file with the token on one line"
        raise ConfigError(f"the token cannot be read: {reason}", file=str(path), hint=hint) from error
    except UnicodeDecodeError as error:
        raise ConfigError("the token cannot be read: it is not text", file=str(path)) from error
    if len(token) < MIN_TOKEN_LENGTH:
        raise ConfigError(f"a token needs at least {MIN_TOKEN_LENGTH} characters", file=str(path))
    if not token.isascii() or not token.isprintable():
        raise ConfigError("a token is one line of printable ASCII", file=str(path))
    return token
