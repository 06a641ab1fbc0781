"""`hyimg info`: show the records in finished files."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from hyimg_cli.addresses import shown_place
from hyimg_cli.cli import options as o
from hyimg_cli.cli import render
from hyimg_cli.errors import HyimgError, UsageError
from hyimg_cli.measure.replay.records import Records
from hyimg_cli.media.carried import history_of_file
from hyimg_cli.media.history import History
from hyimg_cli.media.metadata import CHAIN
from hyimg_cli.media.recorded import Described, Record
from hyimg_cli.spec.job import FORMATS, Encoding


def info(
    files: list[Path] = typer.Argument(
        metavar="FILE",
        help="PNG, JPEG, WebP or MP4 files, the .json next to an MP4, or a run's answers (.txt).",
    ),
    as_json: bool = o.AS_JSON,
) -> None:
    """Show how a picture, video or answer was made: prompt, seed, model and versions.

    Reads every file; the exit code is that of the first one without a record.
    """
    faults: list[HyimgError] = []
    records = Records()
    for path in files:
        try:
            described = _described(path, records)
            if as_json:
                render.json_line(_as_json(described))
            else:
                for text in _lines(described):
                    render.line(text)
        except HyimgError as error:
            faults.append(error)
            render.error(error)
    raise typer.Exit(faults[0].exit_code if faults else 0)


def _described(path: Path, records: Records) -> Described:
    """Return a file's metadata; of an edit without any, only its kind, if its history is kept."""
    try:
        return records.read(path)
    except UsageError as error:
        if error.code == "metadata.none":
            for kind in FORMATS:
                if path.suffix == Encoding(kind).suffix and history_of_file(path):
                    return Described(path, kind, None)
        raise


def _as_json(described: Described) -> dict[str, Any]:
    facts: dict[str, Any] = {"file": shown_place(described.path), "kind": described.kind}
    if described.record is not None:
        facts["record"] = described.record.model_dump(exclude_unset=True, exclude={CHAIN})
    if found := _history(described):
        history, is_current = found
        chain = {"origin": asdict(history.origin), "links": history.links, **history.counts()}
        facts[CHAIN] = chain | {"is_current": is_current}
    said = {"parameters": described.parameters, "digital_source_type": described.source_type}
    return facts | {name: text for name, text in said.items() if text}


def _history(described: Described) -> tuple[History, bool] | None:
    return history_of_file(described.path) if described.kind in FORMATS else None


def _chain_lines(history: History, is_current: bool) -> Iterator[str]:
    """Yield what edits did since the first source; `is_current`: the pixels are still theirs."""
    counts, total = history.counts(), history.touched.size
    yield f"  edits since the first source: {history.links}"
    yield f"  sha256 of the first source: {history.origin.sha256}"
    yield f"  pixels that an edit touched: {counts['touched_pixels']:,} of {total:,}"
    equal = f"{counts['untouched_pixels']:,}"
    if not is_current:
        equal = "not known: another program has changed the pixels since"
    yield f"  pixels that are the first source's: {equal}"


def _answer_lines(record: Record) -> Iterator[str]:
    """Yield what the model answered, how it ended, and how sure the model was."""
    if record.thought:
        yield f"  thought: {record.thought}"
    if record.answer is None:
        yield "  answer: none, because the model does not answer with one of the choices"
    else:
        yield f"  answer: {record.answer}"
    if record.finish:
        yield f"  finish: {record.finish}"
    if record.choices:
        shares = (f"{text} {share:.1%}" for text, share in record.choices.items())
        yield f"  probability of each choice: {', '.join(shares)}"
    if record.mass is not None:
        yield f"  mass: {record.mass:g}"
    if record.finish:
        yield f"  tokens: {len(record.answer_token_ids)}"
    if record.confidence.get("logprob") is not None:
        yield "  confidence: {logprob:.2f}, {tokens:.0f} tokens".format_map(record.confidence)


def _lines(described: Described) -> Iterator[str]:
    file = shown_place(described.path)
    if described.record is not None:
        record = described.record
        yield f"{file}: made by hyimg {record.version}"
        # The fields that users most often look for.
        first = {name: record.job[name] for name in ("prompt", "seed") if name in record.job}
        for name, value in (first | record.job).items():
            shown = ", ".join(map(str, value)) if isinstance(value, list) else value
            yield f"  {name}: {shown}"
        if record.size and record.size != record.job.get("size"):
            yield f"  made in size: {record.size}"
        if record.cot_text:
            yield f"  text before the picture: {record.cot_text}"
        if described.kind == "answer":
            yield from _answer_lines(record)
        for number, digest in enumerate(record.source_sha256, 1):
            yield f"  sha256 of source image {number}: {digest}"
        if found := _history(described):
            yield from _chain_lines(*found)
        yield f"  sha256 of the model: {record.model_fingerprint}"
        made = {"made with": record.settings, "by": record.packages}
        for title, values in made.items():
            if values:
                yield f"  {title}: {', '.join(f'{name} {value}' for name, value in values.items())}"
    elif found := _history(described):
        yield f"{file}: an edit by hyimg, without metadata"
        yield from _chain_lines(*found)
    else:
        its = "; its parameters:" if described.parameters else ""
        yield f"{file}: not made by hyimg{its}"
        for line in described.parameters.splitlines():
            yield f"  {line}"
    if described.source_type:
        yield f"  digital source type: {described.source_type}"
