import json
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from joulery.domain.serving.engine import InferRequest, Outcome, RequestError
from joulery.domain.serving.tensors import NUMPY_TYPES, datatype_of, to_bytes
from joulery.gateway.protocol import Call, parse, render

PLAIN = Call(None, InferRequest({}), {}, False)


def tensor(name: str = "x", datatype: str = "FP32", shape: Any = (1,), **rest: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, **rest}


def body(*inputs: Any, **rest: Any) -> bytes:
    return json.dumps({"inputs": list(inputs), **rest}).encode()


def test_the_example_of_the_specification() -> None:
    call = parse(
        b"""{ "id" : "42",
      "inputs" : [
        { "name" : "input0", "shape" : [ 2, 2 ], "datatype" : "UINT32", "data" : [ 1, 2, 3, 4 ] },
        { "name" : "input1", "shape" : [ 1 ], "datatype" : "BOOL", "data" : [ true ] } ],
      "outputs" : [ { "name" : "output0" } ] }"""
    )
    assert call.id == "42"
    assert call.request.outputs == ("output0",)
    assert call.request.inputs["input0"].tolist() == [[1, 2], [3, 4]]
    assert call.request.inputs["input0"].dtype == np.uint32
    assert call.request.inputs["input1"].tolist() == [True]
    outputs = {"output0": np.array([[1.0, 1.1], [2.0, 2.1], [3.0, 3.1]], np.float32)}
    assert json.loads(render("mymodel", "small", call, outputs).body) == {
        "model_name": "mymodel",
        "model_version": "small",
        "id": "42",
        "outputs": [{"name": "output0", "shape": [3, 2], "datatype": "FP32", "data": [1.0, 1.1, 2.0, 2.1, 3.0, 3.1]}],
    }


def test_the_binary_example_of_the_specification() -> None:
    header = (
        b'{"model_name":"mymodel","inputs":['
        b'{"name":"input0","shape":[2,2],"datatype":"UINT32","parameters":{"binary_data_size":16}},'
        b'{"name":"input1","shape":[3],"datatype":"BOOL","parameters":{"binary_data_size":3}}],'
        b'"outputs":[{"name":"output0","parameters":{"binary_data":true}}]}'
    )
    raw = struct.pack("<4I", 1, 2, 3, 4) + b"\x01\x00\x01"
    call = parse(header + raw, len(header))
    assert call.request.inputs["input0"].tolist() == [[1, 2], [3, 4]]
    assert call.request.inputs["input1"].tolist() == [True, False, True]
    outputs = {"output0": np.array([[1.0, 1.1], [2.0, 2.1], [3.0, 3.1]], np.float16)}
    answer = render("mymodel", "v", call, outputs)
    assert answer.json_bytes is not None
    (output,) = json.loads(answer.body[: answer.json_bytes])["outputs"]
    assert output == {
        "name": "output0",
        "shape": [3, 2],
        "datatype": "FP16",
        "parameters": {"binary_data_size": 12},
    }
    assert answer.body[answer.json_bytes :] == outputs["output0"].tobytes()


def test_binary_output_by_default_unless_an_output_says_otherwise() -> None:
    request = body(
        outputs=[{"name": "a"}, {"name": "b", "parameters": {"binary_data": False}}],
        parameters={"binary_data_output": True},
    )
    call = parse(request)
    answer = render("m", "v", call, {"a": np.array([1], np.int8), "b": np.array([2], np.int8)})
    assert answer.json_bytes is not None
    a, b = json.loads(answer.body[: answer.json_bytes])["outputs"]
    assert a["parameters"] == {"binary_data_size": 1}
    assert "data" not in a
    assert b["data"] == [2]
    assert answer.body[answer.json_bytes :] == b"\x01"
    every = parse(body(parameters={"binary_data_output": True}))
    assert every.request.outputs == ()
    assert render("m", "v", every, {"a": np.array([1], np.int8)}).json_bytes is not None


def test_parameters_of_other_extensions_are_left_alone() -> None:
    call = parse(body(tensor(data=[1], parameters={"x": 1}), outputs=[{"name": "y", "parameters": {"z": 2}}]))
    assert (call.binary, call.binary_default) == ({"y": False}, False)
    assert parse(body(parameters={"priority": 3})).binary_default is False


def test_as_many_dimensions_as_arrays_may_have_here() -> None:
    assert parse(body(tensor(shape=[1] * 32, data=[5]))).request.inputs["x"].ndim == 32


