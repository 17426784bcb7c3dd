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
from joulery.app.runs import load_anatomies
from joulery.domain.energy.tensor_footprint import TensorFootprint

PRODUCT = re.compile(r"/(addmm|mm|bmm|baddbmm|\w*(flash|efficient|cudnn)_attention\w*)(_\d+)?$")
"""Products of matrices, and the kernels that make attention's two products one."""
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


def shares(footprint: TensorFootprint, device: str | None = None, spread: float = 0.015) -> list[Check]:
    """Checks 5 to 7: shares of the forward pass.

    Args:
        footprint: Of BERT-base.
        device: Where to look; everywhere when not given.
        spread: How far layers may spread.
    """
    whole = tree(footprint, device=device, phase="forward")
    (model,) = (node for node in whole.children if node.at("bert") is not None)
    encoder, attention = _at(model, "bert/encoder"), _at(model, "bert/encoder/layer_0/attention")
    layers = [node.share_ratio for node in encoder.children if node.name.startswith("layer_")]
    mean = statistics.fmean(layers)
    return [
        Check("5 encoder, of bert", encoder.share_ratio, 0.990, 1.0),
        Check("6 a layer, of the encoder: mean", mean, 0.083, 0.0834),
        Check("6 the same: standard deviation", statistics.pstdev(layers), 0.0, spread),
        Check("6 layer_0 against the mean", layers[0] / mean - 1, -0.10, 0.10),
        Check("7 attention, of layer_0", attention.share_ratio, 0.35, 0.47),
        Check("7 self, of attention", _at(attention, "self").share_ratio, 0.65, 0.82),
    ]


def passes(footprint: TensorFootprint, device: str | None = None, products: int = 10) -> list[Check]:
    """Checks 4, 8 and 9: names, the top ten inside the encoder, backward against forward.

    Args:
        footprint: Of BERT-base.
        device: Where to look; everywhere when not given.
        products: How many of the top ten are to multiply matrices.
    """
    rows = _rows(footprint, device)
    total = {
        phase: math.fsum(joules for joules, _, when, _ in rows if when == phase) for phase in ("forward", "backward")
    }
    named = [(op.startswith("<no module>"), ns) for _, op, phase, ns in rows if phase in total]
    inside = sorted((row[:3] for row in _rows(folded(footprint), device) if "/encoder/" in row[1]), reverse=True)[:10]
    return [
        Check(
            "4 self time without a module", sum(ns for no, ns in named if no) / sum(ns for _, ns in named), 0.0, 0.03
        ),
        Check(
            "8 products among the top ten of the encoder",
            sum(bool(PRODUCT.search(op)) for _, op, _ in inside),
            products,
            10,
        ),
        Check("8 feed-forward products among the first six", _feed_forward(inside[:6]), 6, 6),
        Check("8 backward among the ten", sum(phase == "backward" for _, _, phase in inside), 5, 10),
        Check("9 backward over forward", total["backward"] / total["forward"], 1.6, 2.3),
    ]


def _rows(footprint: TensorFootprint, device: str | None) -> list[tuple[float, str, str, int]]:
    """Joules, operation, phase and nanoseconds of the metered rows of a device, or of all of them."""
    columns = (footprint.energy_j.tolist(), footprint.op, footprint.phase, footprint.runtime_ns.tolist())
    places = zip(footprint.device, zip(*columns, strict=True), strict=True)
    return [row for place, row in places if device in (None, place) and not math.isnan(row[0])]


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
