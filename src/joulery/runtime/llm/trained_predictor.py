"""Adapt one head of a trained length predictor to the forecaster."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.runtime.llm.length_prediction import LengthScore
from joulery.runtime.llm.predictor_files import GraphPredictor
from joulery.runtime.llm.predictor_training import TrainedPredictor


@dataclass(frozen=True, slots=True, eq=False)
class PredictorHead:
    """One head of a trained predictor. Implements :class:`joulery.runtime.llm.length_prediction.LengthPredictor`.

    Attributes:
        trained: The predictor.
        head: Which head; see :meth:`~joulery.perf.lengths.kernel_ridge.LengthModel.head`.
    """

    trained: TrainedPredictor | GraphPredictor
    head: int

    @property
    def class_tokens(self) -> FloatArray:
        """Mean tokens of the five classes: the middles between the boundaries the head was trained with."""
        every = self.trained.class_tokens
        low, mid, high, top = every[self.head] if self.head < len(every) else np.median(every, axis=0)
        middles = [0.5 * low, 0.5 * (low + mid), 0.5 * (mid + high), 0.5 * (high + top), 1.1 * top]
        return np.maximum.accumulate(np.maximum(1.0, middles))

    def predict(self, prompt: str) -> LengthScore:
        """The head's score, and the prompt's embedding where the predictor has an encoder."""
        scores, embedding = self.trained.look(prompt)
        return LengthScore(float(scores[self.head]), embedding)
