"""Camera paths: pose files and key strings, checked, as one pose per latent frame.

Poses are camera-to-world in OpenCV's axes (x right, y down, z forward). No torch: faults are found
before anything is loaded.
"""

# Legend: N poses, F latent frames
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from hyimg_cli.errors import JobError
from hyimg_cli.files import bytes_of
from hyimg_cli.spec.job import Size, VideoJob

Array: TypeAlias = np.ndarray
# The picture size to which intrinsics refer.
GIVEN = Size(480, 832)
# Intrinsics for a path of keys, which has none: a horizontal view of 80 degrees, centred.
KEY_INTRINSICS = (500.0, 500.0, 416.0, 240.0)
MOVE, TURN, STEEPEST = 0.05, 2.0, 85.0
_KEYS = "wasdijkl"
_FILE_BYTES = 100_000_000
_ROTATION_ERROR = 1e-2
_KEYS_HINT = (
    'write KEYS-FRAMES with commas, such as "w-10,iw-15,none-5" (keys w a s d i j k l), or name a '
    "poses.npy"
)


@dataclass(frozen=True)
class CameraPath:
    """Poses [N, 4, 4] of the used frames, and fx, fy, cx, cy for a picture of size `GIVEN`."""

    poses_N44: Array
    intrinsics: tuple[float, float, float, float]

    def at(self, frames: int) -> Array:
        """Return `frames` poses, spread over the whole path, relative to the one before: [F, 4, 4].

        The first is the identity; translations are divided by the longest of the whole path.
        """
        poses_F44 = interpolated(self.poses_N44, frames)
        made = np.tile(np.eye(4), (frames, 1, 1))
        # NOTE: uses the transposed rotation, not a matrix inverse, whose rounding would be a
        # motion.
        back_F33 = poses_F44[:-1, :3, :3].transpose(0, 2, 1)
        made[1:, :3, :3] = back_F33 @ poses_F44[1:, :3, :3]
        steps_F31 = (poses_F44[1:, :3, 3] - poses_F44[:-1, :3, 3])[:, :, None]
        made[1:, :3, 3] = (back_F33 @ steps_F31)[:, :, 0]
        # A camera that only turns has no longest translation.
        longest = np.linalg.norm(made[:, :3, 3], axis=1).max()
        if longest > 0:
            made[:, :3, 3] /= longest
        return made

    def intrinsics_of(self, size: Size) -> tuple[float, float, float, float]:
        """Return the intrinsics for a picture of `size`."""
        across, down = size.width / GIVEN.width, size.height / GIVEN.height
        fx, fy, cx, cy = self.intrinsics
        return fx * across, fy * down, cx * across, cy * down


def camera_path(job: VideoJob) -> CameraPath:
    """Return the job's path for its frames; after the last key the camera stays.

    Raises JobError, with `camera` in `where`.
    """
    if not job.camera_files:
        frames = sum(held for _, held in segments(job.camera))
        if frames > job.num_frames:
            what = f"the camera path is too long ({frames} frames, the video has {job.num_frames})"
            raise _fault(what, "shorten the path, or raise num_frames")
        poses = key_poses(job.camera)
        still = np.repeat(poses[-1:], max(0, job.num_frames - len(poses)), axis=0)
        return CameraPath(np.concatenate([poses, still])[: job.num_frames], KEY_INTRINSICS)
    poses_file, intrinsics_file = job.camera_files
    poses, given = _read(poses_file), np.atleast_2d(_read(intrinsics_file))
    if poses.ndim != 3 or poses.shape[1:] != (4, 4) or not len(poses):
        hint = "give one camera-to-world matrix per frame, in OpenCV's axes"
        raise _fault(f"the shape of {poses_file} is {list(poses.shape)}; expected [N, 4, 4]", hint)
    if not np.isfinite(poses).all():
        row = int(np.argmin(np.isfinite(poses).all(axis=(1, 2))))
        raise _fault(f"{poses_file}: pose {row} is not finite", "give finite numbers")
    turns = poses[:, :3, :3]
    error = np.abs(turns @ turns.transpose(0, 2, 1) - np.eye(3)).max(axis=(1, 2))
    error = np.maximum(error, np.abs(poses[:, 3] - (0, 0, 0, 1)).max(axis=1))
    wrong = (error > _ROTATION_ERROR) | (np.linalg.det(turns) < 0)
    if wrong.any():
        what = f"{poses_file}: pose {int(np.argmax(wrong))} is not a rotation and translation"
        raise _fault(what, "give camera-to-world matrices whose last row is 0, 0, 0, 1")
    if len(poses) < job.num_frames:
        what = f"{poses_file} has too few poses ({len(poses)} for {job.num_frames} frames)"
        raise _fault(what, f"set num_frames to {len(poses)} or less, or give a pose for each frame")
    if given.ndim != 2 or given.shape[1] != 4 or not len(given):
        what = f"the shape of {intrinsics_file} is {list(given.shape)}; expected [N, 4]"
        raise _fault(what, "give fx, fy, cx, cy in each row")
    fx, fy, cx, cy = (float(value) for value in given[0])
    if not np.isfinite(given[0]).all() or min(fx, fy) <= 0:
        what = f"the first row of {intrinsics_file} is invalid ({fx:g}, {fy:g}, {cx:g}, {cy:g})"
        raise _fault(what, "give finite fx, fy, cx, cy for 832x480, with fx and fy above 0")
    return CameraPath(poses[: job.num_frames], (fx, fy, cx, cy))


