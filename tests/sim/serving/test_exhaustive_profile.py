"""Simulated exhaustive tables: whole, paired, and like the calibrated stand-in they can be compared with."""

from dataclasses import replace

import numpy as np
import pytest

from joulery.domain.gpu.mig import A100_40GB
from joulery.perf.catalog.clover_services import CLOVER_SERVICES
from joulery.sim.core.streams import Streams
from joulery.sim.serving.outcome import StudySettings
from joulery.sim.serving.schemes import run_variants
from joulery.sim.serving.trial_table import bench, exhaustive_table
from joulery.store.variant_tables import read_tables
from tests.data_folder import data_folder

SMALL = replace(A100_40GB, partitions=A100_40GB.partitions[:2])
YOLO = CLOVER_SERVICES["yolo"]


def test_every_configuration_under_every_load_and_the_baseline():
    seen = []
    table = exhaustive_table(YOLO, SMALL, Streams(0), progress=lambda done, total: seen.append((done, total)))
    assert table.loads_s == (1.0, 0.4, 0.2)
    assert len(table.entries) == 3 * (3 + 9)
    assert seen[-1] == (12, 12)
    assert table.base_accuracy_ratio == pytest.approx(0.55)
    assert 0.40 < table.base_latency_s < 0.46
    assert table.base_energy_j == pytest.approx(111, rel=0.05)
    assert "calibrated" in table.quality


def test_variants_that_do_not_fit_a_slice_are_not_in_it():
    table = exhaustive_table(YOLO, A100_40GB, Streams(0), (0.2,))
    edges = {edge for entry in table.entries for edge in entry.instances}
    assert ("yolov5x6", "1g.5gb") not in edges
    assert ("yolov5x6", "2g.10gb") in edges
    assert len(table.entries) == 208


def test_the_same_seed_gives_the_same_table_and_the_same_requests_to_all():
    first, again = (exhaustive_table(YOLO, SMALL, Streams(1), (0.2,)) for _ in range(2))
    assert first == again
    assert exhaustive_table(YOLO, SMALL, Streams(2), (0.2,)) != first


@pytest.mark.slow
def test_the_built_in_profile_behaves_like_the_independent_stand_in():
    """Other parameters, other draws, the same points behind both: energies agree closely, latencies less."""
    stand_in = bench(read_tables(data_folder("clover") / "synth_v1")["yolo"], A100_40GB)
    ours = bench(exhaustive_table(YOLO, A100_40GB, Streams(0), (1.0, 0.2)), A100_40GB)
    assert ours.space.graphs.tolist() == stand_in.space.graphs.tolist()
    pairs = list(zip(ours.metrics, stand_in.metrics, strict=True))
    energy = np.array([[one.energy_j, other.energy_j] for one, other in pairs])
    assert np.abs(energy[:, 0] / energy[:, 1] - 1).mean() < 0.06
    latency = np.array([[one.latency_s, other.latency_s] for one, other in pairs])
    ranks = np.argsort(np.argsort(latency, axis=0), axis=0)
    assert np.corrcoef(ranks.T)[0, 1] > 0.8
    grid = [100.0, 200.0, 300.0]
    for scheme in ("oracle", "co2opt"):
        one, other = (
            run_variants(scheme, made, "grid", grid, StudySettings(), Streams(0)) for made in (ours, stand_in)
        )
        assert one.saving_ratio == pytest.approx(other.saving_ratio, abs=0.02)
