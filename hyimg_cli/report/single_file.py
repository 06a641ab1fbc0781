"""A run's page as one file with its pictures inside, up to a size limit."""

import base64
import mimetypes
from collections.abc import Collection
from pathlib import Path

from hyimg_cli.errors import HyimgError
from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.report.page import render
from hyimg_cli.report.picks import shown_picks
from hyimg_cli.report.records import Pictures, Record
from hyimg_cli.report.run_page import ResolvedJobs, call, endings_of
from hyimg_cli.report.thumbnails import SHOWABLE, as_jpeg, is_video, small

# Maximum side of an embedded picture, and maximum bytes of a file embedded unchanged.
_SIDE, _QUALITY = 640, 80
_PICTURE_BYTES, _VIDEO_BYTES = 60_000, 4_000_000
MOST_MB = 24


def single_file(
    folder: Path, *, most_mb: float = MOST_MB, only: Collection[str] | None = None
) -> str:
    """Return the page with all jobs, and with pictures in the manifest's order up to `most_mb`.

    `most_mb` is in units of 10^6 bytes. `only`: ids of the jobs to show instead of all. Raises as
    `RunPage` does.
    """
    jobs = ResolvedJobs(folder, only)
    found = RunFolder(folder).results()
    shown = (found[name] for name in found if only is None or name in only)
    results = sorted(shown, key=jobs.place_of)
    pictures = EmbeddedPictures(folder, jobs.shared, int(most_mb * 1e6))
    records = [jobs.record_of(result, pictures) for result in results]
    facts = jobs.index(endings_of(results)) | {"running": False, "files": []}
    facts["capped"] = (
        (
            f"{pictures.left_out} pictures were left out, because this file holds at most "
            f"{most_mb:g} MB of pictures; the run's own report.html shows all."
        )
        if pictures.left_out
        else "Large pictures are scaled down in this file."
        if pictures.is_scaled
        else ""
    )
    uris = {key: uri for uri, key in pictures.keys.items()}
    inline = call("index", facts) + call("pictures", uris) + call("picks", shown_picks(folder))
    inline += call("inside", records)
    about = {name: facts[name] for name in ("command", "title")}
    return render("report.html", inline=inline, **about)


class EmbeddedPictures(Pictures):
    """Pictures as data URIs, stored once each; links are their `keys`."""

    def __init__(self, folder: Path, shared: Path | None, left_bytes: int) -> None:
        super().__init__(folder, shared)
        self._left_bytes = left_bytes
        self._known: dict[str, Record] = {}
        self.keys: dict[str, str] = {}
        self.left_out, self.is_scaled = 0, False

    def show(self, path: str, key: str = "") -> Record:
        if path not in self._known:
            self._known[path] = self._embedded(path)
        return self._known[path]

    def _embedded(self, path: str) -> Record:
        """Return a file or a smaller copy; a video's first frame, with the video if it is small."""
        file, whole, copy = self._folder / path, "", ""
        try:
            kind = mimetypes.guess_type(file.name, strict=False)[0]
            is_shown = file.suffix.lower() in (*SHOWABLE, ".mp4")
            most = _VIDEO_BYTES if is_video(path) else _PICTURE_BYTES
            if kind and is_shown and file.stat().st_size <= most:
                whole = _uri(kind, file.read_bytes())
            if is_video(path) or not whole:
                copy = _uri("image/jpeg", as_jpeg(small(file, _SIDE), _QUALITY))
        except (HyimgError, OSError, ValueError) as error:
            return {"gone": getattr(error, "what", "file not found")}
        if len(whole) + len(copy) > self._left_bytes:
            self.left_out += 1
            return {"gone": "left out of this file"}
        self._left_bytes -= len(whole) + len(copy)
        self.is_scaled |= not whole
        link, thumb = (
            self.keys.setdefault(uri, f"p{len(self.keys)}") if uri else ""
            for uri in (whole or copy, copy)
        )
        found = {"link": link} | ({"thumb": thumb} if thumb else {})
        return found | ({"is_video": True} if whole and is_video(path) else {})


def _uri(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
