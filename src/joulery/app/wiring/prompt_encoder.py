"""The prompt encoder of a length predictor: the one that is installed, one distilled from it, or none."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from joulery.adapters.models import minilm, minilm_distil
from joulery.perf.lengths.classes import QUANTILES
from joulery.runtime.llm.predictor_training import Encoder, TrainingAnswers, scores_unseen


def prompt_encoder(choice: str) -> Encoder | None:
    """``minilm``, or ``none``; ``auto`` is minilm where it is installed.

    Raises:
        CapabilityError: ``minilm`` is asked for and not installed.
    """
    if choice == "none" or (choice == "auto" and not minilm.installed()):
        return None
    return minilm.PromptEncoder()


def distilled_encoder(
    log: TrainingAnswers, seed: int, progress: Callable[[int, int, str], None] | None = None
) -> Encoder:
    """The installed encoder distilled into three layers on the prompts of a log.

    Args:
        log: What the predictor is trained on.
        seed: Of every draw.
        progress: Receives the steps done, the steps in all and, after each epoch, its loss.

    Raises:
        CapabilityError: PyTorch or the encoder is not installed.
        DataError: The log is too small to learn from.
    """
    teacher = minilm.PromptEncoder()
    scores = scores_unseen(log, teacher)
    shared = scores[:, -1]
    classes = np.searchsorted(np.quantile(shared, QUANTILES), shared, "right")
    lesson = minilm_distil.Lesson(log.prompts, scores, classes)
    return minilm_distil.distil(teacher, lesson, minilm_distil.DistilRecipe(seed=seed), progress)
