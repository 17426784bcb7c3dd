"""Where the measured data and golden cases lie: ``JOULERY_DATA``, then ``../shared/data`` beside the checkout."""

import os
from pathlib import Path

import pytest


def data_folder(part: str) -> Path:
    """The folder ``part`` of the data set; skips the calling test, saying so, where the data set is absent."""
    root = Path(os.environ.get("JOULERY_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
    if not (root / part).is_dir():
        pytest.skip(f"the data set is not here: set JOULERY_DATA to a folder that holds {part}/")
    return root / part
