import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from joulery.adapters.engines.embedded.wire import ALIGNMENT, PREFIX, Frame, FrameReader, decode, encode
from joulery.domain.errors import DataError
from joulery.domain.serving.tensors import NUMPY_TYPES, Tensor, datatype_of, to_bytes

arrays = st.sampled_from([dtype for name, dtype in NUMPY_TYPES.items() if name != "BYTES"]).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))
)
texts = st.lists(st.binary(max_size=9), min_size=1, max_size=4).map(lambda items: np.array(items, dtype=object))
messages = st.tuples(
    st.dictionaries(st.sampled_from(["id", "s", "error"]), st.integers(0, 9) | st.text(max_size=5)),
    st.dictionaries(st.text(max_size=6), arrays | texts, max_size=3),
)


def same(frame: Frame, header: dict[str, object], tensors: dict[str, Tensor]) -> bool:
    def seen(arrays: dict[str, Tensor]) -> list[tuple[str, str, tuple[int, ...], bytes]]:
        return [(name, datatype_of(array), array.shape, to_bytes(array)) for name, array in arrays.items()]

    return frame.header == header and seen(frame.tensors) == seen(tensors)


@given(st.lists(messages, min_size=1, max_size=4), st.lists(st.integers(1, 70), min_size=1, max_size=8))
def test_frames_survive_any_cutting_of_the_stream(
    sent: list[tuple[dict[str, object], dict[str, Tensor]]], cuts: list[int]
) -> None:
    stream = b"".join(b"".join(encode(header, tensors)) for header, tensors in sent)
    reader, got, at, turn = FrameReader(), [], 0, 0
    while at < len(stream):
        chunk = stream[at : at + cuts[turn % len(cuts)]]
        before = reader.missing
        frames = reader.feed(chunk)
        assert before > 0
        assert not (frames and len(chunk) < before), "a frame came before the bytes it was said to need"
        got += frames
        at, turn = at + len(chunk), turn + 1
    assert len(got) == len(sent)
    assert all(same(frame, *message) for frame, message in zip(got, sent, strict=True))
    assert reader.missing == PREFIX.size


def test_large_tensors_are_passed_by_reference() -> None:
    image = np.arange(300_000, dtype=np.uint8).reshape(100, 1000, 3)
    pieces = encode({}, {"photo": image})
    assert any(isinstance(piece, memoryview) and piece.obj is not None for piece in pieces[1:])
    (frame,) = FrameReader().feed(b"".join(pieces))
    assert np.array_equal(frame.tensors["photo"], image)
    sideways = image.transpose(2, 0, 1)
    (frame,) = FrameReader().feed(b"".join(encode({}, {"photo": sideways})))
    assert np.array_equal(frame.tensors["photo"], sideways)


def test_tensors_are_aligned_and_read_only() -> None:
    tensors = {"a": np.arange(3, dtype=np.uint8), "b": np.arange(5.0), "c": np.arange(2, dtype=np.int64)}
    pieces = encode({"odd": "header!"}, tensors)
    assert len(b"".join(pieces)) % ALIGNMENT == 0
    assert len(pieces[0]) % ALIGNMENT == 0
    (frame,) = FrameReader().feed(b"".join(pieces))
    for array in frame.tensors.values():
        assert array.ctypes.data % ALIGNMENT == 0
        assert not array.flags.writeable


@pytest.mark.parametrize(
    "stream",
    [
        PREFIX.pack(2**32 - 1, 2**63),
        PREFIX.pack(2, 0) + b"{}",
        PREFIX.pack(2, 0) + b"[]",
        PREFIX.pack(3, 0) + b"abc",
        PREFIX.pack(10, 0) + b'{"t":[[1]]',
        PREFIX.pack(8, 0) + b'{"t":12} ',
        PREFIX.pack(24, 0) + b'{"t":[["x","FP32",7,4]]}',
        PREFIX.pack(26, 0) + b'{"t":[["x","FP32",[7],4]]}',
        PREFIX.pack(28, 0) + b'{"t":[["x","FP32",[-7],-4]]}',
    ],
)
def test_a_stream_that_holds_no_frames_is_refused(stream: bytes) -> None:
    with pytest.raises(DataError):
        FrameReader().feed(stream)


@given(st.binary(max_size=60), st.binary(max_size=40))
def test_garbage_is_a_data_error_or_nothing(header: bytes, body: bytes) -> None:
    try:
        frame = decode(header, body)
    except DataError:
        return
    assert all(np.size(tensor) <= len(body) for tensor in frame.tensors.values()), "nothing is read beyond the body"


def test_what_cannot_be_sent_is_refused() -> None:
    with pytest.raises(DataError, match="complex128"):
        encode({}, {"x": np.array([1j])})
