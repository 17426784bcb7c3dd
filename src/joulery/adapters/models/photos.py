"""Photographs from a folder as the tensor that every variant of an image family takes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from joulery.domain.errors import CapabilityError, DataError

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp"})


def photo_files(folder: Path) -> tuple[Path, ...]:
    """The pictures in a folder, by name.

    Raises:
        DataError: There is no such folder, or no picture in it.
    """
    if not folder.is_dir():
        raise DataError("there is no such folder of photographs", file=str(folder))
    found = tuple(sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES))
    if not found:
        raise DataError(f"no photograph here: none of {', '.join(sorted(SUFFIXES))}", file=str(folder))
    return found


def read_photo(path: Path, side: int) -> npt.NDArray[np.uint8]:
    """The central square of a picture, scaled: RGB, uint8[side, side, 3].

    Raises:
        CapabilityError: Pillow is not installed.
        DataError: The file is not a picture, is damaged, or is too large.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise CapabilityError(
            "reading photographs needs Pillow", resource="pillow", grant="pip install 'joulery[vision]'"
        ) from error
    try:
        with Image.open(path) as picture:
            width, height = picture.size
            square = min(width, height)
            left, top = (width - square) // 2, (height - square) // 2
            box = (left, top, left + square, top + square)
            return np.asarray(picture.convert("RGB").crop(box).resize((side, side), Image.Resampling.BICUBIC))
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, SyntaxError, ValueError) as error:
        raise DataError(f"not a picture that can be read: {error}", file=str(path)) from error
