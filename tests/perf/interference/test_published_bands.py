"""The errors that published coefficients are said to have, against the published measurements."""

import pytest

from joulery.domain.quantile import quantile_of
from joulery.perf.catalog import profile
from joulery.perf.interference.model import Neighbourhood, colocated_latency, solo
from tests.perf.interference.published_pairs import published_pairs, published_solo


def predicted_ms(known, processes):
    """Latencies of processes side by side: (model, batch, share in percent) each."""
    alone = [solo(known[model], batch, share) for model, batch, share in processes]
    around = Neighbourhood()
    for one in alone:
        around = around.with_process(one)
    return [
        colocated_latency(known.gpu, known[model], batch, own, around).total_ms
        for (model, batch, _), own in zip(processes, alone, strict=True)
    ]


@pytest.mark.parametrize("name", ["v100", "v100-calibrated", "v100-refit"])
def test_one_measurement_in_twenty_took_longer_by_the_band_or_more(name):
    known = profile(name)
    longer = {(model, kind): [] for model in known.models for kind in ("solo", "pairs")}
    for one in published_solo():
        (ms,) = predicted_ms(known, [(one.model, one.batch, one.share_percent)])
        longer[one.model, "solo"].append(one.latency_ms / ms - 1)
    for pair in published_pairs():
        first = (pair.model_1, pair.batch_1, pair.share_1_percent)
        second = (pair.model_2, pair.batch_2, pair.share_2_percent)
        first_ms, second_ms = predicted_ms(known, [first, second])
        longer[pair.model_1, "pairs"].append(pair.latency_1_ms / first_ms - 1)
        longer[pair.model_2, "pairs"].append(pair.latency_2_ms / second_ms - 1)
    for model, band in known.bands.items():
        worst = max(quantile_of(longer[model, kind], 0.95) for kind in ("solo", "pairs"))
        assert worst <= band <= worst + 0.0015, model
