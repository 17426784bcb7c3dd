import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from joulery.domain.errors import DataError
from joulery.domain.serving.tensors import NUMPY_TYPES, datatype_of, from_bytes, to_bytes

numeric = st.sampled_from([name for name in NUMPY_TYPES if name != "BYTES"])
shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)


@given(st.data())
def test_numeric_tensors_survive_the_round_trip(data: st.DataObject) -> None:
    name = data.draw(numeric)
    array = data.draw(hnp.arrays(NUMPY_TYPES[name], data.draw(shapes)))
    assert datatype_of(array) == name
    back = from_bytes(to_bytes(array), name, array.shape)
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()


@given(st.lists(st.binary(max_size=20), max_size=9))
def test_bytes_tensors_survive_the_round_trip(elements: list[bytes]) -> None:
    array = np.array([*elements, None], dtype=object)[:-1]
    raw = to_bytes(array)
    assert len(raw) == sum(4 + len(element) for element in elements)
    assert from_bytes(raw, "BYTES", (len(elements),)).tolist() == elements


def test_bytes_layout_is_length_then_content() -> None:
    assert to_bytes(np.array(["hé", b"\x00"], dtype=object)) == b"\x03\0\0\0h\xc3\xa9\x01\0\0\0\x00"
    assert to_bytes(np.array(["ab"])) == b"\x02\0\0\0ab"
    assert datatype_of(np.array(["ab"])) == "BYTES"


def test_a_transposed_array_is_sent_row_major() -> None:
    assert to_bytes(np.array([[1, 2], [3, 4]], np.uint8).T) == b"\x01\x03\x02\x04"


@pytest.mark.parametrize(
    ("raw", "datatype", "shape", "complaint"),
    [
        (b"\0" * 4, "FP31", (1,), "unknown datatype 'FP31'"),
        (b"\0" * 5, "FP32", (1,), "5 bytes given where FP32 of shape [1] has 4"),
        (b"\0" * 3, "BYTES", (1,), "3 bytes cannot hold 1 BYTES elements"),
        (struct.pack("<I", 9) + b"abc", "BYTES", (1,), "element 0 reaches beyond"),
        (struct.pack("<II", 3, 0)[:7], "BYTES", (1,), None),
        (struct.pack("<I", 1) + b"ab", "BYTES", (1,), "1 bytes left over"),
        (b"\0" * 8, "BYTES", (10**12,), "8 bytes cannot hold"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(raw: bytes, datatype: str, shape: tuple[int, ...], complaint: str) -> None:
    if complaint is None:
        assert from_bytes(raw, datatype, shape).tolist() == [b"\0\0\0"]
        return
    with pytest.raises(DataError) as caught:
        from_bytes(raw, datatype, shape)
    assert complaint in str(caught.value)


@given(st.binary(max_size=64), st.sampled_from(sorted(NUMPY_TYPES)), st.lists(st.integers(0, 5), max_size=3))
def test_any_bytes_either_decode_or_raise_a_data_error(raw: bytes, datatype: str, shape: list[int]) -> None:
    try:
        array = from_bytes(raw, datatype, tuple(shape))
    except DataError:
        return
    assert array.shape == tuple(shape)
    assert to_bytes(array) == raw


def test_what_the_protocol_cannot_carry_is_refused() -> None:
    with pytest.raises(DataError, match="complex128"):
        datatype_of(np.array([1j]))
    with pytest.raises(DataError, match="holds int"):
        to_bytes(np.array([1], dtype=object))
