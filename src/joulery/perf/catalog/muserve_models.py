"""Fifteen models on an emulated V100 (μ-Serve, ATC'24, Table 1): latency against the clock.

Latency at 1380 MHz is Table 1's. Its shape over the clock is emulated: the roofline of
:data:`joulery.perf.power.clock_curves.V100` over the operations that the public architecture of each model implies
(batch 8 × 512 tokens, or a prefill of 512 tokens and 64 decode steps), scaled to the table. Modelled, not measured.
"""

from __future__ import annotations

from dataclasses import dataclass

CLOCKS_MHZ: tuple[float, ...] = (200, 300, 400, 500, 600, 700, 800, 900, 1000, 1100, 1200, 1300, 1380)
"""Clocks of the latencies below."""


@dataclass(frozen=True, slots=True)
class EmulatedModel:
    """One model with its latency at each clock.

    Attributes:
        name: Name as in Table 1.
        autoregressive: Whether its work grows with the length of the answer.
        sensitivity: Score between 690 and 1380 MHz.
        latency_s: Time of one pass at each of ``CLOCKS_MHZ``.
    """

    name: str
    autoregressive: bool
    sensitivity: float
    latency_s: tuple[float, ...]


MODELS: tuple[EmulatedModel, ...] = (
    EmulatedModel(
        "ResNet-50",
        False,
        1.73,
        (0.2951, 0.2051, 0.1596, 0.1319, 0.1127, 0.09349, 0.08108, 0.07204, 0.06553, 0.06069, 0.05671, 0.05334, 0.051),
    ),
    EmulatedModel(
        "BERT-base",
        False,
        1.80,
        (0.749, 0.514, 0.3957, 0.3239, 0.2748, 0.2301, 0.2001, 0.1778, 0.1612, 0.1485, 0.1381, 0.1292, 0.123),
    ),
    EmulatedModel(
        "BERT-large",
        False,
        1.84,
        (2.281, 1.556, 1.191, 0.9702, 0.8202, 0.6901, 0.6008, 0.5339, 0.4834, 0.4442, 0.4117, 0.3841, 0.365),
    ),
    EmulatedModel(
        "RoBERTa-base",
        False,
        1.80,
        (0.8221, 0.5642, 0.4343, 0.3555, 0.3016, 0.2526, 0.2196, 0.1952, 0.177, 0.163, 0.1515, 0.1418, 0.135),
    ),
    EmulatedModel(
        "RoBERTa-large",
        False,
        1.84,
        (2.387, 1.628, 1.246, 1.015, 0.8584, 0.7223, 0.6288, 0.5588, 0.5059, 0.4649, 0.4308, 0.402, 0.382),
    ),
    EmulatedModel(
        "OPT-1.3b",
        True,
        0.80,
        (3.403, 2.818, 2.502, 2.288, 2.111, 1.708, 1.51, 1.386, 1.322, 1.294, 1.273, 1.255, 1.243),
    ),
    EmulatedModel(
        "OPT-2.7b", True, 0.91, (7, 5.735, 5.054, 4.592, 4.214, 3.353, 2.924, 2.661, 2.523, 2.462, 2.417, 2.378, 2.351)
    ),
    EmulatedModel(
        "GPT2-large",
        True,
        0.53,
        (1.785, 1.525, 1.386, 1.291, 1.214, 1.037, 0.949, 0.8948, 0.8673, 0.8549, 0.8455, 0.8375, 0.832),
    ),
    EmulatedModel(
        "GPT2-xl",
        True,
        0.66,
        (3.905, 3.273, 2.932, 2.701, 2.514, 2.097, 1.887, 1.756, 1.688, 1.657, 1.635, 1.615, 1.602),
    ),
    EmulatedModel(
        "CodeGen-350m",
        True,
        0.40,
        (0.6699, 0.5855, 0.5398, 0.5086, 0.4828, 0.4241, 0.3953, 0.3775, 0.3683, 0.3643, 0.3613, 0.3588, 0.357),
    ),
    EmulatedModel(
        "CodeGen-2b",
        True,
        0.91,
        (7.464, 6.116, 5.389, 4.897, 4.494, 3.576, 3.118, 2.837, 2.69, 2.626, 2.577, 2.536, 2.507),
    ),
    EmulatedModel(
        "Bloom-1b1",
        True,
        0.68,
        (1.256, 1.073, 0.9723, 0.902, 0.8425, 0.6894, 0.6143, 0.5685, 0.5461, 0.5377, 0.5317, 0.5266, 0.523),
    ),
    EmulatedModel(
        "Bloom-3b",
        True,
        0.91,
        (3.784, 3.137, 2.784, 2.542, 2.338, 1.844, 1.601, 1.453, 1.378, 1.348, 1.325, 1.306, 1.293),
    ),
    EmulatedModel(
        "Switch-base-16",
        True,
        0.26,
        (0.5441, 0.4913, 0.4628, 0.4434, 0.4275, 0.3907, 0.3723, 0.3609, 0.3551, 0.3526, 0.3507, 0.3491, 0.348),
    ),
    EmulatedModel(
        "Switch-base-32",
        True,
        0.25,
        (0.624, 0.5636, 0.5309, 0.5105, 0.4936, 0.4493, 0.4277, 0.4146, 0.4083, 0.4061, 0.4044, 0.403, 0.402),
    ),
)
