"""A job's pixels as a file in its folder, with what it says about itself."""

from hyimg_cli.journal.journal import JobFolder
from hyimg_cli.manifest.resolved import public_line
from hyimg_cli.media import images
from hyimg_cli.media.metadata import PictureFacts, picture_text
from hyimg_cli.spec.events import OutputFile
from hyimg_cli.spec.job import ImageJob, Size


def write_picture(
    folder: JobFolder, job: ImageJob, pixels: images.Pixels, facts: PictureFacts | None
) -> OutputFile:
    """Writes the job's picture in its format under its name; without `facts` it says nothing.

    The file is on disk when this returns. Raises StorageError.
    """
    size, pixel_sha256 = Size(*pixels.shape[:2]), images.pixel_digest(pixels)
    text = None
    if facts is not None:
        text = picture_text(job, public_line(job), facts, size, pixel_sha256)
    path = folder.place_for(job, job.encoding.suffix)
    sha256 = images.write_picture(path, pixels, job.encoding, text)
    relative = path.relative_to(folder.folder).as_posix()
    return OutputFile(relative, sha256, pixel_sha256, size.width, size.height, job.seed)
