import json

import pytest

from joulery.domain.errors import DataError
from joulery.store.plans import read_plan


def kept(folder, plan):
    file = folder / "plan.json"
    file.write_text(plan if isinstance(plan, str) else json.dumps(plan))
    return file


def bounds(floor, ceiling):
    return {"clock_floor_mhz": floor, "clock_ceiling_mhz": ceiling}


def test_the_bounds_of_a_gpu(tmp_path) -> None:
    file = kept(tmp_path, {"gpus": [bounds(200, 1000), bounds(500, 1380)]})
    assert read_plan(file).clock_bounds(1) == (200.0, 1000.0)
    assert read_plan(file).clock_bounds(2) == (500.0, 1380.0)
    for gpu in (0, 3):
        with pytest.raises(DataError, match=f"has 2 GPUs, not a GPU {gpu}"):
            read_plan(file).clock_bounds(gpu)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("{", "cannot read the plan"),
        ("[]", "bounds no clocks"),
        ({"gpus": [{"type": "V100"}]}, "bounds no clocks"),
        ({"gpus": [bounds(900, 800)]}, "cannot be kept between 900"),
        ({"gpus": [bounds(-1, 800)]}, "cannot be kept between -1"),
    ],
)
def test_what_is_no_such_plan(tmp_path, plan, message) -> None:
    with pytest.raises(DataError, match=message) as caught:
        read_plan(kept(tmp_path, plan)).clock_bounds(1)
    assert "--preset muserve --out" in caught.value.hint


def test_a_plan_that_is_not_there(tmp_path) -> None:
    with pytest.raises(DataError, match="cannot read the plan"):
        read_plan(tmp_path / "none.json")


def test_who_is_hosted_where(tmp_path) -> None:
    gpus = [{"instances": [{"model": "a"}, {"model": "b"}]}, {"instances": []}, {"instances": [{"model": "c"}]}]
    assert read_plan(kept(tmp_path, {"gpus": gpus})).hosts() == (("a", 0), ("b", 0), ("c", 2))
    for plan, message in (
        ({"gpus": [*gpus, {"instances": [{"model": "a"}]}]}, "has a on several GPUs"),
        ({"gpus": [{"instances": []}]}, "hosts no model"),
        ({"gpus": [{}]}, "not a plan of pipelines"),
        ("{", "cannot read the plan"),
    ):
        with pytest.raises(DataError, match=message):
            read_plan(kept(tmp_path, plan)).hosts()
