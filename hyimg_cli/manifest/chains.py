"""Chains: lines whose source is the result of another line, written `images: ["@cat"]`.

A name after @ is the id of one result: of a line, or of one of several results of a line. Lines may
stand in any order; here they are put in the order in which they can be drawn.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

from hyimg_cli.errors import HyimgError
from hyimg_cli.manifest.line import ManifestLine, fault
from hyimg_cli.settings.paths import LINK, linked
from hyimg_cli.settings.values import nearest
from hyimg_cli.spec.job import VIDEO_TASKS, Job

# So many wrong names get a guess at what was meant: it takes a look at every id.
_MOST_GUESSES = 20


def in_order(
    lines: Sequence[ManifestLine],
    ids_of: Callable[[ManifestLine], Sequence[str]],
    faulty: Collection[str],
) -> tuple[Sequence[ManifestLine], list[HyimgError]]:
    """Return the lines, each after those whose results it edits; and faults of lines left out.

    `ids_of`: of a line's results. `faulty`: the ids of lines that were left out before.
    """
    named = {line.where: names for line in lines if (names := names_in(line))}
    if not named:
        return lines, []
    owners = {name: line for line in lines for name in ids_of(line)}
    faults: dict[str, HyimgError] = {}
    for where, names in named.items():
        guesses = owners if len(faults) < _MOST_GUESSES else {}
        if found := next(_faults(where, names, owners, faulty, guesses), None):
            faults[where] = found
    by_place = {line.where: line for line in lines if line.where not in faults}
    while True:
        # What a faulty line would have made is missing later: see `unbroken`.
        before = {
            where: [owners[name].where for name in named.get(where, ()) if name in owners]
            for where in by_place
        }
        try:
            order = [*TopologicalSorter(before).static_order()]
        except CycleError as error:
            where, *others = reversed(error.args[1])
            ids = [ids_of(by_place[one])[0] for one in (where, *others) if one in by_place]
            what = f"a result cannot be made from itself: {' → '.join(f'{LINK}{n}' for n in ids)}"
            for one in {where, *others}:
                faults[one] = fault("link", what, f"{one}: images", "name an earlier result")
                by_place.pop(one, None)
        else:
            return [by_place[where] for where in order if where in by_place], [*faults.values()]


def unbroken(jobs: list[Job]) -> tuple[list[Job], list[HyimgError]]:
    """Return the jobs whose links all lead to jobs; and a fault for each line of another one."""
    if not any(map(links_of, jobs)):
        return jobs, []
    kept, faults = {job.custom_id: job for job in jobs}, dict[str, HyimgError]()
    count = 0
    while count != len(kept):
        count = len(kept)
        for job in [*kept.values()]:
            if missing := next((name for name in links_of(job) if name not in kept), ""):
                what = f'"{missing}" has a fault, so it has no result to edit'
                where = f"{job.source_line}: images"
                faults[job.source_line] = fault("link", what, where, "mend that line")
                del kept[job.custom_id]
    return [*kept.values()], [*faults.values()]


def links_of(job: Job) -> list[str]:
    """Return the ids of the results that a job's images name."""
    return [name for path in job.images if (name := linked(path))]


def names_in(line: ManifestLine) -> list[str]:
    """Return the ids of the results that a line's images name."""
    if "images" not in line.names:
        return []
    return [name for path in line.fields["images"] if (name := linked(path))]


def _is_of(name: str, ids: Collection[str]) -> bool:
    """Return True if a result is of a line with one of these ids, perhaps one of several."""
    return name in ids or any(name.startswith(f"{one}-") for one in ids)


def _faults(
    where: str,
    names: Iterable[str],
    owners: Mapping[str, ManifestLine],
    faulty: Collection[str],
    guesses: Iterable[str],
) -> Iterator[HyimgError]:
    """Yield the faults of the results that a line names; `guesses`: what may be meant."""
    for name in names:
        owner, place = owners.get(name), f"{where}: images"
        if owner is None and not _is_of(name, faulty):
            several = [one for one in guesses if one.startswith(f"{name}-")]
            hint = f"write a path that begins with {LINK} as ./{LINK}{name}"
            if name in {owners[one].fields["custom_id"] for one in several}:
                hint = f"it makes several: name one, such as {LINK}{several[0]}"
            elif close := next(iter(several), None) or nearest(name, guesses):
                hint = f"did you mean {LINK}{close}? {hint}"
            yield fault("link", f'no result has the id "{name}"', place, hint)
        elif owner is not None and owner.fields["task"] in VIDEO_TASKS:
            what, hint = f'the result of "{name}" is a video', "name a picture"
            yield fault("link", what, place, hint)
