"""Address and credentials of the Kubernetes API server: from a kubeconfig, or from a container's service account.

Supported are tokens (also in a file, read again at each request because Kubernetes replaces it) and client
certificates. Programs that print credentials (``exec``) are not run.
"""

from __future__ import annotations

import base64
import binascii
import os
import ssl
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from joulery.domain.errors import CapabilityError, ConfigError

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Folder in which Kubernetes puts the token and the certificate authority of a container's service account."""
_TOKEN_LINE = "kubectl create token joulery --namespace joulery"


@dataclass(frozen=True, slots=True)
class KubernetesAccess:
    """Address of an API server, and the credentials for it.

    Attributes:
        url: Its address.
        token: Returns the bearer token; empty where a certificate identifies the client.
        tls: Verifies the server, with the client's certificate where there is one; None over plain HTTP.
        proxy: Address of a proxy; empty for none.
        source: File or folder from which this was read.
    """

    url: str
    token: Callable[[], str]
    tls: ssl.SSLContext | None
    proxy: str = ""
    source: str = ""


def find_access(
    kubeconfig: Path | None = None,
    context: str | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
    account: Path = ACCOUNT,
) -> KubernetesAccess:
    """Find the access: from ``kubeconfig``, ``$KUBECONFIG``, the service account or ``~/.kube/config``, in this order.

    Args:
        kubeconfig: A kubeconfig file.
        context: A context of it; its current one when None.
        environ: Environment.
        account: The folder of the service account.

    Raises:
        CapabilityError: No access is found, or its files cannot be read.
        ConfigError: The kubeconfig is invalid.
    """
    if kubeconfig is not None:
        return from_kubeconfig(kubeconfig, context)
    named = [Path(part) for part in environ.get("KUBECONFIG", "").split(os.pathsep) if part]
    if len(named) > 1:
        raise ConfigError("lists several files", pointer="$KUBECONFIG", got=environ["KUBECONFIG"], expected="one file")
    if named:
        return from_kubeconfig(named[0], context)
    if environ.get("KUBERNETES_SERVICE_HOST") and context is None:
        return from_account(environ, account)
    home = Path(environ["HOME"]) / ".kube/config" if environ.get("HOME") else None
    if home is not None and home.is_file():
        return from_kubeconfig(home, context)
    raise CapabilityError(
        "no access to Kubernetes: no kubeconfig and no service account here",
        resource="Kubernetes",
        hint="set jobs.kueue.kubeconfig or $KUBECONFIG, or run in the cluster (deploy/kubernetes/kueue)",
    )


def from_account(environ: Mapping[str, str], account: Path = ACCOUNT) -> KubernetesAccess:
    """The access through this container's service account.

    Raises:
        CapabilityError: Its token or certificate cannot be read.
    """
    host, port = environ["KUBERNETES_SERVICE_HOST"], environ.get("KUBERNETES_SERVICE_PORT", "443")
    token = _file_token(account / "token")
    token()
    authority = account / "ca.crt"
    tls = _tls(authority, lambda: ssl.create_default_context(cafile=str(authority)))
    url = f"https://{f'[{host}]' if ':' in host else host}:{port}"
    return KubernetesAccess(url, token, tls, source=str(account))


def from_kubeconfig(file: Path, context: str | None = None) -> KubernetesAccess:
    """The access that a kubeconfig describes.

    Raises:
        CapabilityError: The kubeconfig, or a file that it names, cannot be read.
        ConfigError: The kubeconfig is invalid.
    """
    try:
        document = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CapabilityError(f"cannot read {file}: {error.strerror}", resource=str(file)) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError("is not YAML", file=str(file), hint="is this a kubeconfig?") from error
    if not isinstance(document, dict):
        raise ConfigError("is not a kubeconfig", file=str(file), expected="clusters, users and contexts")
    name = context or document.get("current-context")
    chosen = _entry(document, "contexts", name, "context", file)
    cluster = _entry(document, "clusters", chosen.get("cluster"), "cluster", file)
    user = _entry(document, "users", chosen.get("user"), "user", file) if chosen.get("user") else {}
    url = cluster.get("server")
    if not isinstance(url, str) or not url.startswith(("http://", "https://")):
        raise ConfigError("names no server", file=str(file), got=str(url), expected="https://HOST:PORT")
    tls = None if url.startswith("http://") else _client_tls(cluster, user, file.parent)
    return KubernetesAccess(url, _token_of(user, file), tls, str(cluster.get("proxy-url") or ""), str(file))


def _entry(document: Mapping[str, Any], table: str, name: object, inner: str, file: Path) -> Mapping[str, Any]:
    """The entry of a kubeconfig's list with this name."""
    entries = [entry for entry in document.get(table) or () if isinstance(entry, dict)]
    for entry in entries:
        if entry.get("name") == name and isinstance(entry.get(inner), dict):
            return dict(entry[inner])
    known = ", ".join(str(entry.get("name")) for entry in entries) or "none"
    raise ConfigError(f"has no such entry in {table}", file=str(file), got=str(name), expected=known)


def _token_of(user: Mapping[str, Any], file: Path) -> Callable[[], str]:
    if user.get("tokenFile"):
        return _file_token(file.parent / str(user["tokenFile"]))
    if user.get("token"):
        return lambda: str(user["token"])
    certificate = user.get("client-certificate") or user.get("client-certificate-data")
    for kind in ("exec", "auth-provider", "username"):
        if user.get(kind) and not certificate:
            raise ConfigError(
                f"logs in with {kind}, which is not supported",
                file=str(file),
                expected="token, tokenFile or client-certificate",
                hint=f"a token of a service account works: {_TOKEN_LINE}",
            )
    return lambda: ""


def _file_token(file: Path) -> Callable[[], str]:
    def read() -> str:
        try:
            return file.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise CapabilityError(f"cannot read the token in {file}: {error}", resource=str(file)) from error

    return read


def _client_tls(cluster: Mapping[str, Any], user: Mapping[str, Any], folder: Path) -> ssl.SSLContext:
    """A TLS context that verifies the server and presents the client's certificate."""
    where = folder / "kubeconfig"
    authority = _content(cluster, "certificate-authority", folder)

    def make() -> ssl.SSLContext:
        tls = ssl.create_default_context(cadata=None if authority is None else authority.decode("ascii"))
        if cluster.get("insecure-skip-tls-verify"):
            tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
        certificate, key = _content(user, "client-certificate", folder), _content(user, "client-key", folder)
        if certificate is not None and key is not None:
            with tempfile.NamedTemporaryFile(prefix="joulery-") as both:  # ssl reads files alone; readable by us alone
                both.write(certificate + b"\n" + key)
                both.flush()
                tls.load_cert_chain(both.name)
        return tls

    return _tls(where, make)


def _content(section: Mapping[str, Any], name: str, folder: Path) -> bytes | None:
    """Content of ``name-data``, or of the file that ``name`` names; None where there is neither."""
    if section.get(f"{name}-data"):
        try:
            return base64.b64decode(str(section[f"{name}-data"]), validate=True)
        except binascii.Error as error:
            raise ConfigError(f"{name}-data is not base64", file=str(folder)) from error
    if not section.get(name):
        return None
    file = folder / str(section[name])
    try:
        return file.read_bytes()
    except OSError as error:
        raise CapabilityError(f"cannot read {file}: {error.strerror}", resource=str(file)) from error


def _tls(where: Path, make: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
    try:
        return make()
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise CapabilityError(f"the certificates of {where} cannot be used: {error}", resource=str(where)) from error
