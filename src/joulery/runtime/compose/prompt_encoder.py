"""The prompt encoder of a length predictor: the one that is installed, or none."""

from __future__ import annotations

from joulery.adapters.models import minilm
from joulery.runtime.text.length_training import Encoder

CHOICES = ("auto", "minilm", "none")


def prompt_encoder(choice: str) -> Encoder | None:
    """``minilm``, or ``none``; ``auto`` is minilm where it is installed.

    Raises:
        CapabilityError: ``minilm`` is asked for and not installed.
    """
    if choice == "none" or (choice == "auto" and not minilm.installed()):
        return None
    return minilm.PromptEncoder()
