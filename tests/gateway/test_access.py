from pathlib import Path

import pytest

from joulery.domain.errors import ConfigError
from joulery.gateway.access import address, read_token


def test_addresses() -> None:
    assert address("127.0.0.1:80") == ("127.0.0.1", 80)
    assert address(":8080") == ("127.0.0.1", 8080)
    assert address("[::1]:0") == ("::1", 0)
    for wrong in ("nowhere", "a:b", "a:70000"):
        with pytest.raises(ConfigError, match="not an address"):
            address(wrong)


def test_tokens(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("  open sesame \n")
    assert read_token(file) == "open sesame"
    for content, complaint in [
        (b"short", "at least 8"),
        (b"two\nlines of it", "one line"),
        ("schlüssel".encode(), "ASCII"),
        (b"\xff" * 9, "cannot be read"),
    ]:
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=complaint):
            read_token(file)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_token(tmp_path / "nothing")
