import json
import math

import pytest

from joulery.domain.errors import DataError
from joulery.domain.gpu.layout_plan import (
    LayoutBaseline,
    LayoutBound,
    LayoutInstance,
    LayoutPlan,
    LayoutService,
    PlannedLayout,
    PoolOfSize,
)
from joulery.domain.gpu.pipeline_plan import PipelineGpu, PipelinePlan, PlannedPart, PlannedService
from joulery.domain.gpu.provisioning import (
    LatencyParts,
    PlanBound,
    PlannedGpu,
    PlannedInstance,
    ProvisionPlan,
    Violation,
)
from joulery.domain.quality import Quality
from joulery.store.plan_documents import document_of
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
        with pytest.raises(DataError, match=f"2 GPUs, not a GPU {gpu}"):
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
    assert "joulery plan SITE" in caught.value.hint


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


PARTS = LatencyParts(0.001, 0.002, 0.003, math.inf, 0.0)
INSTANCE = PlannedInstance("w", "m", 0, 2, 10.0, 0.3, 4, math.inf, math.nan, PARTS, 0.02, 50.0, 0.04)
SHARES = ProvisionPlan(
    "best",
    (PlannedGpu("V100", 3.06, 1500.0, 1530.0, 120.0, 110.0, (INSTANCE,)),),
    (Violation("w", 0, "latency", math.inf, 0.02),),
    PlanBound(1, 3.06, 2.5, "searched"),
)
PART = PlannedPart("w", "m", 0, 1, 1, 2, 0, 1, 5.0, 0.004, 0.7, 2e9, (3, 9))
STAGES = PipelinePlan(
    "muserve",
    (PipelineGpu("V100", 3.06, 1000.0, 1380.0, 500.0, 1300.0, 90.0, 140.0, 0.4, 1.6e10, (PART,)),),
    (PlannedService("w", "m", 5.0, 0.1, 0.99, 0.995, math.inf, 2, 0.7, 1, 2, 1),),
    (),
    Quality.MODELLED,
    "2 groups",
    "Alg. 2",
    0.1,
    100,
)
LAYOUTS = LayoutPlan(
    "columns",
    (PlannedLayout("A100-40GB", None, 2, (LayoutInstance("7g.40gb", "w", "big"),), 4.1),),
    (
        LayoutService(
            "w", 2.5, 0.87, 0.86, 1.2, 0.013, 0.15, 0.17, 30.0, 0.4, 0.2, None, LayoutBaseline("big", 4, 50.0, 0.16)
        ),
    ),
    2,
    120.0,
    75.2,
    None,
    LayoutBound(118.0, 0.017, 119.0, 0.008),
    12,
    5,
    (PoolOfSize(2, 120.0, (0.87,), (0.15,)),),
)


@pytest.mark.parametrize(("plan", "kind"), [(SHARES, "shares"), (STAGES, "stages"), (LAYOUTS, "layouts")])
def test_every_kind_of_plan_is_read_back(tmp_path, plan, kind) -> None:
    file = kept(tmp_path, document_of(plan))
    read = read_plan(file)
    assert read.kind == kind
    assert repr(read.plan()) == repr(plan)  # by repr: NaN is not equal to itself
    common = {"schema", "kind", "policy", "quality", "gpus", "cost_usd_per_hour", "violations", "gap_ratio", "binding"}
    assert common <= read.document.keys()


def test_files_of_older_versions_are_read(tmp_path) -> None:
    shares, stages, layouts = (document_of(plan) for plan in (SHARES, STAGES, LAYOUTS))
    for document in (shares, stages, layouts):
        del document["kind"]
    del stages["services"][0]["required_ratio"]
    for key in ("policy", "gpus", "cost_usd_per_hour", "violations", "binding", "idle_w"):
        del layouts[key]
    layouts["schema"] = "joulery.pool-plan/1"
    assert repr(read_plan(kept(tmp_path, shares)).shares()) == repr(SHARES.gpus)
    read = read_plan(kept(tmp_path, stages)).plan()
    assert isinstance(read, PipelinePlan) and read.services[0].required_ratio == 0.99
    old = read_plan(kept(tmp_path, layouts)).plan()
    assert isinstance(old, LayoutPlan) and (old.policy, old.gpus_on) == ("columns", 2)


def test_a_plan_of_another_kind_is_refused(tmp_path) -> None:
    with pytest.raises(DataError, match="layouts"):
        read_plan(kept(tmp_path, document_of(LAYOUTS))).shares()
    with pytest.raises(DataError, match="no such kind"):
        read_plan(kept(tmp_path, {"kind": "other", "gpus": []})).plan()
