"""TLS with the certificate and key files of the gateway."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from joulery.domain.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of the gateway's certificate and key.

    Attributes:
        certificate: PEM file with the certificate, followed by its chain up to a root.
        key: PEM file with the private key, without a passphrase.
    """

    certificate: Path
    key: Path

    def check(self) -> None:
        """Raise unless both files can be read and belong together.

        Raises:
            ConfigError: They cannot be used.
        """
        self.server_context()

    def server_context(self) -> ssl.SSLContext:
        """Create a server's context of TLS 1.2 and 1.3 with these files.

        Raises:
            ConfigError: They cannot be used.
        """
        for file in (self.certificate, self.key):
            try:
                with file.open("rb"):
                    pass
            except OSError as error:
                raise ConfigError(f"the certificate or key cannot be read: {error.strerror}", file=str(file)) from error
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.certificate, self.key, password=_no_passphrase)
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(
                f"the certificate and key cannot be used: {error}",
                file=str(self.certificate),
                expected="PEM files that belong together, the key without a passphrase",
                hint=f"the key is {self.key}",
            ) from error
        return context


def client_context(certificate: Path) -> ssl.SSLContext:
    """Create a client's context that trusts a certificate and those it signed, and checks the server's name.

    Raises:
        ConfigError: The certificate cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_verify_locations(certificate)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"the certificate cannot be used: {error}",
            file=str(certificate),
            expected="a PEM file with the certificate of the engine server, or of what signed it",
        ) from error
    return context


def _no_passphrase() -> str:
    """Raise an error, since OpenSSL would otherwise prompt for a passphrase on the terminal."""
    raise ValueError("the key has a passphrase")
