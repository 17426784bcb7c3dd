import numpy as np
import pytest

from joulery.domain.errors import ConfigError, DataError
from joulery.store.semantic_cache import SemanticCache


def pair(cosine: float, rng: np.random.Generator, dimensions: int = 384) -> tuple[np.ndarray, np.ndarray]:
    """Two unit vectors at exactly this cosine, in a random plane."""
    a = rng.normal(size=dimensions)
    a /= np.linalg.norm(a)
    b = rng.normal(size=dimensions)
    b -= (a @ b) * a
    b /= np.linalg.norm(b)
    return a, cosine * a + np.sqrt(1 - cosine**2) * b


def test_a_hit_is_a_cosine_of_at_least_0_92() -> None:
    rng = np.random.default_rng(0)
    cosines = np.concatenate(([0.9199, 0.9201, 0.8, 1.0, -1.0], rng.uniform(0.85, 0.99, 2000)))
    for cosine in cosines:
        a, b = pair(float(cosine), rng)
        cache = SemanticCache()
        cache.insert("m", "a prompt", a * rng.uniform(0.1, 9), 77.0)
        assert (cache.look_up("m", "another", b) == 77.0) == (cosine >= 0.92), cosine


def test_the_nearest_entry_of_the_same_model_answers() -> None:
    rng = np.random.default_rng(1)
    a, near = pair(0.99, rng)
    _, far = a, pair(0.93, rng)[1]
    cache = SemanticCache()
    cache.insert("m", "near", near, 10.0)
    cache.insert("m", "far", far, 20.0)
    cache.insert("other", "same", a, 30.0)
    assert cache.look_up("m", "?", a) == 10.0
    assert cache.look_up("other", "?", a) == 30.0
    assert cache.look_up("third", "?", a) is None


def test_equal_text_hits_whatever_its_case_and_a_zero_vector_misses() -> None:
    cache = SemanticCache()
    cache.insert("m", "What is ENTROPY?", np.zeros(8), 5.0)
    assert cache.look_up("m", "what is entropy?", np.zeros(8)) == 5.0
    assert cache.look_up("m", "something else", np.zeros(8)) is None
    assert cache.look_up("m", "something else", np.ones(8)) is None


def test_an_equal_prompt_is_replaced_and_the_least_used_one_evicted() -> None:
    eye = np.eye(8)
    cache = SemanticCache(capacity=3)
    for row in range(3):
        cache.insert("m", f"p{row}", eye[row], float(row))
    cache.insert("m", "P1", eye[1], 11.0)
    assert len(cache) == 3 and cache.look_up("m", "p1", eye[1]) == 11.0
    assert cache.look_up("m", "p0", eye[0]) == 0.0
    cache.insert("m", "p3", eye[3], 3.0)
    assert len(cache) == 3
    assert cache.look_up("m", "?", eye[2]) is None
    assert cache.look_up("m", "p2", eye[5]) is None
    assert [cache.look_up("m", "?", eye[row]) for row in (0, 1, 3)] == [0.0, 11.0, 3.0]


def test_nonsense_is_refused() -> None:
    for bad in ({"capacity": 0}, {"threshold": 1.5}):
        with pytest.raises(ConfigError):
            SemanticCache(**bad)  # type: ignore[arg-type]
    cache = SemanticCache()
    cache.insert("m", "p", np.ones(4), 1.0)
    with pytest.raises(DataError, match="4 dimensions, got 5"):
        cache.insert("m", "q", np.ones(5), 1.0)
    with pytest.raises(DataError, match="tokens"):
        cache.insert("m", "q", np.ones(4), float("nan"))
    with pytest.raises(DataError, match="finite vector"):
        cache.look_up("m", "q", np.array([np.inf, 0, 0, 0]))


def test_looking_at_a_few_dimensions_first_changes_no_answer() -> None:
    random = np.random.default_rng(11)
    centres = random.normal(size=(40, 96))
    entries = centres[random.integers(0, 40, 300)] + 0.2 * random.normal(size=(300, 96))
    entries /= np.linalg.norm(entries, axis=1, keepdims=True)
    cache = SemanticCache(capacity=300)
    for number, entry in enumerate(entries):
        cache.insert("m", str(number), entry, float(number))
    hits = 0
    for probe in centres[random.integers(0, 40, 200)] + random.uniform(0.1, 0.6) * random.normal(size=(200, 96)):
        probe /= np.linalg.norm(probe)
        distance = np.linalg.norm(entries - probe, axis=1)
        expected = float(np.argmin(distance)) if distance.min() <= 0.4 else None
        assert cache.look_up("m", "unseen", probe) == expected
        hits += expected is not None
    assert 20 < hits < 200
