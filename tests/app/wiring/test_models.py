from pathlib import Path

import pytest

from joulery.adapters.models import efficientnet_lite
from joulery.app.wiring.models import cache_folder, lite_file
from joulery.domain.errors import CapabilityError


@pytest.fixture
def graph(monkeypatch):
    """Building replaced by a counter of builds: what is tested here is the keeping."""
    built: list[str] = []

    def build(name: str) -> bytes:
        built.append(name)
        return name.encode()

    monkeypatch.setattr(efficientnet_lite, "published_graph", build)
    return built


def test_a_graph_is_built_once_and_kept(tmp_path, graph):
    first = lite_file("lite1", tmp_path / "cache")
    assert first.read_bytes() == b"lite1" and first.suffix == ".onnx"
    assert lite_file("lite1", tmp_path / "cache") == first
    assert graph == ["lite1"]
    assert [path.name for path in first.parent.iterdir()] == [first.name], "no draft is left behind"
    assert lite_file("lite2", tmp_path / "cache") != first


def test_a_cache_that_cannot_be_written_says_how_to_name_another(tmp_path, graph):
    blocker = tmp_path / "file"
    blocker.write_text("in the way")
    with pytest.raises(CapabilityError, match="cannot write") as caught:
        lite_file("lite0", blocker)
    assert "JOULERY_CACHE" in caught.value.hint


def test_the_cache_is_where_the_user_says(monkeypatch):
    monkeypatch.setenv("JOULERY_CACHE", "/somewhere/else")
    assert cache_folder() == Path("/somewhere/else")
    monkeypatch.delenv("JOULERY_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/my/cache")
    assert cache_folder() == Path("/my/cache/joulery")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_folder() == Path("/home/someone/.cache/joulery")
