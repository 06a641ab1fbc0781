"""A job as the page shows it, in plain values, from its result line and its resolved job.

Either may be empty.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from hyimg_cli.finishing.crops import holds
from hyimg_cli.journal.edit_facts import crops_in, seam_level
from hyimg_cli.spec.events import Outcome
from hyimg_cli.spec.job import ANSWER_SUFFIX, DRAWN_FILES, VIDEO_TASKS
from hyimg_cli.spec.options import KeepOutside, Region
from hyimg_cli.spec.units import time_text

Entry = Mapping[str, Any]
Record = dict[str, Any]

_NO_TIME = ("queue", "total")
# Facts of a file that its record keeps.
_OF_OUTPUT = ("width", "height", "seed", "layer")
# Shown elsewhere in a record, or too long for a list of settings.
_NO_SETTING = (
    "custom_id",
    "prompt",
    "images",
    "links",
    "seed",
    "cot_text",
    "cot_token_ids",
    "model",
)


class Pictures(ABC):
    """How a page links or embeds files, by their paths relative to the run's folder.

    `shared`: the folder that all source images share, written as in their paths.
    """

    def __init__(self, folder: Path, shared: Path | None = None) -> None:
        self._folder, self._shared = folder, shared

    @abstractmethod
    def show(self, path: str, key: str = "") -> Record:
        """Return the link and the thumbnail of a file; `gone` says why it cannot be shown.

        `key`: the digest of its content, if known.
        """

    def link(self, path: str) -> str:
        """Return a file's link from the page; empty for a missing file or a single-file page."""
        return ""

    def source(self, path: str) -> Record:
        """Return a source's record, named by the part of its path that not all sources share."""
        pure, shared = Path(path), self._shared
        name = str(pure.relative_to(shared)) if shared and shared in pure.parents else pure.name
        return self.show(path) | {"name": name}

    def output(self, output: Entry) -> Record:
        """Return the record of a result's file, with the facts from its result line."""
        path = str(output.get("path"))
        facts = {name: output[name] for name in _OF_OUTPUT if name in output}
        shown = self.show(path, str(output.get("sha256") or ""))
        return facts | shown | {"name": Path(path).name}


def record(place: int, asked: Entry, result: Entry, pictures: Pictures) -> Record:
    """Return the record of one result; `place` is its job's position in the manifest."""
    edit, times = result.get("edit") or {}, result.get("timings_s") or {}
    # The redraws, if the edit was put back on its source.
    redraws = [_redraw(str(edit.get(plain) or ""), pictures) for plain, _ in DRAWN_FILES]
    # The time of each phase, and how long the job waited before the first.
    phases = [(name, f"{s:.3f} s") for name, s in times.items() if name not in _NO_TIME and s]
    waited = [("waited", f"{times.get('queue', 0.0):.3f} s")] if phases else []
    error = result.get("error") or {}
    # If the edit was put back on its source.
    mask = {"path": edit.get("mask"), "sha256": (edit.get("sha256") or {}).get("mask")}
    found = {
        "id": result["custom_id"],
        "place": place,
        "status": str(result.get("status")),
        "kind": str(edit.get("kind") or ""),
        "prompt": str(asked.get("prompt") or ""),
        "seed": asked.get("seed"),
        "sources": [pictures.source(str(path)) for path in asked.get("images") or ()],
        "outputs": [
            pictures.output(output)
            for output in result.get("outputs") or ()
            if not str(output.get("path")).endswith(ANSWER_SUFFIX)
        ],
        "answer": result.get("answer"),
        "mask": pictures.output(mask) if edit.get("mask") else None,
        "redraws": [*filter(None, redraws)],
        "crop": _crop(asked, edit, redraws),
        "proof": ", ".join(_proof(edit)),
        "texts": list(_texts(result)),
        "facts": list(_facts(asked, result)),
        "settings": list(_settings(asked)),
        "phases": [*phases, *waited],
        "warnings": list(map(str, result.get("warnings") or ())),
        "error": {
            name: str(error.get(name) or "") for name in ("code", "message", "hint") if error
        },
    }
    return {name: value for name, value in found.items() if value not in (None, "", [], {})}


def _redraw(drawn: str, pictures: Pictures) -> Record | None:
    link = pictures.link(drawn) if drawn else ""
    return {"name": drawn.rpartition("/")[2], "link": link} if link else None


