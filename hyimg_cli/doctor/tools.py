"""Check a run's other tools by using each once: video encoder, LPIPS, a second process."""

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hyimg_cli.doctor.check import Check
from hyimg_cli.errors import HyimgError, require
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.spec.units import time_text

if TYPE_CHECKING:
    from hyimg_cli.parallel.ranks import Rank

_FRAMES, _SIDE = 3, 32


def film(config: RunConfig) -> Check:
    """Encode a few frames with H.264 and read them back."""
    require("diffusers", "av")
    import av

    from hyimg_cli.media.frames import read_frames
    from hyimg_cli.media.video import write_video

    ramp = np.arange(_SIDE, dtype=np.uint8) * 8
    frames = np.broadcast_to(ramp[None, None, :, None], (_FRAMES, _SIDE, _SIDE, 3))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "film.mp4"
        write_video(path, [np.ascontiguousarray(frames)], fps=8)
        count = sum(1 for _ in read_frames(path))
    found = f"av {av.__version__}: {count} of {_FRAMES} frames written by libx264 and read back"
    if count != _FRAMES:
        return Check("failed", found, "reinstall av")
    return Check("ok", found)


def lpips(config: RunConfig) -> Check:
    """Check that the AlexNet backbone of LPIPS is installed and gives the stored numbers."""
    from hyimg_cli.quality.lpips import TELLING, Lpips

    try:
        metric = Lpips.load("alex")
        pairs = metric.self_test(TELLING)
    except HyimgError as error:  # only `eval` and `bench` need it, not a run
        return Check("warning", error.what, error.hint)
    wrong = [pair for pair in pairs if not pair.agrees]
    if wrong:
        said = ", ".join(f"{p.name} is {p.found:.5f}, stored {p.stored:.5f}" for p in wrong)
        hint = "reinstall lpips and its weights; docs/measuring.md has the command"
        return Check("warning", f"{metric.title}: {said}", hint)
    return Check("ok", f"{metric.title}: {len(pairs)} pairs give the stored numbers")


def ranks(config: RunConfig) -> Check:
    """Start a second process and add a number over both."""
    from hyimg_cli.parallel.ranks import RankPool

    began = time.perf_counter()
    with RankPool(2, timeout_s=60) as pool:
        sums = pool.run(sum_over_ranks)
    found = f"2 ranks over gloo added up to {sums} in {time_text(time.perf_counter() - began)}"
    if sums != [3.0, 3.0]:
        return Check(
            "failed", found, "remove --vae-patch-parallel-size and other flags that start processes"
        )
    return Check("ok", found)


def sum_over_ranks(rank: "Rank") -> float:
    """Add 1 from rank 0, 2 from rank 1, …; the processes import this function by its name."""
    import torch

    value = torch.tensor([rank.number + 1.0])
    torch.distributed.all_reduce(value)
    return float(value[0])
