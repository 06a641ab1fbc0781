"""Put saved redraws back on their sources with other settings, without loading a model."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
from PIL import Image
from pydantic import TypeAdapter

from hyimg_cli.errors import MachineError
from hyimg_cli.journal.edit_facts import edit_notes, edit_warnings
from hyimg_cli.journal.job_pictures import LATENTS_ARE_KEPT, Drawing, finish
from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.journal.keys import finishing_key
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.spec.events import Failure, Outcome
from hyimg_cli.spec.job import DRAWN_FILES, ImageJob

_OUTCOME = TypeAdapter(Outcome)


def recomposite(
    folder: RunFolder, jobs: Sequence[ImageJob], config: RunConfig
) -> Iterator[Outcome]:
    """Finish each job from its saved redraw; yield its outcome after recording its line.

    A job's fault is reported in its outcome.
    """
    results = folder.results()
    for job in jobs:
        entry = results[job.custom_id]
        old = entry["edit"]
        kept = {name: old[name] for name in chain(*DRAWN_FILES) if name in old}
        sha256 = {name: old["sha256"][name] for name in kept if name in old["sha256"]}
        edit = kept | {"kind": "unfinished", "sha256": sha256}
        extra = {name: value for name, value in entry.items() if name.startswith("x_")}
        # Warnings and notes about the earlier finishing do not apply to this one.
        former = {*edit_warnings(old if "gates" in old else None), *edit_notes(old)}
        former.add(LATENTS_ARE_KEPT)
        said = tuple(text for text in entry.get("warnings", ()) if text not in former)
        read = tuple(note for note in entry.get("notes", ()) if note not in former)
        # The higher attempt makes this line later than one in another journal.
        anew = {"attempt": entry["attempt"] + 1, "outputs": (), "error": None, "extra": extra}
        anew |= {"warnings": said, "finishing_key": finishing_key(job, config.output)}
        outcome = replace(_OUTCOME.validate_python({**entry, **anew}), edit=edit)
        try:
            drawings = [
                Drawing(*(_pixels(folder, edit[name]) for name in names))
                for names, _ in zip(DRAWN_FILES, job.parts, strict=False)
            ]
            file = finish(folder, job, drawings, edit, config.output)
        except MachineError:
            raise
        except Exception as error:
            outcome = replace(outcome, status="failed", error=Failure.of(error))
        else:
            warnings = (*said, *edit_warnings(edit))
            notes = (*read, *edit_notes(edit))
            outcome = replace(
                outcome, status="done", outputs=(file,), warnings=warnings, notes=notes
            )
        folder.append(outcome)
        yield outcome


def _pixels(folder: RunFolder, path: str) -> np.ndarray:
    with Image.open(folder.fetch(path)) as image:
        return np.asarray(image.convert("RGB"))
