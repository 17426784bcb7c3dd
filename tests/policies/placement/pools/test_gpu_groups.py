from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.errors import InfeasibleError
from joulery.domain.gpu.mig import A100_40GB
from joulery.domain.serving.service import Slice, SliceKind
from joulery.policies.placement.pools.gpu_groups import divide, first_alone, on_first, parts, split
from joulery.policies.serving.search.layout_space import core_partitions, cpu_slices, size_of


def mig(*profiles: str) -> tuple[Slice, ...]:
    return tuple(Slice(SliceKind.MIG, profile=profile) for profile in profiles)


def mps(*shares: float) -> tuple[Slice, ...]:
    return tuple(Slice(SliceKind.MPS, share_ratio=share) for share in shares)


A100 = tuple(mig(*cut) for cut in A100_40GB.multisets)
WHOLE = ((Slice(SliceKind.WHOLE),),)


def test_what_is_named_is_its_own_and_the_others_get_equal_parts_of_the_rest():
    assert divide({"a": [], "b": []}, 4, colocate=False) == {"a": (0, 1), "b": (2, 3)}
    assert divide({"a": [], "b": []}, 5, colocate=False) == {"a": (0, 1, 2), "b": (3, 4)}, "the first gets the odd one"
    assert divide({"a": [], "b": [2, 0], "c": []}, 4, colocate=False) == {"a": (1,), "b": (0, 2), "c": (3,)}
    assert divide({"a": [0], "b": [1]}, 3, colocate=False) == {"a": (0,), "b": (1,)}, "no service asked for the third"
    assert divide({"a": []}, 2, colocate=False) == {"a": (0, 1)}


def test_what_equal_parts_leave_over_is_shared_where_that_is_allowed():
    assert divide({"a": [], "b": []}, 3, colocate=True) == {"a": (0, 2), "b": (1, 2)}
    assert divide({"a": [], "b": []}, 1, colocate=True) == {"a": (0,), "b": (0,)}
    assert divide({"a": [0], "b": [0]}, 1, colocate=True) == {"a": (0,), "b": (0,)}


@pytest.mark.parametrize(
    ("named", "gpus", "colocate", "words"),
    [
        ({"a": [], "b": []}, 1, False, r"2 services \(a, b\) and 1 GPUs for them"),
        ({"a": [0], "b": []}, 1, False, r"1 services \(b\) and 0 GPUs"),
        ({"a": [0], "b": []}, 1, True, r"1 services \(b\) and 0 GPUs"),
    ],
)
def test_a_service_without_a_gpu_is_one_clear_error(named, gpus, colocate, words):
    with pytest.raises(InfeasibleError, match=words) as caught:
        divide(named, gpus, colocate=colocate)
    assert "colocate: true" in caught.value.hint


@given(
    st.lists(st.sets(st.integers(0, 7), max_size=3), min_size=1, max_size=5),
    st.integers(8, 12),
    st.booleans(),
)
def test_every_service_has_gpus_and_groups_are_disjoint(claims, gpus, colocate):
    taken: set[int] = set()
    named = {}
    for number, claim in enumerate(claims):
        named[f"s{number}"] = sorted(claim - taken)
        taken |= claim
    without, free = sum(not claim for claim in named.values()), gpus - len(taken)
    if without and free < (1 if colocate else without):
        with pytest.raises(InfeasibleError, match=f"{without} services .* and {free} GPUs"):
            divide(named, gpus, colocate=colocate)
        return
    groups = divide(named, gpus, colocate=colocate)
    assert list(groups) == list(named) and all(groups.values())
    assert all(set(groups[name]) == set(claim) for name, claim in named.items() if claim)
    users = Counter(gpu for group in groups.values() for gpu in group)
    others = [groups[name] for name, claim in named.items() if not claim]
    if not colocate:
        assert max(users.values()) == 1
        assert not others or max(map(len, others)) - min(map(len, others)) <= 1
    if others:
        assert set(range(gpus)) == set(users), "no GPU is left over"
        assert not colocate or len(set(map(len, others))) == 1


def test_gpus_of_ones_own_may_be_cut_in_every_way():
    found = parts({"gpu:0": A100, "gpu:1": WHOLE}, {"a": ["gpu:0"], "b": ["gpu:1"]})
    assert found == {"a": {"gpu:0": A100}, "b": {"gpu:1": WHOLE}}
    assert parts({"gpu:0": A100, "gpu:1": WHOLE}, {"a": ["gpu:1"]}) == {"a": {"gpu:1": WHOLE}}


