"""A folder of each kind of page, made up as the commands leave it."""

import json
from pathlib import Path
from typing import Any

from report.folders import asked, done, failed, picture, write_run
from report.test_page import bench_page

from hyimg_cli.report.run_page import RunPage
from hyimg_cli.report.single_file import single_file

BATCH = "batch_0123456789abcdef01234567"
RULE = {"scorers": {"text": {"higher_is_better": True}}}
LONG = "a-name-that-is-as-long-as-names-of-files-get-and-has-no-space-where-it-could-be-broken"


def _pictures(folder: Path, *names: str) -> None:
    for number, name in enumerate(names):
        picture(folder / f"outputs/{name}.png", number + 2)


def run(folder: Path) -> Path:
    out = folder / "out"
    picture(folder / "in.png", 1)
    _pictures(out, "bus", LONG, "text")
    picture(out / "outputs/bus.redraw.png", 7)
    part = {"kind": "local", "scale": 0.75, "crop": {"box": [8, 6, 56, 42], "drawn": [64, 48]}}
    part |= {"plain": "outputs/bus.redraw.png", "outside_differing_pixels": 0}
    part |= {"outside_pixels": 2792, "seam": {"cast": 0.3, "step": 3.2}}
    jobs = [
        asked("bus", region="20,16,40,30"),
        asked(LONG, prompt=LONG),
        asked("text", images=[]),
        asked("lost"),
    ]
    edit = {"kind": "none", "gates": ["max_spill 0.1: …"]}
    lines = [
        done("bus", notes=["turned"], edit=part),
        done(LONG, warnings=["the text was cut off"]),
    ]
    lines += [done("text", edit=edit, warnings=["gate: max_spill 0.1: …"]), failed("lost")]
    RunPage(write_run(out, lines, jobs)).refresh()
    return out / "report.html"


def candidates(folder: Path, *, picked: bool = False) -> Path:
    """Two lines with two candidates; of the second none is accepted, unless they are `picked`."""
    out = folder / "runs of June" / "cand"
    names = ["bus-0", "bus-1", "cat-0", "cat-1"]
    _pictures(out, *names)
    jobs = [asked(name, images=[], candidate_of=name[:3]) for name in names]
    RunPage(_with_picks(write_run(out, [*map(done, names)], jobs), picked=picked)).refresh()
    return out / "report.html"


def _with_picks(out: Path, *, picked: bool = False, missing: tuple[str, ...] = ()) -> Path:
    good: dict[str, Any] = {"missing": missing, "chosen_by": "rule", "rule": RULE}
    lines = [good | {"candidate_of": "bus", "picked": ["bus-0"]}]
    lines += [good | {"candidate_of": "cat", "picked": ["cat-0"] * picked}]
    for line in lines:
        of, pair = line["candidate_of"], ("0", "1")
        line["ranking"] = [
            {"custom_id": f"{of}-{n}", "rank": int(n) + 1, "values": {"text": 0.75}}
            for n in pair
            if line["picked"]
        ]
        line["rejected"] = [
            {"custom_id": f"{of}-{n}", "values": {"text": 0.5}, "reasons": ["text 0.5 < 0.6"]}
            for n in pair
            if not line["picked"]
        ]
    (out / "candidates.jsonl").touch()
    (out / "picks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return out


def drafts(folder: Path, *, fails: bool = False) -> Path:
    """The page of drafts; of the run that they are for: `../report.html`."""
    out = folder / "cand's"
    names = ["bus-0", "bus-1", "cat-0", "cat-1"]
    jobs = [asked(name, images=[], candidate_of=name[:3], draft_of=name) for name in names]
    lines = [*map(done, names)]
    if fails:
        lines[3] = failed("cat-1")
    _pictures(out / "drafts", *names)
    _pictures(out, "bus-0", "cat-0")
    write_run(out, [done("bus-0"), done("cat-0")], [jobs[0], jobs[2]])
    write_run(out / "drafts", lines, jobs)
    _with_picks(out, picked=True)
    for _ in range(2):  # as the command does: each page when its run ends, and both with the picks
        RunPage(out / "drafts").refresh()
        RunPage(out).refresh()
    return out / "drafts" / "report.html"


def finals(folder: Path) -> Path:
    return drafts(folder).parent.parent / "report.html"


def batch(folder: Path, *, is_running: bool = False) -> Path:
    """Two of three requests are answered, the first by two pictures."""
    out = folder / "batches" / BATCH / "run"
    _pictures(out, "a-0", "a-1", "b")
    jobs = [asked(name, images=[], candidate_of="a") for name in ("a-0", "a-1")]
    jobs += [asked(name, images=[]) for name in "bc"]
    write_run(out, [*map(done, ("a-0", "a-1", "b"))], jobs)
    RunPage(out).refresh(is_running=is_running)
    return out / "report.html"


def replay(folder: Path) -> Path:
    out = folder / "replay-bus"
    _pictures(out, "bus")
    RunPage(write_run(out, [done("bus")], [asked("bus", images=[])])).refresh()
    return out / "report.html"


def bench(folder: Path) -> Path:
    path = folder / "report.html"
    path.write_text(bench_page(folder, "kv-reuse over a longer name of a variant"))
    return path


def single(folder: Path) -> Path:
    path = folder / "single.html"
    path.write_text(single_file(run(folder).parent))
    return path


EVERY = {
    one.__name__: one for one in (run, candidates, drafts, finals, batch, replay, bench, single)
}
