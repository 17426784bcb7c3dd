import json

import numpy as np
import pytest

from joulery.adapters.models import minilm
from joulery.domain.errors import CapabilityError, DataError

VOCABULARY = {word: number for number, word in enumerate(["the", "un", "##want", "##ed", "?", "_", "cafe", "a"])}


@pytest.fixture(scope="module")
def encoder():
    if not minilm.installed():
        pytest.skip(f"the prompt encoder is not installed: {minilm.HOW}")
    return minilm.PromptEncoder(layers=1, max_tokens=32)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("", []),
        ("The  unwanted?", [0, 1, 2, 3, 4]),
        ("Café_a", [6, 5, 7]),
        ("unwantx", [100]),
        ("the zebra", [0, 100]),
        ("x" * 200, [100]),
        ("\ud800", [100]),
    ],
)
def test_word_pieces(text, numbers):
    assert minilm.word_pieces(text, VOCABULARY, 128) == [101, *numbers, 102]


def test_a_long_text_is_cut():
    found = minilm.word_pieces("the " * 1_000_000, VOCABULARY, 16)
    assert found == [101, *[0] * 14, 102]


@pytest.mark.parametrize("last", [0, 1, 2, 5, 15])
@pytest.mark.parametrize("count", [1, 3, 6, 7, 8, 40, 9_000])
def test_of_a_long_text_the_first_and_the_last_pieces_are_kept(last, count):
    text = "unwanted the? a " * count
    every = [101, *[1, 2, 3, 0, 4, 7] * count, 102]
    kept = every if len(every) <= 20 else [*every[: 20 - max(1, last)], *every[len(every) - max(1, last) :]]
    assert minilm.word_pieces(text, VOCABULARY, 20, last) == kept


def test_alike_prompts_lie_near_and_nothing_breaks_it(encoder):
    a, b, c = (encoder(p) for p in ("Write a poem about rain", "Write a poem on rain.", "Fix this SQL query: SELECT 1"))
    assert np.linalg.norm(a - b) < np.linalg.norm(a - c)
    for prompt in ("", "\ud800\udfff", "long " * 200_000):
        assert bool(np.all(np.isfinite(encoder(prompt)))) and encoder(prompt).shape == (minilm.WIDTH,)
    assert encoder.name.endswith("1 layers, int8")


def test_the_package_is_named_when_it_is_missing(monkeypatch):
    monkeypatch.setattr(minilm, "PACKAGE", "no-such-package")
    assert not minilm.installed()
    with pytest.raises(CapabilityError, match="not installed") as raised:
        minilm.PromptEncoder()
    assert "--no-deps" in raised.value.hint


def test_a_layer_that_is_not_there(encoder):
    with pytest.raises(CapabilityError, match="6 layers, got 7"):
        minilm.PromptEncoder(layers=7)


def test_safetensors(tmp_path):
    file = tmp_path / "weights.safetensors"
    header = json.dumps(
        {
            "__metadata__": {"format": "pt"},
            "w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [8, 24]},
            "n": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]},
        }
    ).encode()
    body = np.array([7], "<i8").tobytes() + np.array([1, 2, 3, 4], "<f4").tobytes()
    file.write_bytes(len(header).to_bytes(8, "little") + header + body)
    assert {name: array.tolist() for name, array in minilm.read_safetensors(file).items()} == {"w": [[1, 2], [3, 4]]}
    for broken in (b"", b'\x05\0\0\0\0\0\0\0{"w"', file.read_bytes()[:-4]):
        file.write_bytes(broken)
        with pytest.raises(DataError, match="safetensors"):
            minilm.read_safetensors(file)
