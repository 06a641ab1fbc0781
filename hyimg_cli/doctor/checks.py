"""All checks in the order in which they run and are shown, the fastest first."""

from hyimg_cli.doctor import environment, folders, models, tools, trial
from hyimg_cli.doctor.check import Examine

CHECKS: tuple[tuple[str, Examine], ...] = (
    ("python", environment.python),
    ("packages", environment.packages),
    ("hub", environment.hub),
    ("checkpoint", models.image_checkpoint),
    ("checkpoint files", models.image_files),
    ("video checkpoint", models.video_checkpoint),
    ("output folder", folders.output_folder),
    ("cache folder", folders.cache_folder),
    ("temporary files", folders.temporary_files),
    ("video files", tools.film),
    ("processor", environment.processor),
    ("gpus", environment.gpus),
    ("memory", models.image_memory),
    ("video memory", models.video_memory),
    ("kernels", environment.kernels),
    ("trial", trial.trial),
    ("lpips", tools.lpips),
)
# Run only by name, because the chosen model's weights take long to load.
BY_NAME: dict[str, Examine] = {"determinism": trial.determinism}
# Starting a process takes seconds, and only runs on several processes need it.
RANKS: tuple[str, Examine] = ("ranks", tools.ranks)
