"""Every error that a user, a file or a machine can cause.

    HyimgError                    exit 1     a job or the run could not be done
    ├── UsageError                exit 2     a flag or an argument is wrong; nothing ran
    │   ├── ManifestError         exit 2     faults in a manifest, all of them at once
    │   ├── RecipeError           exit 2     a fault in a recipe file
    │   └── OutputFolderError     exit 2     the output folder belongs to other jobs or another run
    ├── MachineError              exit 3     this machine cannot run it; nothing ran
    │   ├── CheckpointError       exit 3     a checkpoint is missing, incomplete or of another shape
    │   └── StorageError          exit 3     the disk is full or a folder cannot be written
    │       └── JournalError      exit 3     results.jsonl was removed or changed by others
    ├── JobError                  exit 1     one job failed; the run goes on
    │   ├── SourceImageError      exit 1     a source image cannot be read
    │   ├── ReuseError            exit 1     KV reuse was required and did not happen
    │   ├── OutputError           exit 1     the result is not a picture (not finite, constant)
    │   ├── RankError             exit 1     a rank that worked on the job died or failed
    │   └── ReplicaError          exit 1     two replicas died while they worked on the job
    ├── ConsecutiveErrors         exit 1     so many jobs failed in a row that the run ended
    ├── RunHalted                 exit 1     so many of the run's jobs failed that it ended
    └── Interrupted               exit 130   stopped by a signal; resumable
        └── TimeIsUp              exit 143   stopped at its time limit; resumable

Each says what was wrong, where, and what to do. `cli/app.py` alone turns them into exit codes.
"""

import json
import shlex
import signal
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

from hyimg_cli.addresses import shown_place


class HyimgError(Exception):
    """An error: what is wrong (`what`), the place (`where`), what to do (`hint`, may be empty).

    `code` is a stable dotted name such as `manifest.duplicate-id`; `retryable`: the same call may
    succeed later without a change by the user.
    """

    exit_code = 1
    default_code = "error"
    default_hint = ""

    def __init__(
        self,
        what: str,
        *,
        where: Path | str = "",
        hint: str = "",
        code: str = "",
        retryable: bool = False,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.where = where if isinstance(where, str) else shown_place(where)
        self.hint = hint or self.default_hint
        self.code = code or self.default_code
        self.retryable = retryable

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        hint = f" ({self.hint})" if self.hint else ""
        return f"{place}{self.what}{hint}"


class UsageError(HyimgError):
    """A flag or an argument is wrong; nothing ran."""

    exit_code = 2
    default_code = "usage"


class ManifestError(UsageError):
    """All faults of a manifest, one `HyimgError` each in `faults`."""

    default_code = "manifest"

    def __init__(self, faults: Sequence[HyimgError], *, where: str = "") -> None:
        count = f"{len(faults):,} fault{'s' if len(faults) != 1 else ''}"
        super().__init__(f"{count} in the manifest", where=where)
        self.faults = tuple(faults)


class RecipeError(UsageError):
    """A fault in a recipe file."""

    default_code = "recipe"


class OutputFolderError(UsageError):
    """The output folder is in use, or holds the same ids with other contents."""

    default_code = "output"


class MachineError(HyimgError):
    """This machine cannot run it; nothing ran."""

    exit_code = 3
    default_code = "machine"


class CheckpointError(MachineError):
    """A checkpoint is missing, incomplete, or does not match its configuration."""

    default_code = "checkpoint"
    default_hint = "correct the file, or download the checkpoint again"


class StorageError(MachineError):
    """The disk is full, or a folder cannot be written."""

    default_code = "storage"


class JournalError(StorageError):
    """Another program removed or changed `results.jsonl` during a run; the run is resumable."""

    default_code = "storage.journal"


class JobError(HyimgError):
    """One job failed; the run goes on."""

    default_code = "job"


class SourceImageError(JobError):
    """A source image is missing, is not an image, or is too large to open."""

    default_code = "source"


class ReuseError(JobError):
    """`--require-kv-reuse` was set and a job would not reach `hit`."""

    default_code = "reuse"


class OutputError(JobError):
    """The result is not a picture: values are not finite, or every pixel is the same."""

    default_code = "output-image"


class RankError(JobError):
    """A process that worked on the job died, failed, or did not answer."""

    default_code = "rank"


class ReplicaError(JobError):
    """Two replicas died, one after the other, while they worked on the job."""

    default_code = "replica"


class ConsecutiveErrors(HyimgError):
    """So many jobs failed in a row, by what they share, that the run ended; resumable."""

    default_code = "run.consecutive-errors"


class RunHalted(HyimgError):
    """So many of the run's jobs failed that it ended, as `--halt` asks; resumable."""

    default_code = "run.halted"


class Interrupted(HyimgError):
    """Stopped by SIGINT (130) or SIGTERM (143); the same command resumes."""

    exit_code = 130
    default_code = "interrupted"

    def __init__(self, signal_number: int) -> None:
        super().__init__("interrupted", hint="run the same command again to resume")
        self.exit_code = 128 + signal_number


class TimeIsUp(Interrupted):
    """The run's time limit was reached, and it stopped as after SIGTERM; resumable."""

    exit_code = 143
    default_code = "run.time-limit"

    def __init__(self, limit: str) -> None:
        super().__init__(signal.SIGTERM)
        self.what, self.code = f"the time limit of {limit} was reached", self.default_code


def required(message: str) -> str:
    """Return what a message of pydantic asks for: "a valid integer"."""
    begun = message.removeprefix("Input should be ").removeprefix("Value error, expected ")
    return begun.partition(", unable to parse")[0]


def require(*packages: str, extra: str = "") -> None:
    """Raise MachineError unless all of these packages are installed; `extra` brings them.

    For packages that most commands do not need.
    """
    if missing := [name for name in packages if find_spec(name) is None]:
        what = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed"
        raise MachineError(what, hint=installation(extra), code="machine.no-package")


def installation(extra: str = "") -> str:
    """Return the command that installs hyimg with an extra, from where this copy came from.

    A folder or a file that pip recorded, else a package index.
    """
    from importlib.metadata import distributions

    source = "hyimg-cli"
    for found in distributions(name=source):
        url = str(json.loads(found.read_text("direct_url.json") or "{}").get("url", ""))
        if url.startswith("file://"):
            source = unquote(urlsplit(url).path)
    wanted = f"{source}[{extra}]" if extra else source
    return f"pip install {shlex.quote(wanted)}"


def installed_version(package: str) -> str | None:
    """Return a package's version, or None if it is not installed."""
    # Most commands start without this import.
    from importlib.metadata import distributions

    return next((found.version for found in distributions(name=package)), None)
