import io
import os
import pickle
import struct
import sys
import types
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from joulery.adapters.models.torch_checkpoint import read_checkpoint
from joulery.domain.errors import DataError, JouleryError

MAGIC, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001


class Storage:
    """Pickles as a persistent identifier, as a torch storage does."""

    def __init__(self, kind: type, key: str, values: np.ndarray) -> None:
        self.kind, self.key, self.values = kind, key, values


class Tensor:
    def __init__(self, storage: Storage, offset: object, shape: object, strides: object) -> None:
        self.arguments = (storage, offset, shape, strides, False, OrderedDict())

    def __reduce__(self) -> tuple[object, ...]:
        return sys.modules["torch._utils"]._rebuild_tensor_v2, self.arguments


class Writer(pickle.Pickler):
    def persistent_id(self, thing: object) -> object:
        if isinstance(thing, Storage):
            return ("storage", thing.kind, thing.key, "cpu", len(thing.values), None)
        return None


@pytest.fixture
def torch(monkeypatch):
    """Just enough of a package named torch for pickle to write its names."""
    package, part = types.ModuleType("torch"), types.ModuleType("torch._utils")
    for name in ("FloatStorage", "LongStorage", "StrangeStorage"):
        setattr(package, name, type(name, (), {"__module__": "torch", "__qualname__": name}))

    def _rebuild_tensor_v2() -> None: ...

    _rebuild_tensor_v2.__module__, _rebuild_tensor_v2.__qualname__ = "torch._utils", "_rebuild_tensor_v2"
    part._rebuild_tensor_v2 = _rebuild_tensor_v2
    package._utils = part
    monkeypatch.setitem(sys.modules, "torch", package)
    monkeypatch.setitem(sys.modules, "torch._utils", part)
    return package


def checkpoint(
    table: object, storages: list[Storage], *, magic: object = MAGIC, little: object = True, keys: object = None
) -> bytes:
    out = io.BytesIO()
    for thing in (
        magic,
        PROTOCOL,
        {"protocol_version": PROTOCOL, "little_endian": little},
        table,
        [storage.key for storage in storages] if keys is None else keys,
    ):
        Writer(out, 2).dump(thing)
    for storage in storages:
        out.write(struct.pack("<q", len(storage.values)) + storage.values.tobytes())
    return out.getvalue()


def sample(torch) -> bytes:
    first = Storage(torch.FloatStorage, "7", np.arange(6, dtype="<f4"))
    second = Storage(torch.LongStorage, "8", np.array([41], "<i8"))
    table = OrderedDict(
        whole=Tensor(first, 0, (2, 3), (3, 1)),
        turned=Tensor(first, 1, (2, 2), (1, 3)),
        count=Tensor(second, 0, (), ()),
    )
    return checkpoint(table, [first, second])


def read(tmp_path: Path, content: bytes) -> dict[str, np.ndarray]:
    path = tmp_path / "weights.pth"
    path.write_bytes(content)
    return read_checkpoint(path)


def test_tensors_come_back_with_their_shape_type_and_strides(tmp_path, torch):
    tensors = read(tmp_path, sample(torch))
    assert list(tensors) == ["whole", "turned", "count"]
    np.testing.assert_array_equal(tensors["whole"], [[0, 1, 2], [3, 4, 5]])
    np.testing.assert_array_equal(tensors["turned"], [[1, 4], [2, 5]])
    assert tensors["whole"].dtype == np.float32 and tensors["whole"].flags.c_contiguous
    assert tensors["count"].shape == () and tensors["count"] == 41


class Evil:
    def __init__(self, call: object, *arguments: object) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> tuple[object, ...]:
        return self.call, self.arguments


@pytest.mark.parametrize(
    "evil",
    [
        lambda marker: Evil(os.system, f"touch {marker}"),
        lambda marker: Evil(eval, f"open({str(marker)!r}, 'w').close()"),
        lambda marker: Evil(getattr, "joulery", "upper"),
    ],
)
def test_a_pickle_that_calls_something_is_refused_and_nothing_is_called(tmp_path, torch, evil):
    marker = tmp_path / "was-here"
    with pytest.raises(DataError, match="which no table of tensors needs"):
        read(tmp_path, checkpoint(OrderedDict(w=evil(marker)), []))
    assert not marker.exists()


def test_the_stand_in_for_torchs_function_cannot_be_changed_by_a_pickle(tmp_path, torch):
    hostile = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}X\x08\x00\x00\x00__call__K\x01sb."
    content = pickle.dumps(MAGIC, 2) + pickle.dumps(PROTOCOL, 2) + pickle.dumps({}, 2) + hostile
    with pytest.raises(DataError, match="not a usable table"):
        read(tmp_path, content)
    assert len(read(tmp_path, sample(torch))) == 3


def test_every_kind_of_nonsense_is_one_clear_error(tmp_path, torch):
    storage = Storage(torch.FloatStorage, "7", np.arange(6, dtype="<f4"))
    odd = Storage(torch.StrangeStorage, "7", np.arange(6, dtype="<f4"))
    good = OrderedDict(w=Tensor(storage, 0, (6,), (1,)))
    cases = {
        "does not begin": checkpoint(good, [storage], magic=1),
        "big-endian": checkpoint(good, [storage], little=False),
        "other than tensors": checkpoint(OrderedDict(w=1), []),
        "list of storages": checkpoint(good, [storage], keys=["9"]),
        "asks for torch.StrangeStorage": checkpoint(OrderedDict(w=Tensor(odd, 0, (6,), (1,))), [odd]),
        "reaches element 6": checkpoint(OrderedDict(w=Tensor(storage, 1, (6,), (1,))), [storage]),
        "a tensor of shape": checkpoint(OrderedDict(w=Tensor(storage, 0, (7,), (0,))), [storage]),
        "with strides": checkpoint(OrderedDict(w=Tensor(storage, 0, (-2,), (1,))), [storage]),
        "needs a storage": checkpoint(OrderedDict(w=Tensor("7", 0, (6,), (1,))), []),
        "cut short": checkpoint(good, [storage])[:-1],
        "not a usable table": b"",
    }
    for words, content in cases.items():
        with pytest.raises(DataError, match=words) as caught:
            read(tmp_path, content)
        assert "weights.pth" in str(caught.value) and caught.value.hint


def test_a_count_larger_than_the_file_is_not_believed(tmp_path, torch):
    storage = Storage(torch.FloatStorage, "7", np.arange(6, dtype="<f4"))
    whole = checkpoint(OrderedDict(w=Tensor(storage, 0, (6,), (1,))), [storage])
    lying = whole.replace(struct.pack("<q", 6) + storage.values.tobytes(), struct.pack("<q", 2**60))
    with pytest.raises(DataError, match="cut short"):
        read(tmp_path, lying)


def test_a_missing_file_says_so(tmp_path):
    with pytest.raises(DataError, match="No such file"):
        read_checkpoint(tmp_path / "none.pth")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_is_read_or_refused_never_a_crash(tmp_path, torch, data):
    content = bytearray(sample(torch))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] = data.draw(st.integers(0, 255))
    end = data.draw(st.integers(0, len(content)))
    try:
        tensors = read(tmp_path, bytes(content[:end]))
    except JouleryError:
        return
    assert all(tensor.size <= 6 for tensor in tensors.values())
