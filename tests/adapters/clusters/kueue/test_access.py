"""Kubeconfigs and service accounts."""

from __future__ import annotations

import base64
import ssl
from pathlib import Path
from typing import Any

import pytest
import yaml

from joulery.adapters.clusters.kueue.access import find_access, from_account, from_kubeconfig
from joulery.domain.errors import CapabilityError, ConfigError
from tests.gateway.certificates import made


def write(folder: Path, user: dict[str, Any], cluster: dict[str, Any] | None = None, **more: Any) -> Path:
    file = folder / "config"
    document = {
        "current-context": "main",
        "contexts": [{"name": "main", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": cluster or {"server": "http://127.0.0.1:1"}}],
        "users": [{"name": "u", "user": user}],
        **more,
    }
    file.write_text(yaml.safe_dump(document))
    return file


def test_a_token_is_taken_from_the_file_or_from_one_that_is_replaced(tmp_path: Path) -> None:
    assert from_kubeconfig(write(tmp_path, {"token": "one"})).token() == "one"
    (tmp_path / "token").write_text("two\n")
    access = from_kubeconfig(write(tmp_path, {"tokenFile": "token"}))
    assert access.token() == "two"
    (tmp_path / "token").write_text("three")
    assert access.token() == "three"
    (tmp_path / "token").unlink()
    with pytest.raises(CapabilityError, match="cannot read the token"):
        access.token()


def test_certificates_are_read_from_files_and_from_the_kubeconfig_itself(tmp_path: Path) -> None:
    files = made(tmp_path)
    server = {"server": "https://127.0.0.1:6443", "certificate-authority": files.certificate.name}
    user = {"client-certificate": files.certificate.name, "client-key": str(files.key)}
    by_file = from_kubeconfig(write(tmp_path, user, server))
    encoded = {
        f"client-{name}-data": base64.b64encode(file.read_bytes()).decode()
        for name, file in (("certificate", files.certificate), ("key", files.key))
    }
    authority = base64.b64encode(files.certificate.read_bytes()).decode()
    inline = {"server": "https://127.0.0.1:6443", "certificate-authority-data": authority, "proxy-url": "http://p:1"}
    by_data = from_kubeconfig(write(tmp_path, encoded, inline))
    for access in (by_file, by_data):
        assert access.tls is not None and access.tls.verify_mode is ssl.CERT_REQUIRED and access.tls.get_ca_certs()
        assert access.token() == ""
    assert by_data.proxy == "http://p:1"
    open_to_all = from_kubeconfig(write(tmp_path, {}, {"server": "https://h", "insecure-skip-tls-verify": True}))
    assert open_to_all.tls is not None and open_to_all.tls.verify_mode is ssl.CERT_NONE
    files.key.write_text("no key")
    with pytest.raises(CapabilityError, match="certificates"):
        from_kubeconfig(write(tmp_path, user, server))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"current-context": "gone"}, "no such entry in contexts"),
        ({"clusters": []}, "no such entry in clusters"),
        ({"users": None}, "no such entry in users"),
        ({"clusters": [{"name": "c", "cluster": {"server": "ftp://x"}}]}, "names no server"),
        ({"users": [{"name": "u", "user": {"exec": {"command": "aws"}}}]}, "logs in with exec"),
        (
            {"clusters": [{"name": "c", "cluster": {"server": "https://h", "certificate-authority-data": "?"}}]},
            "base64",
        ),
    ],
)
def test_a_kubeconfig_that_is_wrong_is_one_clear_error(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_kubeconfig(write(tmp_path, {}, **change))


@pytest.mark.parametrize("text", ["", "- 1", "{", "\x00"])
def test_a_file_that_is_no_kubeconfig_is_one_clear_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "config").write_text(text)
    with pytest.raises(ConfigError):
        from_kubeconfig(tmp_path / "config")


def test_a_file_that_is_not_there_or_names_none_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(CapabilityError, match="cannot read"):
        from_kubeconfig(tmp_path / "gone")
    with pytest.raises(CapabilityError, match=r"gone\.pem"):
        from_kubeconfig(write(tmp_path, {}, {"server": "https://h", "certificate-authority": "gone.pem"}))


def test_the_first_of_the_places_counts(tmp_path: Path) -> None:
    file = write(tmp_path, {"token": "named"})
    account = tmp_path / "account"
    account.mkdir()
    (account / "token").write_text("mine")
    (account / "ca.crt").write_bytes(made(tmp_path).certificate.read_bytes())
    inside = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    assert find_access(file, environ=inside, account=account).token() == "named"
    assert find_access(environ={**inside, "KUBECONFIG": str(file)}, account=account).token() == "named"
    within = find_access(environ=inside, account=account)
    assert (within.token(), within.url) == ("mine", "https://[fd00::1]:6443")
    (tmp_path / ".kube").mkdir()
    file.rename(tmp_path / ".kube/config")
    assert find_access(environ={"HOME": str(tmp_path)}).token() == "named"
    for environ in ({}, {"HOME": ""}, {"HOME": str(account)}):
        with pytest.raises(CapabilityError, match="no access to Kubernetes"):
            find_access(environ=environ)
    with pytest.raises(ConfigError, match="several files"):
        find_access(environ={"KUBECONFIG": "a:b"})
    (account / "ca.crt").unlink()
    with pytest.raises(CapabilityError):
        from_account(inside, account)
