"""What the edits of a chain touched: of an edit, of an edit of it, and so on.

Each edit that keeps its source carries the history of all edits before it: the first source, and
which of its pixels any edit touched. Each edit is equal to its own source where its matte is 0, so
a pixel that none of them touched is the first source's.

A picture has its history in its record, so it can be moved. Where that is not enough, because the
picture has no metadata or comes from several edits, NAME.touched.png next to it has it, too.
"""

import base64
import io
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, PngImagePlugin

from hyimg_cli.addresses import address_of
from hyimg_cli.errors import SourceImageError
from hyimg_cli.files import json_of
from hyimg_cli.media.metadata import CHAIN, KEYWORD, PictureText
from hyimg_cli.media.source_files import bytes_of_source, open_picture
from hyimg_cli.spec.job import EDIT_SUFFIXES, Size

# The side of the squares in which a very ragged mask is recorded, and the most bytes of one.
_SQUARE, _MOST_BYTES = 8, 1_000_000


@dataclass(frozen=True)
class Origin:
    """The first source: `sha256` of its file, `pixel_sha256` of its upright pixels as stored."""

    sha256: str
    pixel_sha256: str


@dataclass(frozen=True, eq=False)
class History:
    """The edits of a picture since its first source.

    `links`: how many. `touched` [H, W]: True where any of them may differ from the first source.
    `pixel_sha256`: of the picture itself, which another program may have changed since.
    """

    origin: Origin
    links: int
    touched: NDArray[np.bool_]
    pixel_sha256: str

    @classmethod
    def of(cls, origin: Origin, size: Size) -> "History":
        """Return the history of a picture that no edit has touched."""
        touched = np.zeros((size.height, size.width), np.bool_)
        return cls(origin, 0, touched, origin.pixel_sha256)

    def then(self, touched: NDArray[np.bool_], pixel_sha256: str) -> "History":
        """Return the history after one more edit, which touched these pixels [H, W]."""
        union = self.touched | touched if self.links else touched
        return History(self.origin, self.links + 1, union, pixel_sha256)

    def counts(self) -> dict[str, int]:
        """Return the numbers of pixels that edits touched, and that are the first source's."""
        count = int(np.count_nonzero(self.touched))
        return {"touched_pixels": count, "untouched_pixels": self.touched.size - count}

    def to_record(self) -> dict[str, Any]:
        """Return the history for a picture's record, which has `pixel_sha256` itself."""
        data = base64.b64encode(_png_of(self.touched)).decode()
        return {"origin": asdict(self.origin), "links": self.links, "touched": data}

    def to_png(self) -> bytes:
        """Return the history as a PNG, white where an edit touched the picture."""
        facts = {"origin": asdict(self.origin), "links": self.links}
        text = PngImagePlugin.PngInfo()
        text.add_text(KEYWORD, json.dumps(facts | {"pixel_sha256": self.pixel_sha256}))
        return _png_of(self.touched, text)


def history_of_source(path: Path, text: PictureText, own: Origin, size: Size) -> History:
    """Return the history of a picture that will be edited, whose digests are `own`.

    If hyimg did not write it, or another program changed its pixels, it is a first source itself.
    """
    found = recorded_history(path, text, size)
    return found if found and found.pixel_sha256 == own.pixel_sha256 else History.of(own, size)


def recorded_history(path: Path, text: PictureText, size: Size) -> History | None:
    """Return the history recorded for a picture with this metadata, perhaps of other pixels.

    None without one of this size.
    """
    return _history_in(text, size) or _history_beside(path, size)


def _history_in(text: PictureText, size: Size) -> History | None:
    """Return the history in a picture's record."""
    # Files are untrusted: anything that is not exactly a history is none.
    with suppress(ValueError, TypeError, KeyError, AttributeError):
        record = json_of(text.record)
        chain = record[CHAIN]
        return _history(chain, base64.b64decode(chain["touched"]), record["pixel_sha256"], size)
    return None


def _history_beside(path: Path, size: Size) -> History | None:
    """Return the history next to a picture."""
    beside = path.with_name(path.stem + EDIT_SUFFIXES["touched"])
    if address_of(path):
        return None  # it would be one more request for each source of a run
    with suppress(SourceImageError, ValueError, TypeError, KeyError, AttributeError):
        data = bytes_of_source(beside)
        with open_picture(beside, data) as image:
            image.load()
            facts = json_of(image.info[KEYWORD])
        return _history(facts, data, facts["pixel_sha256"], size)
    return None


def _history(facts: Mapping[str, Any], data: bytes, pixels: Any, size: Size) -> History:
    """Return the history that a file has. Raises ValueError and others if it is not one."""
    origin, links = Origin(**facts["origin"]), facts["links"]
    texts = (origin.sha256, origin.pixel_sha256, pixels)
    if type(links) is not int or links < 1 or not all(type(text) is str for text in texts):
        raise ValueError("a history counts its edits from 1, and has digests")
    with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
        if (image.mode, image.size) != ("1", (size.width, size.height)):
            raise ValueError("the mask is of another picture")
        return History(origin, links, np.array(image, np.bool_), pixels)


def _png_of(touched: NDArray[np.bool_], text: PngImagePlugin.PngInfo | None = None) -> bytes:
    data = io.BytesIO()
    Image.fromarray(touched).save(data, "PNG", pnginfo=text)
    if data.tell() <= _MOST_BYTES:
        return data.getvalue()
    # Whole squares count as touched, which claims less than is true.
    height, width = touched.shape
    padded = np.pad(touched, ((0, -height % _SQUARE), (0, -width % _SQUARE)))
    rows, columns = (side // _SQUARE for side in padded.shape)
    squares = padded.reshape(rows, _SQUARE, columns, _SQUARE).any(axis=(1, 3))
    coarse = squares.repeat(_SQUARE, axis=0).repeat(_SQUARE, axis=1)[:height, :width]
    data = io.BytesIO()
    Image.fromarray(coarse).save(data, "PNG", pnginfo=text)
    return data.getvalue()