def test_what_was_asked_beside_the_tensors_is_passed_on() -> None:
    call = parse(body(), timeout_s=0.5, variant="small")
    assert (call.request.timeout_s, call.request.variant) == (0.5, "small")
    assert call.id is None
    assert "id" not in json.loads(render("m", "v", call, {}).body)


@pytest.mark.parametrize("datatype", sorted(set(NUMPY_TYPES) - {"BYTES"}))
def test_every_numeric_type_both_ways_in_json_and_binary(datatype: str) -> None:
    array = np.array([[0, 1], [1, 0]]).astype(NUMPY_TYPES[datatype])
    flat = array.ravel().tolist()
    for data in (flat, array.tolist()):
        got = parse(body(tensor("x", datatype, [2, 2], data=data))).request.inputs["x"]
        assert got.dtype == array.dtype
        assert got.tolist() == array.tolist()
    header = body(tensor("x", datatype, [2, 2], parameters={"binary_data_size": array.nbytes}))
    got = parse(header + array.tobytes(), len(header)).request.inputs["x"]
    assert got.dtype == array.dtype
    assert got.tolist() == array.tolist()
    (output,) = json.loads(render("m", "v", PLAIN, {"y": array}).body)["outputs"]
    assert output == {"name": "y", "datatype": datatype, "shape": [2, 2], "data": flat}


def test_bytes_both_ways_in_json_and_binary() -> None:
    for data in (["a", "", "é", "d"], [["a", ""], ["é", "d"]]):
        got = parse(body(tensor("x", "BYTES", [2, 2], data=data))).request.inputs["x"]
        assert got.tolist() == [[b"a", b""], ["é".encode(), b"d"]]
    raw = to_bytes(np.array([b"\xff", b"ab"], object))
    header = body(tensor("x", "BYTES", [2], parameters={"binary_data_size": len(raw)}))
    assert parse(header + raw, len(header)).request.inputs["x"].tolist() == [b"\xff", b"ab"]
    (output,) = json.loads(render("m", "v", PLAIN, {"y": np.array([b"a", "é".encode()], object)}).body)["outputs"]
    assert output == {"name": "y", "datatype": "BYTES", "shape": [2], "data": ["a", "é"]}
    (output,) = json.loads(render("m", "v", PLAIN, {"y": np.array(["cat", "dog"])}).body)["outputs"]
    assert output == {"name": "y", "datatype": "BYTES", "shape": [2], "data": ["cat", "dog"]}


def test_bytes_that_are_no_text_go_out_in_binary_only() -> None:
    outputs = {"y": np.array([b"\xff"], object)}
    with pytest.raises(RequestError, match="ask for it with binary_data"):
        render("m", "v", PLAIN, outputs)
    answer = render("m", "v", PLAIN._replace(binary_default=True), outputs)
    assert answer.body.endswith(b"\x01\0\0\0\xff")


def test_numbers_that_json_does_not_know_become_null() -> None:
    (output,) = json.loads(render("m", "v", PLAIN, {"y": np.array([np.nan, np.inf, 1.0])}).body)["outputs"]
    assert output["data"] == [None, None, 1.0]


def test_scalars_and_empty_tensors() -> None:
    assert parse(body(tensor(shape=[], data=[7]))).request.inputs["x"].shape == ()
    assert parse(body(tensor(shape=[0, 3], data=[]))).request.inputs["x"].shape == (0, 3)
    assert parse(body(tensor("x", "BYTES", [0], data=[]))).request.inputs["x"].dtype == object
    (output,) = json.loads(render("m", "v", PLAIN, {"y": np.array(3.0)}).body)["outputs"]
    assert (output["shape"], output["data"]) == ([], [3.0])


