"""Join folders of runs into one: results and files stay unchanged, conflicts are errors.

For example, two clusters that share a manifest have one folder each.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from hyimg_cli.addresses import address_of, shown_place
from hyimg_cli.errors import OutputFolderError
from hyimg_cli.journal.bucket import run_folder
from hyimg_cli.journal.disk import disk_errors
from hyimg_cli.journal.journal import (
    MISSING,
    RESOLVED,
    RunFolder,
    files_of,
    files_of_edit,
    outputs_of,
)
from hyimg_cli.journal.past_run import read_run_info, resolved_jobs
from hyimg_cli.journal.picks import SCORES, ScoresFile
from hyimg_cli.journal.resume import is_intact
from hyimg_cli.manifest.resolved import lines_moved
from hyimg_cli.settings.file_names import clashes
from hyimg_cli.spec import digest

Entry = Mapping[str, Any]


class Merged(NamedTuple):
    """Jobs of a joined folder.

    `missing`: jobs that no folder has done, including the `failed` ones. `damaged`: done jobs whose
    files are gone or changed; they are missing too.
    """

    done: int
    failed: int
    missing: list[str]
    damaged: list[str]


class _Source(NamedTuple):
    """A folder to join, with its results and its resolved jobs by custom_id."""

    folder: Path
    results: Mapping[str, Entry]
    jobs: Mapping[str, Entry]


def merge(folders: Sequence[Path], into: Path) -> Merged:
    """Join folders into one; results that it already has are kept.

    A done job replaces a failed one. Writes `manifest.resolved.jsonl` with all jobs, and a
    manifest of the missing ones. Raises OutputFolderError if two folders made one job in different
    ways, or if two jobs have the same file; then nothing is written.
    """
    with run_folder(into) as target:
        others = [folder for folder in folders if folder.resolve() != into.resolve()]
        sources = [_read(folder, into) for folder in (into, *others)]
        names = dict.fromkeys(chain(*(s.jobs for s in sources), *(s.results for s in sources)))
        chosen, damaged = dict[str, _Source](), list[str]()
        for name in names:
            having = [source for source in sources if name in source.results]
            done = [source for source in having if _is_done(source.results[name])]
            for other in done[1:]:
                if other.results[name].get("key") != done[0].results[name].get("key"):
                    raise OutputFolderError(
                        f'"{name}" was made with another line, source image, model or setting '
                        f"in {shown_place(done[0].folder)}",
                        where=other.folder,
                        hint="leave out one of the folders; run.json has the flags of each",
                        code="output.other-job",
                    )
            # Files at an address are read, too, so only files as they were written are copied.
            whole = (one for one in done if is_intact(RunFolder(one.folder), one.results[name]))
            failed = [one for one in having if one not in done]
            intact = next(whole, None)
            if best := intact or next(reversed(failed), None):
                chosen[name] = best
            if done and not intact:
                damaged.append(name)
        results = {name: source.results[name] for name, source in chosen.items()}
        files = [(one["path"], name) for name, line in results.items() for one in outputs_of(line)]
        for later, earlier in clashes([path for path, _ in files]):
            path, name = files[later]
            raise OutputFolderError(
                f'{path} would be the file of both "{name}" and "{files[earlier][1]}"',
                where=chosen[name].folder,
                hint="merge folders of one manifest, or of manifests with different ids and names",
                code="output.other-file",
            )
        # Take a job's line from the folder of its outcome: other folders may have another line.
        jobs = dict[str, Entry]()
        for source in sources:
            for name, line in source.jobs.items():
                if name not in jobs or chosen.get(name) is source:
                    jobs[name] = line
        for name, source in chosen.items():
            for file, expected in _files(results[name]) if source.folder != into else ():
                # Outputs were checked above. A video's sidecar and frames and an edit's redraw and
                # matte are left out if they are missing or changed.
                with disk_errors(source.folder), suppress(FileNotFoundError):
                    if expected is None or expected == digest.of_file(source.folder / file):
                        target.bring(file, source.folder / file)
        target.write_results(results.values())
        target.write_lines(RESOLVED, jobs.values())
        info = next(filter(None, (read_run_info(source.folder) for source in sources)), {})
        target.write_run(info | {"merged": [folder.name for folder in folders]})
        missing = [name for name in names if not _is_done(results.get(name, {}))]
        target.write_lines(MISSING, (jobs[name] for name in missing if name in jobs))
    _join_scores([source.folder for source in sources if source.folder != into], into)
    done_count = sum(map(_is_done, results.values()))
    return Merged(done_count, len(results) - done_count, missing, damaged)


def _read(folder: Path, into: Path) -> _Source:
    """Return a folder's results and jobs; paths in the jobs are relative to `into`."""
    jobs = dict(resolved_jobs(folder))
    moved = dict(zip(jobs, lines_moved(jobs.values(), folder, into), strict=True))
    return _Source(folder, run_folder(folder).results(), moved)


def _join_scores(folders: Iterable[Path], into: Path) -> None:
    """Copy the scores of candidates; `hyimg pick` makes new picks from them."""
    scored = [one for one in folders if not address_of(one) and (one / SCORES).is_file()]
    if scored and not address_of(into):
        with ScoresFile(into) as file:
            for folder in scored:
                file.join(ScoresFile(folder))


def _is_done(entry: Entry) -> bool:
    return bool(entry.get("status") == "done")


def _files(entry: Entry) -> Iterator[tuple[str, str | None]]:
    """Yield every file of a result, frames one by one, with the expected digest or None."""
    for output in outputs_of(entry):
        for name in files_of(output):
            count = output.get("num_frames", 0) if name == output.get("frames_path") else 0
            yield from [(f"{name}/{n:04}.png", None) for n in range(count)] or [(name, None)]
    yield from ((file["path"], file["sha256"]) for file in files_of_edit(entry).values())