def _crop(asked: Entry, edit: Entry, redraws: Sequence[Record | None]) -> Record | None:
    """Return where an edit was drawn that saw a part of its source, or two, and the region.

    Boxes are LEFT, TOP, RIGHT, BOTTOM in the source's pixels. The `source` counts from 0. `parts`:
    each crop, what is in its middle, and its redraw.
    """
    if not (crops := crops_in(edit)):
        return None
    boxes = KeepOutside(region=Region(str(asked.get("region") or ""))).boxes
    # Of a mask, the page has the edit alone.
    name = "kept" if asked.get("region_keeps") == "inside" else "region"
    inner = [(name, box) for box in boxes] or [("edit", box) for box in [edit.get("box")] if box]
    parts = []
    for crop, redraw in zip(crops, redraws, strict=False):
        own = [box for _, box in inner if len(crops) == 1 or holds(crop["box"], box)]
        parts.append({"crop": crop["box"], "middle": own[0] if own else None, "redraw": redraw})
    frames = [*(("crop", crop["box"]) for crop in crops), *inner]
    source = int(asked.get("kept_source") or 1) - 1
    return {"frames": frames, "source": source, "parts": parts}


def _proof(edit: Entry) -> Iterator[str]:
    """Yield how finely an edit that kept its source was drawn, and what was measured of it."""
    if edit.get("kind") in (None, "none", "global") or not edit.get("scale"):
        return
    yield f"drawn at {1 / edit['scale']:.2f} drawn pixels per pixel"
    if (count := edit.get("outside_differing_pixels")) is not None:
        of = f" of {edit['outside_pixels']:,}" if "outside_pixels" in edit else ""
        yield f"{count:,}{of} pixels outside differ"
    if (level := seam_level(edit)) is not None:
        yield f"seam {level:.1f} levels"


def _facts(asked: Entry, result: Entry) -> Iterator[tuple[str, str]]:
    """Yield short facts: steps, time, and how much was reused."""
    if steps := result.get("denoise_steps") or asked.get("num_inference_steps"):
        estimated = (result.get("step_cache") or {}).get("estimated")
        yield "steps", f"{steps}, {estimated} of them estimated" if estimated else str(steps)
    if times := result.get("timings_s"):
        own = times.get("total", 0.0) - times.get("queue", 0.0)
        yield "time", time_text((result.get("share_s") or {}).get("total", own))
    reuse = (result.get("kv_reuse") or {}).get("status")
    if reuse and asked.get("task") not in VIDEO_TASKS:
        yield "KV reuse", str(reuse)
    if (edit := result.get("edit") or {}).get("kind"):
        area = f", {edit['area']:.1%} of the picture" if edit.get("area") else ""
        yield "edit", f"{edit['kind']}{area}"
    if edit.get("outside_equal"):
        yield "outside the edit", "every pixel equals the source"
    if confidence := result.get("confidence"):
        yield "confidence", "{logprob:.2f}, {tokens} tokens".format_map(confidence)
    for one in fields(Outcome):
        value = result.get(one.name)
        if (label := one.metadata.get("label")) and value not in (None, one.default):
            yield from ((label, str(each)) for each in (value if type(value) is list else [value]))


def _settings(asked: Entry) -> Iterator[tuple[str, str]]:
    if "model" in asked:
        yield "model", str(asked["model"]).rstrip("/").rpartition("/")[2]
    yield from ((name, str(value)) for name, value in asked.items() if name not in _NO_SETTING)


def _texts(result: Entry) -> Iterator[tuple[str, str]]:
    """Yield the text before the picture, split by its tags; text without tags as a whole."""
    if shares := result.get("choices"):
        yield "choices", ", ".join(f"{text} {share:.1%}" for text, share in shares.items())
    if thought := result.get("thought"):
        yield "think", str(thought)
    text = str(result.get("cot_text") or "")
    found = {
        name: re.findall(rf"<{name}>(.*?)(?:</{name}>|$)", text, re.DOTALL)
        for name in ("recaption", "think")
    }
    parts = [(name, "\n".join(texts).strip()) for name, texts in found.items() if texts]
    yield from parts or ([("text before the picture", text)] if text else [])
    if result.get("think_truncated"):
        yield "note", "the text was cut off before its closing tag"
