"""Runs a model a given number of times: ``python -m joulery.adapters.engines.embedded.once MODEL INPUTS BATCH TIMES``.

For a profiler that records a whole process: the work of two inferences is the difference between a run of three and a
run of one.
"""

from __future__ import annotations

import sys

import numpy as np

from joulery.adapters.engines.embedded.models import load
from joulery.domain.serving.engine import ModelRef


def main(model: str, inputs: str, batch: str, times: str) -> int:
    """Load the model and run it.

    Args:
        model: As :meth:`~joulery.domain.serving.engine.ModelRef.parse` takes it.
        inputs: One request, in an .npz file; the first axis of each array is the batch.
        batch: How often the request is repeated along that axis.
        times: Number of inferences.

    Returns:
        The exit status.
    """
    loaded = load(ModelRef.parse(model), threads=1)
    with np.load(inputs, allow_pickle=False) as arrays:
        batched = {name: np.repeat(arrays[name], int(batch), axis=0) for name in arrays.files}
    for _ in range(int(times)):
        loaded.run(dict(batched), ())
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
