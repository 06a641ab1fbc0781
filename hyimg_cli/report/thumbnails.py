"""Links from a run's page to its pictures, and their thumbnails, made once each.

    OUT/report/thumbs/   <sha256 of a result>.jpg   <digest of a source's path>.jpg

A picture that is not larger than a thumbnail is shown unchanged.
"""

import io
import math
import os
import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from PIL import Image

from hyimg_cli.errors import HyimgError
from hyimg_cli.files import refuse_links, replace_file
from hyimg_cli.media.frames import VIDEO_SUFFIXES, read_frames
from hyimg_cli.media.images import probe_image, read_small
from hyimg_cli.report.records import Pictures, Record
from hyimg_cli.spec import digest

SIDE = 320
THUMBS = "report/thumbs"
# Formats that every browser shows.
SHOWABLE = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".avif", ".bmp")
_QUALITY = 82


class LinkedPictures(Pictures):
    """Pictures in files that the page links.

    `waiting` counts pictures whose thumbnail was postponed; until then, the page shows the file.
    """

    waiting = 0
    _until = math.inf

    def limit(self, seconds: float) -> None:
        """Allow new thumbnails until this thread has used that much more processor time."""
        self._until, self.waiting = time.thread_time() + seconds, 0

    def link(self, path: str) -> str:
        if not os.path.isfile(self._folder / path):
            return ""
        return Path(path).as_uri() if Path(path).is_absolute() else quote(os.fsencode(path))

    def show(self, path: str, key: str = "") -> Record:
        """Return a file's link and thumbnail; a missing file keeps its old thumbnail, if any."""
        if not key.isalnum():
            key = digest.of_bytes(path.encode("utf-8", "surrogatepass"))
        file, thumb = self._folder / path, f"{THUMBS}/{key[:24]}.jpg"
        kept = self._folder / thumb
        found: Record = {"is_video": True} if is_video(path) else {}
        try:
            changed_ns = file.stat().st_mtime_ns
        except (OSError, ValueError):
            found |= {"gone": "file not found"}
            return found | ({"thumb": thumb} if kept.is_file() else {})
        found["link"] = self.link(path)
        with suppress(OSError):
            # Use an existing thumbnail if it is complete and has the file's modification time.
            status = kept.stat()
            if status.st_size > 0 and status.st_mtime_ns == changed_ns:
                return found | {"thumb": thumb}
        try:
            if not is_video(path):
                size, _ = probe_image(file, decode=False)
                if max(size.width, size.height) <= SIDE and file.suffix.lower() in SHOWABLE:
                    return found
            if time.thread_time() >= self._until:
                self.waiting += 1
                return found
            image = small(file, SIDE)
        except HyimgError as error:
            return found | {"gone": error.what}
        refuse_links(kept.parent, self._folder)
        kept.parent.mkdir(exist_ok=True)
        replace_file(kept, as_jpeg(image, _QUALITY), is_lasting=False)
        os.utime(kept, ns=(changed_ns, changed_ns))
        return found | {"thumb": thumb}


def small(file: Path, side: int) -> Image.Image:
    """Return a picture or a video's first frame, `side` pixels at most. Raises HyimgError."""
    if not is_video(file.name):
        return read_small(file, side)
    frame = next(read_frames(file), None)
    if frame is None:
        raise HyimgError("it has no frames")
    image = Image.fromarray(frame)
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    return image


def as_jpeg(image: Image.Image, quality: int) -> bytes:
    """Return the bytes of a JPEG file."""
    data = io.BytesIO()
    image.save(data, format="JPEG", quality=quality)
    return data.getvalue()


def is_video(path: str) -> bool:
    return Path(path).suffix.lower() in VIDEO_SUFFIXES
