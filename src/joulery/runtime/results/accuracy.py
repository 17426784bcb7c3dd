"""Compute the accuracy of a service's answers: from returned labels, or as its variants' authors declare."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from joulery.domain.serving.service import ModelFamily
from joulery.perf.confidence import mixed_interval, share_interval


def accuracy_figures(
    family: ModelFamily, labels: Mapping[str, tuple[int, int]], variants: Mapping[str, float], floor_ratio: float = 0.0
) -> dict[str, Any]:
    """The accuracy weighted by requests: observed where every variant that answered has labels, else declared.

    Args:
        family: The variants.
        labels: Of each variant, how many labelled answers were right, and how many were labelled.
        variants: Share of the answers that came from each variant; empty without answers.
        floor_ratio: Minimum mean accuracy of the answers; 0 for none, which is not reported.
    """
    sources = dict.fromkeys(variant.accuracy_source for variant in family.variants)
    declared = math.fsum(share * family[name].accuracy_ratio for name, share in variants.items())
    weighed = [(share, labels.get(name, (0, 0))) for name, share in variants.items() if share > 0]
    figures: dict[str, Any] = {
        "accuracy_ratio": declared if variants else math.nan,
        "accuracy_declared_ratio": declared if variants else math.nan,
        "accuracy_basis": "declared",
        "accuracy_labels": sum(count for _, count in labels.values()),
        "accuracy_source": f"{family.accuracy_metric}, {'; '.join(sources)}, weighted by requests",
        **({"minimum_accuracy_ratio": floor_ratio} if floor_ratio > 0 else {}),
    }
    if not weighed or not all(count for _, (_, count) in weighed):
        return figures
    found = mixed_interval([(share, share_interval(right, count, 0.95)) for share, (right, count) in weighed])
    return {
        **figures,
        "accuracy_ratio": found.point,
        "accuracy_low_ratio": found.low,
        "accuracy_high_ratio": found.high,
        "accuracy_basis": "observed",
        "accuracy_source": "share of the labelled answers that were right, by variant, weighted by requests",
    }