def test_integers_are_taken_for_floats_but_not_the_other_way_round() -> None:
    assert parse(body(tensor(data=[7]))).request.inputs["x"].tolist() == [7.0]
    with pytest.raises(RequestError, match="something else than INT64"):
        parse(body(tensor("x", "INT64", data=[7.0])))


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "must be a JSON object"),
        (b"{}", "inputs must be a list"),
        (b'{"inputs":{}}', "inputs must be a list"),
        (b'{"inputs":[],"id":7}', "id must be a string"),
        (b'{"inputs":[],"outputs":{}}', "outputs must be a list"),
        (b'{"inputs":[],"outputs":[7]}', "every output needs a name"),
        (b'{"inputs":[],"outputs":[{"name":"a"},{"name":"a"}]}', "output 'a' is listed twice"),
        (b'{"inputs":[],"outputs":[{"name":"a","parameters":{"binary_data":1}}]}', "binary_data of output 'a'"),
        (b'{"inputs":[],"outputs":[{"name":"a","parameters":["binary_data"]}]}', "parameters of output 'a'"),
        (b'{"inputs":[],"parameters":7}', "parameters of the request"),
        (b'{"inputs":[],"parameters":{"binary_data_output":"yes"}}', "binary_data_output of the request"),
        (b'{"inputs":[7]}', "every input needs a name"),
        (body({"name": 7}), "every input needs a name"),
        (body(tensor(shape=7)), "needs a shape"),
        (body(tensor(shape=[-1])), "needs a shape"),
        (body(tensor(shape=[1.0])), "needs a shape"),
        (body(tensor(shape=[True])), "needs a shape"),
        (body(tensor(shape=[1] * 33)), "needs a shape"),
        (body(tensor("x", "FP31")), "datatype 'FP31'"),
        (body(tensor("x", "BF16")), "datatype 'BF16'"),
        (body(tensor(data=[1], parameters=7)), "parameters of input 'x'"),
        (body(tensor()), "needs data"),
        (body(tensor(data=7)), "needs data"),
        (body(tensor(data={"a": 1})), "needs data"),
        (body(tensor(data=[1]), tensor(data=[1])), "is listed twice"),
        (body(tensor(data=[1, 2])), "has 2 elements"),
        (body(tensor(shape=[2**63], data=[1])), "has 1 elements"),
        (body(tensor(shape=[0, 2**63], data=[])), "cannot have shape"),
        (body(tensor(shape=[2, 2], data=[[1, 2], [3]])), "not a regular list"),
        (body(tensor(shape=[4], data=[[1, 2], [3, 4]])), "nested as"),
        (body(tensor(data=["1"])), "something else than FP32"),
        (body(tensor(data=[None])), "something else than FP32"),
        (body(tensor(data=[{}])), "something else than FP32"),
        (body(tensor(data=[True])), "something else than FP32"),
        (body(tensor("x", "BOOL", data=[1])), "something else than BOOL"),
        (body(tensor("x", "BYTES", data=[1])), "something else than strings"),
        (body(tensor("x", "BYTES", [2], data=["a"])), "has 1 elements"),
        (body(tensor("x", "INT8", data=[128])), "outside INT8"),
        (body(tensor("x", "UINT8", data=[-1])), "outside UINT8"),
        (body(tensor("x", "INT64", data=[2**63])), "outside INT64"),
        (body(tensor("x", "UINT64", data=[2**64])), "something else than UINT64"),
        (body(tensor("x", "FP32", data=[1e300])), "too large for FP32"),
        (body(tensor("x", "FP16", data=[70000])), "too large for FP16"),
        (body(tensor(data=[1], parameters={"binary_data_size": 4})), "give one"),
        (body(tensor(parameters={"binary_data_size": 4})), "0 bytes of binary data are left"),
        (body(tensor(parameters={"binary_data_size": -4})), "binary_data_size -4"),
        (body(tensor(parameters={"binary_data_size": "4"})), "binary_data_size 4"),
    ],
)
def test_whatever_is_wrong_is_said(content: bytes, complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint) as caught:
        parse(content)
    assert caught.value.outcome is Outcome.INVALID


@pytest.mark.parametrize(
    ("header", "raw", "json_bytes", "complaint"),
    [
        (body(), b"", 99, "Inference-Header-Content-Length is 99"),
        (body(), b"abcd", None, "not JSON"),
        (body(), b"abcd", 14, "belong to no input"),
        (body(tensor(parameters={"binary_data_size": 3})), b"abc", -1, "3 bytes given where FP32"),
        (body(tensor("x", "BYTES", parameters={"binary_data_size": 3})), b"abc", -1, "cannot hold 1 BYTES"),
        (body(tensor(shape=[0, 2**63], parameters={"binary_data_size": 0})), b"", -1, "input 'x'"),
    ],
)
def test_binary_data_that_does_not_fit_is_refused(
    header: bytes, raw: bytes, json_bytes: int | None, complaint: str
) -> None:
    with pytest.raises(RequestError, match=complaint):
        parse(header + raw, len(header) if json_bytes == -1 else json_bytes)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)
