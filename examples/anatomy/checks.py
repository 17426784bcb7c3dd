"""What the paper says of BERT's energy (sections 5.2 and 5.3), looked up in a traced run of BERT-base.

    OMP_NUM_THREADS=1 joulery measure --trace torch --steps skip=1,warmup=0,active=3,repeat=1 --out runs/base -- \
        python examples/anatomy/pretrain.py --steps 4
    python examples/anatomy/checks.py runs/base

Prints each figure beside what it should lie between, and ends with 1 where one does not.
"""

import math
import re
import statistics
import sys
from dataclasses import dataclass

from joulery.accounting.edd import Node, tree
from joulery.accounting.rows import folded
from joulery.domain.tef import TensorFootprint
from joulery.runtime.tracing.anatomies import load_anatomies

PRODUCT = re.compile(r"/(addmm|mm|bmm|baddbmm)(_\d+)?$")
FEED_FORWARD = re.compile(r"/(intermediate|transformer/output)/dense/")


@dataclass(frozen=True, slots=True)
class Check:
    """A figure and what it should lie between."""

    name: str
    value: float
    low: float
    high: float

    @property
    def holds(self) -> bool:
        return self.low <= self.value <= self.high


def shares(footprint: TensorFootprint) -> list[Check]:
    """Checks 5 to 7: shares of the forward pass."""
    (model,) = (node for node in tree(footprint, phase="forward").children if node.at("bert") is not None)
    encoder, attention = _at(model, "bert/encoder"), _at(model, "bert/encoder/layer_0/attention")
    layers = [node.share_ratio for node in encoder.children if node.name.startswith("layer_")]
    mean = statistics.fmean(layers)
    return [
        Check("5 encoder, of bert", encoder.share_ratio, 0.990, 1.0),
        Check("6 a layer, of the encoder: mean", mean, 0.083, 0.0834),
        Check("6 the same: standard deviation", statistics.pstdev(layers), 0.0, 0.015),
        Check("6 layer_0 against the mean", layers[0] / mean - 1, -0.10, 0.10),
        Check("7 attention, of layer_0", attention.share_ratio, 0.35, 0.47),
        Check("7 self, of attention", _at(attention, "self").share_ratio, 0.65, 0.82),
    ]


def passes(footprint: TensorFootprint) -> list[Check]:
    """Checks 4, 8 and 9: names, the top ten inside the encoder, backward against forward."""
    rows = list(zip(footprint.op, footprint.phase, footprint.energy_j.tolist(), strict=True))
    total = {phase: math.fsum(joules for _, when, joules in rows if when == phase) for phase in ("forward", "backward")}
    times = zip(footprint.op, footprint.phase, footprint.runtime_ns.tolist(), strict=True)
    named = [(op.startswith("<no module>"), ns) for op, phase, ns in times if phase in total]
    short = folded(footprint)
    inside = sorted(
        (
            (joules, op, phase)
            for op, phase, joules in zip(short.op, short.phase, short.energy_j.tolist(), strict=True)
            if "/encoder/" in op
        ),
        reverse=True,
    )[:10]
    return [
        Check(
            "4 self time without a module", sum(ns for no, ns in named if no) / sum(ns for _, ns in named), 0.0, 0.03
        ),
        Check(
            "8 products among the top ten of the encoder", sum(bool(PRODUCT.search(op)) for _, op, _ in inside), 10, 10
        ),
        Check("8 feed-forward products among the first six", _feed_forward(inside[:6]), 6, 6),
        Check("8 backward among the ten", sum(phase == "backward" for _, _, phase in inside), 5, 10),
        Check("9 backward over forward", total["backward"] / total["forward"], 1.6, 2.3),
    ]


def _feed_forward(rows: list[tuple[float, str, str]]) -> int:
    return sum(bool(PRODUCT.search(op) and FEED_FORWARD.search(op)) for _, op, _ in rows)


def _at(node: Node, path: str) -> Node:
    found = node.at(path)
    if found is None:
        sys.exit(f"no {path} in the run: is it one of pretrain.py with a BERT?")
    return found


def main() -> int:
    (anatomy,) = load_anatomies(sys.argv[1:2])
    found = [*shares(anatomy.footprint), *passes(anatomy.footprint)]
    for check in found:
        verdict = "holds" if check.holds else "MISSED"
        print(f"{verdict:6} {check.name:48} {check.value:8.4g}   {check.low:g} to {check.high:g}")
    return int(not all(check.holds for check in found))


if __name__ == "__main__":
    sys.exit(main())