def key_poses(text: str) -> Array:
    """Return the poses [N, 4, 4] of a key string, one more than its frames.

    The first is the identity. w s: forward, back; d a: right, left; i k: up, down; l j: turn right,
    left. Raises JobError for an invalid text.
    """
    from scipy.spatial.transform import Rotation  # takes 0.3 s

    def turned(axis: str, degrees: float) -> Array:
        matrix: Array = Rotation.from_euler(axis, degrees, degrees=True).as_matrix()
        return matrix

    poses, pitch = [np.eye(4)], 0.0
    for keys, frames in segments(text):
        right = TURN * (("l" in keys) - ("j" in keys))
        for _ in range(frames):
            up = TURN * (("i" in keys) - ("k" in keys))
            if not -STEEPEST <= pitch + up <= STEEPEST:
                up = 0.0
            pitch += up
            # The turn comes before the step.
            moved = poses[-1].copy()
            moved[:3, :3] = turned("y", right) @ moved[:3, :3] @ turned("x", up)
            for axis, keys_of in ((2, "ws"), (0, "da")):
                way = moved[:3, axis] * (1.0, 0.0, 1.0)
                way = way / (np.linalg.norm(way) + 1e-6)
                moved[:3, 3] += MOVE * ((keys_of[0] in keys) - (keys_of[1] in keys)) * way
            poses.append(moved)
    return np.stack(poses)


def segments(text: str) -> list[tuple[frozenset[str], int]]:
    """Parse keys held down and their numbers of frames. Raises JobError."""
    found = []
    for part in text.replace("，", ",").lower().split(","):
        keys, dash, frames = "".join(part.split()).partition("-")
        known = keys == "none" or set(keys) <= set(_KEYS)
        if not (dash and known and re.fullmatch(r"[0-9]{1,6}", frames, re.ASCII) and int(frames)):
            raise _fault(f"{part.strip()!r} is not KEYS-FRAMES", _KEYS_HINT)
        found.append((frozenset() if keys == "none" else frozenset(keys), int(frames)))
    return found


def interpolated(poses_N44: Array, frames: int) -> Array:
    """Interpolate `frames` poses evenly from the first to the last, [F, 4, 4].

    Translations on straight lines, rotations on the shortest path.
    """
    from scipy.spatial.transform import Rotation, Slerp  # takes 0.3 s

    # Interpolation needs two ends, even for a single pose.
    poses = np.asarray(poses_N44 if len(poses_N44) > 1 else [*poses_N44] * 2, np.float64)
    known, places = np.arange(len(poses)), np.linspace(0, len(poses_N44) - 1, frames)
    made = np.tile(np.eye(4), (frames, 1, 1))
    for axis in range(3):
        made[:, axis, 3] = np.interp(places, known, poses[:, axis, 3])
    turns = Slerp(known, Rotation.from_matrix(poses[:, :3, :3]))(places)
    made[:, :3, :3] = turns.as_matrix()
    return made


def _read(path: str) -> Array:
    """Return the numbers of an npy file as doubles. Raises JobError."""
    try:
        data = bytes_of(Path(path), _FILE_BYTES)
        values = np.load(io.BytesIO(data), allow_pickle=False)
    except FileNotFoundError:
        what, hint = f"file not found: {path}", "give poses.npy and intrinsics.npy in one folder"
        raise _fault(what, f"{hint}; paths in a manifest are relative to it") from None
    except (OSError, ValueError, EOFError) as error:
        raise _fault(f"{path} cannot be read: {error}", "save it with numpy.save") from None
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "fiu":
        raise _fault(f"{path} does not contain numbers", "save it with numpy.save")
    return values.astype(np.float64)


def _fault(what: str, hint: str) -> JobError:
    return JobError(what, where="camera", hint=hint, code="job.camera")