names = st.sampled_from(["x", "y", ""]) | json_values
entries = st.fixed_dictionaries(
    {},
    optional={
        "name": names,
        "datatype": st.sampled_from([*NUMPY_TYPES, "BF16"]) | json_values,
        "shape": st.lists(st.integers(-1, 4) | st.sampled_from([2**70, 2**63, 2**62]), max_size=3) | json_values,
        "data": st.lists(json_values, max_size=5) | json_values,
        "parameters": st.fixed_dictionaries({}, optional={"binary_data_size": json_values}) | json_values,
    },
)
requests = st.fixed_dictionaries(
    {},
    optional={
        "id": json_values,
        "inputs": st.lists(entries, max_size=3) | json_values,
        "outputs": st.lists(st.fixed_dictionaries({}, optional={"name": names, "parameters": json_values}), max_size=3)
        | json_values,
        "parameters": json_values,
    },
)


@given(requests, st.binary(max_size=24), st.integers(-1, 200))
@example({"inputs": [tensor(data=[[[]]], shape=[1, 1, 0])]}, b"", -1)
def test_any_json_either_parses_or_is_refused(content: Any, raw: bytes, json_bytes: int) -> None:
    text = json.dumps(content).encode()
    try:
        call = parse(text + raw, len(text) if json_bytes < 0 else json_bytes)
    except RequestError as error:
        assert error.outcome is Outcome.INVALID
        return
    for array in call.request.inputs.values():
        assert datatype_of(array) in NUMPY_TYPES


@given(st.binary(max_size=200), st.none() | st.integers(0, 250))
def test_any_bytes_either_parse_or_are_refused(content: bytes, json_bytes: int | None) -> None:
    with pytest.raises(RequestError):
        parse(content, json_bytes)


@pytest.mark.parametrize(
    ("datatype", "data", "wrong"),
    [
        ("UINT64", [2**63, 0], None),
        ("UINT64", [2**64 - 1, 1], None),
        ("UINT64", [2**63, -1], "a number outside UINT64"),
        ("UINT64", [2**64, 0], "something else than UINT64"),
        ("INT64", [2**63, -1], "a number outside INT64"),
        ("UINT64", [2.0**63, 0], "something else than UINT64"),
        ("UINT64", [None, 1], "something else than UINT64"),
        ("FP64", [2**63, 0], None),
    ],
)
def test_whole_numbers_stay_whole_on_both_sides_of_two_to_the_63(datatype: str, data: Any, wrong: str | None) -> None:
    body = json.dumps({"inputs": [{"name": "x", "datatype": datatype, "shape": [2], "data": data}]}).encode()
    if wrong is None:
        assert parse(body, None).request.inputs["x"].tolist() == data
        return
    with pytest.raises(RequestError, match=wrong):
        parse(body, None)


@given(
    st.sampled_from(sorted(set(NUMPY_TYPES) - {"BYTES"})).flatmap(
        lambda name: hnp.arrays(NUMPY_TYPES[name], hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    ),
    st.booleans(),
)
def test_what_goes_out_can_come_in_again(array: "np.ndarray[Any, Any]", binary: bool) -> None:
    if array.dtype.kind == "f":
        array = np.nan_to_num(array)
    answer = render("m", "v", PLAIN._replace(binary_default=binary), {"x": array})
    end = len(answer.body) if answer.json_bytes is None else answer.json_bytes
    content = json.loads(answer.body[:end])
    again = json.dumps({"inputs": content["outputs"]}).encode()
    call = parse(again + answer.body[end:], len(again) if binary else None)
    assert call.request.inputs["x"].dtype == array.dtype
    assert call.request.inputs["x"].tobytes() == array.tobytes()
    assert call.request.inputs["x"].shape == array.shape


@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=70),
    st.sampled_from(["FP32", "FP64"]),
)
@example([1e300, 1.0], "FP32")
@example([3.4028235677973366e38], "FP32")
@example([-0.0, 5e-324], "FP32")
def test_a_few_numbers_become_what_many_do(data: list[float], datatype: str) -> None:
    """Short lists are packed on a path of their own; padded past its limit, the same numbers take the other."""
    many = [*data, *[0.0] * (65 - len(data))]
    found = []
    for numbers in (data, many):
        try:
            found.append(parse(body(tensor("x", datatype, [len(numbers)], data=numbers))).request.inputs["x"])
        except RequestError as error:
            found.append(str(error))
    few, padded = found
    if isinstance(few, str) or isinstance(padded, str):
        assert few == padded == f"input 'x' holds a number too large for {datatype}"
    else:
        assert few.dtype == padded.dtype and few.tobytes() == padded[: len(data)].tobytes()
