"""Memory of an edit of a large photograph, from file to file."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from journal.test_job_pictures import job
from PIL import Image
from simulated_edits import photograph

from hyimg_cli.journal.job_pictures import Drawing, finish, keep_redraws
from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.media import icc
from hyimg_cli.settings.run import OutputConfig
from hyimg_cli.spec.options import KeepOutside, Region

CROP = (3000, 2000, 3096, 2064)


def peak_mb(source: Path, region: str) -> int:
    """Finish a blue disc in a crop, in this process; return the most memory that it has taken."""
    y, x = np.mgrid[:64, :96]
    shown = (128 + 60 * np.sin(x / 7)[..., None] * np.cos(y / 9)[..., None] * np.ones(3)).astype(
        np.uint8
    )
    drawn = shown.copy()
    drawn[np.hypot(y - 30, x - 45) < 14] = (40, 60, 210)
    one = job(source, KeepOutside(region=Region(region)), crops=(CROP,))
    with RunFolder(source.parent / "out") as run:
        edit = keep_redraws(run, one, [Drawing(drawn, shown)], None)
        finish(
            run,
            one,
            [Drawing(drawn, shown)],
            edit,
            OutputConfig(source.parent / "out", metadata=False),
        )
    assert (edit["kind"], edit["outside_differing_pixels"]) == ("local", 0)
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) // 1000


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["rgb", "p3", "alpha", "turned"])
def test_100_megapixels_take_less_than_2_gb(tmp_path: Path, kind: str) -> None:
    """As a photograph; of wide colours, with alpha, and on its side, which need more copies."""
    pixels = np.tile(photograph("coffee.png"), (22, 20, 1))[:8660, :11547]
    image, source, how = Image.fromarray(pixels), tmp_path / "in.jpg", {}
    if kind == "alpha":
        image.putalpha(Image.linear_gradient("L").resize(image.size))
        source, how = tmp_path / "in.png", {"compress_level": 1}
    elif kind == "turned":
        exif = Image.Exif()
        exif[0x112] = 6
        how = {"exif": exif}
    elif kind == "p3":
        primaries = icc.Primaries((0.680, 0.320), (0.265, 0.690), (0.150, 0.060))
        how = {"icc_profile": icc.rgb_profile("P3", primaries, icc.srgb_curve)}
    image.save(source, **how)
    del pixels, image
    with ProcessPoolExecutor(1, get_context("spawn")) as alone:
        assert alone.submit(peak_mb, source, "3010,2005,3080,2055").result() < 2000
