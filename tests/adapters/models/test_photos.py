from pathlib import Path

import numpy as np
import pytest

from joulery.adapters.models.photos import photo_files, read_photo
from joulery.domain.errors import DataError

Image = pytest.importorskip("PIL.Image", reason="PIL.Image is not installed: pip install 'joulery[vision]'")
PHOTOS = Path(__file__).parents[3] / "examples" / "photos"


def test_the_bundled_photographs_are_listed_with_their_licence():
    files = photo_files(PHOTOS)
    assert len(files) == 9 and files == tuple(sorted(files))
    readme = (PHOTOS / "README.md").read_text()
    for path in files:
        (row,) = [line for line in readme.splitlines() if f"`{path.name}`" in line]
        assert "CC0" in row or "public domain" in row


def test_the_central_square_is_taken(tmp_path):
    stripes = np.zeros((40, 100, 3), np.uint8)
    stripes[:, 30:70] = (255, 0, 0)
    Image.fromarray(stripes).save(tmp_path / "wide.png")
    pixels = read_photo(tmp_path / "wide.png", 20)
    assert pixels.shape == (20, 20, 3) and pixels.dtype == np.uint8
    assert np.all(pixels == (255, 0, 0))


def test_grey_and_transparent_pictures_become_rgb(tmp_path):
    Image.fromarray(np.full((8, 8), 90, np.uint8)).save(tmp_path / "grey.png")
    Image.fromarray(np.full((8, 8, 4), 90, np.uint8)).save(tmp_path / "alpha.png")
    for name in ("grey", "alpha"):
        assert np.all(read_photo(tmp_path / f"{name}.png", 4) == 90)


def test_what_is_no_picture_is_one_clear_error(tmp_path):
    (tmp_path / "text.jpg").write_text("hello")
    whole = (PHOTOS / "clock.jpg").read_bytes()
    (tmp_path / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    for name in ("text", "cut", "absent"):
        with pytest.raises(DataError, match="not a picture") as caught:
            read_photo(tmp_path / f"{name}.jpg", 16)
        assert f"{name}.jpg" in str(caught.value)


def test_a_folder_without_photographs_is_one_clear_error(tmp_path):
    with pytest.raises(DataError, match="no such folder"):
        photo_files(tmp_path / "absent")
    with pytest.raises(DataError, match="no photograph here"):
        photo_files(tmp_path)
