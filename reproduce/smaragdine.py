"""``python -m reproduce smaragdine``: shares of BERT-base's energy (Smaragdine, ICSE 2024, sections 5.2 and 5.3)."""

from __future__ import annotations

import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import click

from joulery.accounting.operations.edd import Node, tree
from joulery.accounting.operations.rows import folded
from joulery.app.runs.anatomies import load_anatomies
from joulery.domain.energy.tensor_footprint import TensorFootprint
from joulery.domain.errors import DataError
from reproduce.claim import Claim, json_option, print_claims, verdict
from reproduce.product import EXAMPLES

PRODUCT = re.compile(r"/(addmm|mm|bmm|baddbmm|\w*(flash|efficient|cudnn)_attention\w*)(_\d+)?$")
"""Matches matrix multiplications, and the kernels that fuse the two multiplications of attention."""
FEED_FORWARD = re.compile(r"/(intermediate|transformer/output)/dense/")


@dataclass(frozen=True, slots=True)
class RangeCheck:
    """A figure and the range that it should lie in."""

    name: str
    value: float
    low: float
    high: float

    @property
    def holds(self) -> bool:
        """Whether the figure lies in its range."""
        return self.low <= self.value <= self.high


def shares(footprint: TensorFootprint, device: str | None = None, spread: float = 0.015) -> list[RangeCheck]:
    """Checks 5 to 7: the modules' shares of the energy of the forward pass.

    Args:
        footprint: Footprint of BERT-base.
        device: Count this device alone; all devices when not given.
        spread: Highest standard deviation allowed for the shares of the layers.
    """
    whole = tree(footprint, device=device, phase="forward")
    (model,) = (node for node in whole.children if node.at("bert") is not None)
    encoder, attention = _at(model, "bert/encoder"), _at(model, "bert/encoder/layer_0/attention")
    layers = [node.share_ratio for node in encoder.children if node.name.startswith("layer_")]
    mean = statistics.fmean(layers)
    return [
        RangeCheck("5 encoder, of bert", encoder.share_ratio, 0.990, 1.0),
        RangeCheck("6 a layer, of the encoder: mean", mean, 0.083, 0.0834),
        RangeCheck("6 the same: standard deviation", statistics.pstdev(layers), 0.0, spread),
        RangeCheck("6 layer_0 against the mean", layers[0] / mean - 1, -0.10, 0.10),
        RangeCheck("7 attention, of layer_0", attention.share_ratio, 0.35, 0.47),
        RangeCheck("7 self, of attention", _at(attention, "self").share_ratio, 0.65, 0.82),
    ]


def passes(footprint: TensorFootprint, device: str | None = None, products: int = 10) -> list[RangeCheck]:
    """Checks 4, 8 and 9: time without a module, the top ten inside the encoder, backward against forward.

    Args:
        footprint: Footprint of BERT-base.
        device: Count this device alone; all devices when not given.
        products: Least number of the top ten operations that must multiply matrices.
    """
    rows = _rows(footprint, device)
    total = {
        phase: math.fsum(joules for joules, _, when, _ in rows if when == phase) for phase in ("forward", "backward")
    }
    named = [(op.startswith("<no module>"), ns) for _, op, phase, ns in rows if phase in total]
    inside = sorted((row[:3] for row in _rows(folded(footprint), device) if "/encoder/" in row[1]), reverse=True)[:10]
    return [
        RangeCheck(
            "4 self time without a module", sum(ns for no, ns in named if no) / sum(ns for _, ns in named), 0.0, 0.03
        ),
        RangeCheck(
            "8 products among the top ten of the encoder",
            sum(bool(PRODUCT.search(op)) for _, op, _ in inside),
            products,
            10,
        ),
        RangeCheck("8 feed-forward products among the first six", _feed_forward(inside[:6]), 6, 6),
        RangeCheck("8 backward among the ten", sum(phase == "backward" for _, _, phase in inside), 5, 10),
        RangeCheck("9 backward over forward", total["backward"] / total["forward"], 1.6, 2.3),
    ]


def _rows(footprint: TensorFootprint, device: str | None) -> list[tuple[float, str, str, int]]:
    """Joules, operation, phase and nanoseconds of each metered row of a device, or of all devices."""
    columns = (footprint.energy_j.tolist(), footprint.op, footprint.phase, footprint.runtime_ns.tolist())
    places = zip(footprint.device, zip(*columns, strict=True), strict=True)
    return [row for place, row in places if device in (None, place) and not math.isnan(row[0])]


def _feed_forward(rows: list[tuple[float, str, str]]) -> int:
    return sum(bool(PRODUCT.search(op) and FEED_FORWARD.search(op)) for _, op, _ in rows)


def _at(node: Node, path: str) -> Node:
    found = node.at(path)
    if found is None:
        raise DataError(f"the run has no module {path}", hint="name a traced run of examples/anatomy/pretrain.py")
    return found


@click.command("smaragdine")
@click.argument("run", required=False, type=click.Path(path_type=Path))
@json_option
def command(run: Path | None, as_json: bool) -> int:
    """Check the shares that the paper gives for BERT-base in RUN, a traced run of examples/anatomy/pretrain.py.

    Without RUN, measure one now: three training steps on this machine (needs torch and transformers; some minutes).
    Exits with 1 if a share is outside its range.
    """
    if run is not None:
        return _report(run, as_json=as_json)
    with tempfile.TemporaryDirectory() as folder:
        return _report(_measured(Path(folder) / "run"), as_json=as_json)


def _measured(run: Path) -> Path:
    """Measure the paper's program with one thread."""
    program = [sys.executable, str(EXAMPLES / "anatomy" / "pretrain.py"), "--steps", "4"]
    flags = ["--trace", "torch", "--steps", "skip=1,warmup=0,active=3,repeat=1", "--out", str(run)]
    done = subprocess.run(
        [sys.executable, "-m", "joulery", "measure", *flags, "--", *program],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=sys.stderr,
        check=False,
    )
    if done.returncode != 0:
        raise DataError(
            f"measuring examples/anatomy/pretrain.py ended with exit code {done.returncode}",
            hint="it needs torch and transformers: pip install 'joulery[torch]' transformers",
        )
    return run


def _report(run: Path, *, as_json: bool) -> int:
    anatomies = load_anatomies([str(run)])
    found = [*shares(anatomies[0].footprint), *passes(anatomies[0].footprint)]
    claims = [
        Claim(
            check.name.split()[0],
            check.name.partition(" ")[2],
            f"{check.low:g} to {check.high:g}",
            f"{check.value:.4g}",
            verdict(check.holds),
        )
        for check in found
    ]
    print_claims(claims, {"paper": "smaragdine", "run": str(run)}, as_json=as_json)
    return int(not all(check.holds for check in found))
