"""Join folders of runs into one: results and files stay unchanged, conflicts are errors.

For example, two clusters that share a manifest have one folder each.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from hyimg_cli.addresses import address_of, shown_place
from hyimg_cli.errors import OutputFolderError
from hyimg_cli.journal.bucket import run_folder
from hyimg_cli.journal.disk import disk_errors
from hyimg_cli.journal.edit_counts import EditCounts
from hyimg_cli.journal.journal import (
    MISSING,
    RESOLVED,
    RunFolder,
    files_of,
    files_of_edit,
    outputs_of,
)
from hyimg_cli.journal.past_run import PastJob, past_jobs, read_run_info
from hyimg_cli.journal.picks import SCORES, ScoresFile
from hyimg_cli.journal.resume import is_intact
from hyimg_cli.manifest.resolved import lines_moved
from hyimg_cli.settings.name_template import clashes
from hyimg_cli.spec import digest

Entry = Mapping[str, Any]


class Merged(NamedTuple):
    """Jobs of a joined folder.

    `missing`: jobs that no folder has done, including the `failed` ones. `damaged`: done jobs whose
    files are gone or changed; they are missing too. `edits`: those among the done jobs.
    """

    done: int
    failed: int
    missing: list[str]
    damaged: list[str]
    edits: EditCounts


def merge(folders: Sequence[Path], into: Path) -> Merged:
    """Join folders into one; results that it already has are kept.

    A done job replaces a failed one. Writes `manifest.resolved.jsonl` with all jobs, and a
    manifest of the missing ones. Raises OutputFolderError if two folders made one job in different
    ways, or if two jobs have the same file; then nothing is written.
    """
    with run_folder(into) as target:
        others = [folder for folder in folders if folder.resolve() != into.resolve()]
        sources = [_read(folder, into) for folder in (into, *others)]
        every = list(chain.from_iterable(source.values() for source in sources))
        # First jobs with a line, then results whose line is gone.
        names = dict.fromkeys(one.custom_id for one in sorted(every, key=lambda one: not one.line))
        chosen, damaged = dict[str, PastJob](), list[str]()
        for name in names:
            having = [source[name] for source in sources if name in source and source[name].result]
            done = [one for one in having if one.is_done]
            for other in done[1:]:
                if other.result.get("key") != done[0].result.get("key"):
                    raise OutputFolderError(
                        f'"{name}" was made with another line, source image, model or setting '
                        f"in {shown_place(done[0].folder)}",
                        where=other.folder,
                        hint="leave out one of the folders; run.json has the flags of each",
                        code="output.other-job",
                    )
            # Files at an address are read, too, so only files as they were written are copied.
            whole = (one for one in done if is_intact(RunFolder(one.folder), one.result))
            failed = [one for one in having if not one.is_done]
            intact = next(whole, None)
            if best := intact or next(reversed(failed), None):
                chosen[name] = best
            if done and not intact:
                damaged.append(name)
        results = {name: one.result for name, one in chosen.items()}
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
        lines = dict[str, Entry]()
        for one in every:
            if one.line and (one.custom_id not in lines or chosen.get(one.custom_id) is one):
                lines[one.custom_id] = one.line
        for one in chosen.values():
            for file, expected in _files(one.result) if one.folder != into else ():
                # Outputs were checked above. A video's sidecar and frames and an edit's redraw and
                # matte are left out if they are missing or changed.
                with disk_errors(one.folder), suppress(FileNotFoundError):
                    if expected is None or expected == digest.of_file(one.folder / file):
                        target.bring(file, one.folder / file)
        target.write_results(results.values())
        target.write_lines(RESOLVED, lines.values())
        info = next(filter(None, map(read_run_info, (into, *others))), {})
        target.write_run(info | {"merged": [folder.name for folder in folders]})
        drawn = {name for name, one in chosen.items() if one.is_done}
        missing = [name for name in names if name not in drawn]
        target.write_lines(MISSING, (lines[name] for name in missing if name in lines))
    _join_scores(others, into)
    edits, done_count = EditCounts(), len(drawn)
    for name in drawn:
        edits.count_edit(results[name].get("edit"))
    return Merged(done_count, len(results) - done_count, missing, damaged, edits)


def _read(folder: Path, into: Path) -> dict[str, PastJob]:
    """Return a folder's jobs by custom_id; paths in their lines are relative to `into`."""
    jobs = list(past_jobs(folder))
    lines = lines_moved((one.line for one in jobs), folder, into)
    moved = (
        replace(one, line=_with_links(line, one.line))
        for one, line in zip(jobs, lines, strict=True)
    )
    return {one.custom_id: one for one in moved}


def _with_links(line: Entry, former: Entry) -> Entry:
    """Return a moved line whose links are files of the joined folder, as they were of its own."""
    images, links = former.get("images", ()), former.get("links")
    if not isinstance(links, list) or len(links) != len(images):
        return line
    both = zip(line["images"], images, links, strict=True)
    return {**line, "images": [own if name else moved for moved, own, name in both]}


def _join_scores(folders: Iterable[Path], into: Path) -> None:
    """Copy the scores of candidates; `hyimg pick` makes new picks from them."""
    scored = [one for one in folders if not address_of(one) and (one / SCORES).is_file()]
    if scored and not address_of(into):
        with ScoresFile(into) as file:
            for folder in scored:
                file.join(ScoresFile(folder))


def _files(entry: Entry) -> Iterator[tuple[str, str | None]]:
    """Yield every file of a result, frames one by one, with the expected digest or None."""
    for output in outputs_of(entry):
        for name in files_of(output):
            count = output.get("num_frames", 0) if name == output.get("frames_path") else 0
            yield from [(f"{name}/{n:04}.png", None) for n in range(count)] or [(name, None)]
    yield from ((file["path"], file["sha256"]) for file in files_of_edit(entry).values())
