"""What power limits do to a site's own jobs, from the files of its agents."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from joulery.app.simulation.site_limits import known_limits
from joulery.domain.errors import ConfigError
from joulery.perf.power.training_power import RTX3090_CLASSES, limit_responses, limited
from joulery.policies.clocks.power_limit import PowerLimitTuner
from joulery.sim.training.limited_job import learned_limits
from joulery.sim.training.site_machines import SiteMachines, classes_of
from joulery.store.jobs import JobLimitBook
from tests.app.simulation.test_site_power import past

FREE = tuple((ratio, 1.0, ratio) for ratio in (0.833, 0.75, 0.667, 0.583, 0.5))
"""Half the power at no loss of speed."""
DEAR = ((0.75, 2.0, 0.9), (0.5, 4.0, 0.8))


def meters(folder: Path) -> Path:
    book = JobLimitBook(folder / "limits")
    for kind, points in (
        ("ada/train on 2 × NVIDIA A100-SXM4-40GB at 400 W", FREE),
        ("ada/train on 8 × NVIDIA A100-SXM4-40GB at 400 W on each of 2 nodes", DEAR),
        ("ada/train on 1 × Tesla V100-SXM2-32GB at 300 W", DEAR),
        ("ada/assumed on 2 × NVIDIA A100-SXM4-40GB at 400 W by busy cycles", FREE),
    ):
        assert book.write(kind, points)
    (folder / "limits/torn.json").write_text('{"kind": "ada/train on 2')
    (folder / "limits/list.json").write_text("[]")
    return folder


def test_jobs_have_the_limits_of_their_kind_type_and_nearest_number_of_gpus(tmp_path: Path) -> None:
    jobs = [
        past(1, gpu_type="a100", gpus=2), past(2, gpu_type="a100", gpus=1), past(3, gpu_type="a100", gpus=12),
        past(4, gpu_type="v100", gpus=2), past(5, gpus=2), past(6, "assumed", gpu_type="a100"),
        past(7, "other", gpu_type="a100"), past(8, gpu_type="h100"),
    ]  # fmt: skip
    known = known_limits(jobs, meters(tmp_path))
    found = [None if at < 0 else known.responses[at] for at in known.response_of.tolist()]
    assert found == [FREE, FREE, DEAR, DEAR, None, None, None, None]
    assert (known.measured, known.assumed) == (4, 4)
    nothing = known_limits(jobs, None)
    assert nothing.responses == () and nothing.assumed == 8
    with pytest.raises(ConfigError, match="not a folder"):
        known_limits(jobs, tmp_path / "elsewhere")


def test_a_measured_response_decides_the_limit_that_a_job_learns() -> None:
    one = np.ones(2, np.int64)
    machines = SiteMachines(limits=(FREE, DEAR), limits_of=np.array([0, 1]))
    classes, rows = classes_of(0 * one, one, machines, 8)
    free, dear = (classes[row] for row in rows)
    assert len({job.name for job in classes}) == len(classes) == len(RTX3090_CLASSES) + 2
    assert limit_responses(free)[0.5] == (1.0, 0.5) and limit_responses(free)[0.917] == (1.010, 0.945)
    assert limited((free,), 0.5)[0].gpu_w == 0.5 * free.gpu_w
    found = learned_limits(classes, PowerLimitTuner(eta=0.7))
    assert found[free.name].ratio < found[classes[0].name].ratio < 1.0
    assert found[dear.name].ratio > 0.75
    assert classes_of(0 * one, one, SiteMachines(limits_of=np.array([-1, -1])), 8)[1].tolist() == [0, 0]
