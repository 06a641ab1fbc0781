"""Every check, in the order in which it is told: what costs nothing first."""

from hyimg_cli.doctor.check import Examine
from hyimg_cli.doctor.determinism import determinism
from hyimg_cli.doctor.environment import gpus, hub, packages, processor, python
from hyimg_cli.doctor.folders import cache_folder, output_folder
from hyimg_cli.doctor.kernels import kernels
from hyimg_cli.doctor.models import (
    image_checkpoint,
    image_files,
    image_memory,
    video_checkpoint,
    video_memory,
)
from hyimg_cli.doctor.tools import film, lpips, ranks
from hyimg_cli.doctor.trial import trial

CHECKS: tuple[tuple[str, Examine], ...] = (
    ("python", python),
    ("packages", packages),
    ("hub", hub),
    ("checkpoint", image_checkpoint),
    ("checkpoint files", image_files),
    ("video checkpoint", video_checkpoint),
    ("output folder", output_folder),
    ("cache folder", cache_folder),
    ("video files", film),
    ("processor", processor),
    ("gpus", gpus),
    ("memory", image_memory),
    ("video memory", video_memory),
    ("kernels", kernels),
    ("trial", trial),
    ("lpips", lpips),
)
# Asked for by name: of the chosen model, whose weights take long to load.
BY_NAME: dict[str, Examine] = {"determinism": determinism}
# Starting a process takes seconds, and only runs over several need it.
RANKS: tuple[str, Examine] = ("ranks", ranks)
