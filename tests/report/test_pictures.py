"""Pictures in a page hold the pixels they should, and heat maps the differences."""

import base64
import io

import numpy as np
import pytest
from PIL import Image

from hyimg_cli.errors import UsageError
from hyimg_cli.report.comparison import (
    DISPLAY_SIDE,
    EmbeddedPicture,
    color_values,
    embed_picture,
    heat_map,
)


def decoded(picture: EmbeddedPicture) -> np.ndarray:
    head, _, data = picture.uri.partition(";base64,")
    assert head == "data:image/png"
    return np.array(Image.open(io.BytesIO(base64.b64decode(data))))


def noise(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def test_a_small_picture_keeps_every_bit_and_is_shown_enlarged() -> None:
    picture = embed_picture(noise(48, 64), "x")
    assert np.array_equal(decoded(picture), noise(48, 64))
    assert (picture.width, picture.height, picture.shown_width) == (64, 48, 256)
    assert picture.note == ""


def test_a_large_picture_is_scaled_down_and_says_so() -> None:
    picture = embed_picture(noise(600, 1200), "x")
    assert decoded(picture).shape == (DISPLAY_SIDE // 2, DISPLAY_SIDE, 3)
    assert picture.note == "scaled down from 1200x600"
    assert picture.shown_width == picture.width


def test_the_colours_are_those_of_inferno() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    values = np.linspace(0, 1, 256)[None]
    expected = np.rint(matplotlib.colormaps["inferno"](values)[..., :3] * 255)
    assert np.abs(color_values(values) - expected).max() <= 2
    assert heat_map(noise(2, 2), noise(2, 2)).gradient.count("#") == 33


def test_brightness_rises_with_the_difference() -> None:
    luma = color_values(np.linspace(0, 1, 256)[None])[0] @ np.array([0.2126, 0.7152, 0.0722])
    assert (np.diff(luma) > -0.6).all()
    assert luma[-1] - luma[0] > 200


def test_a_heat_map_says_its_scale_and_shows_each_difference() -> None:
    a = noise(20, 30) // 2
    b = a.copy()
    b[3, 4, 1] += 7
    found = heat_map(a, b)
    assert (found.top, found.largest) == (10, 7)
    assert "from 0 to 10 levels" in found.legend
    pixels = decoded(found.picture)
    assert pixels[3, 4].tolist() == color_values(np.array([[0.7]]))[0, 0].tolist()
    rest = np.delete(pixels.reshape(-1, 3), 3 * 30 + 4, axis=0)
    assert np.unique(rest, axis=0).tolist() == [[0, 0, 4]]


def test_a_large_heat_map_loses_no_single_dot() -> None:
    a = np.zeros((1700, 900, 3), np.uint8)
    b = a.copy()
    b[1699, 899, 2] = 200
    found = heat_map(a, b)
    pixels = decoded(found.picture)
    assert pixels.shape == (567, 300, 3)
    assert found.largest == 200
    assert "largest of 3x3" in found.legend
    assert np.argwhere(pixels.max(axis=2) > 100).tolist() == [[566, 299]]


def test_equal_pictures_have_a_scale_too() -> None:
    a = np.zeros((4, 4, 3), np.uint8)
    assert heat_map(a, a).top == 1


def test_pictures_of_two_sizes_have_no_heat_map() -> None:
    with pytest.raises(UsageError, match="differ in size"):
        heat_map(noise(8, 8), noise(8, 9))