def test_a_shared_gpu_is_cut_once_and_its_slices_are_dealt():
    found = parts({"gpu:0": A100}, {"a": ["gpu:0"], "b": ["gpu:0"]})
    assert found == {"a": {"gpu:0": (mig("4g.20gb"),)}, "b": {"gpu:0": (mig("3g.20gb"),)}}
    three = parts({"gpu:0": A100}, dict.fromkeys("abc", ("gpu:0",)))
    assert {name: sum(map(size_of, mine["gpu:0"][0])) for name, mine in three.items()} == {"a": 3, "b": 2, "c": 2}
    seven = parts({"gpu:0": A100}, dict.fromkeys("abcdefg", ("gpu:0",)))
    assert all(mine == {"gpu:0": (mig("1g.5gb"),)} for mine in seven.values())
    shared = parts({"gpu:0": (mps(1.0), mps(0.6, 0.4), mps(0.5, 0.5))}, dict.fromkeys("ab", ("gpu:0",)))
    assert shared == {name: {"gpu:0": (mps(0.5),)} for name in "ab"}


def test_over_several_shared_gpus_the_one_with_less_comes_first():
    cut = (mig("4g.20gb", "3g.20gb"),)
    found = parts({"gpu:0": cut, "gpu:1": cut}, dict.fromkeys("ab", ("gpu:0", "gpu:1")))
    assert found["a"] == {"gpu:0": (mig("4g.20gb"),), "gpu:1": (mig("3g.20gb"),)}
    assert found["b"] == {"gpu:0": (mig("3g.20gb"),), "gpu:1": (mig("4g.20gb"),)}


def test_a_slice_for_each_before_anyone_has_two():
    cut = (mig("1g.5gb", "1g.5gb", "2g.10gb", "3g.20gb"),)
    found = parts({"gpu:0": cut}, {"a": ["gpu:0"], "b": ["gpu:0"]})
    assert found == {"a": {"gpu:0": (mig("3g.20gb", "1g.5gb"),)}, "b": {"gpu:0": (mig("2g.10gb", "1g.5gb"),)}}


def test_whole_gpus_are_not_shared():
    with pytest.raises(InfeasibleError, match="gpu:0, which a, b share, ") as caught:
        parts({"gpu:0": WHOLE}, dict.fromkeys("ab", ("gpu:0",)))
    assert "mode: mig" in caught.value.hint


def test_cuts_of_several_gpus_say_who_has_which_slice():
    first, second = (mig("7g.40gb"), mig("3g.20gb", "4g.20gb")), (mig("7g.40gb"),)
    found = split({"gpu:0": first, "gpu:1": second})
    seven, three, four = mig("7g.40gb", "3g.20gb", "4g.20gb")
    assert found == {
        (seven, seven): ((seven, "gpu:0"), (seven, "gpu:1")),
        (three, four, seven): ((three, "gpu:0"), (four, "gpu:0"), (seven, "gpu:1")),
    }
    both = split({"gpu:0": first, "gpu:1": first})
    assert len(both) == 3, "cuts with the same slices once, whichever GPU has them"


def test_the_first_of_several_gpus_alone():
    whole, half = Slice(SliceKind.WHOLE), Slice(SliceKind.MPS, share_ratio=0.5)
    options = {"gpu:0": [(whole,), (half, half)], "gpu:1": [(whole,)], "gpu:2": [(half, half)]}
    found = first_alone(options)
    assert found[(whole,)] == ((whole, "gpu:0"),)
    assert found[half, half] == ((half, "gpu:0"), (half, "gpu:0"))
    assert all({gpu for _, gpu in assigned} <= {"gpu:0", "gpu:1"} for assigned in found.values())
    assert len(found) == 4 and () not in found
    assert first_alone({"gpu:0": [(whole,)]}) == {}


@given(st.lists(st.integers(1, 3), min_size=2, max_size=4), st.data())
def test_a_part_is_moved_to_the_first_machines_of_its_size_and_to_no_other(cores, data):
    names = [f"n{index}" for index in range(len(cores))]
    options = {
        name: [cpu_slices(cut) for cut in core_partitions(count)] for name, count in zip(names, cores, strict=True)
    }
    used = {**first_alone(options), **split(options)}
    size = dict(zip(names, cores, strict=True))
    cut, order = data.draw(st.sampled_from(sorted(used))), data.draw(st.permutations(names))
    placed = on_first(used, cut, order)
    assert sorted(piece for piece, _ in placed) == list(cut)
    held = {name: sum(piece.cores for piece, at in placed if at == name) for name in {at for _, at in placed}}
    assert all(size[name] == total for name, total in held.items()), "each is as full as it can be"
    for count in set(cores):
        alike = [name for name in order if size[name] == count]
        mine = {name for name in held if size[name] == count}
        assert mine == set(alike[: len(mine)]), "the first ones of the order"
    if set(held) == set(names):
        assert placed == used[cut], "where all are used, nothing moves"
    stays = on_first(used, cut, [*held, *(name for name in order if name not in held)])
    assert {at for _, at in stays} == set(held)
