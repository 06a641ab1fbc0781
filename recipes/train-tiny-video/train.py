"""Train the embedded video checkpoint from nothing: `python recipes/train-tiny-video/train.py -h`.

Stages, each resumed where an earlier run with the same `--out` stopped: base, vae, decoder, flow,
export, eval. Needs hyimg installed; no data, no network, no GPU.
"""

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

RECIPES = Path(__file__).resolve().parent.parent
# Drawing, optimisers and run state are the picture recipe's; the untrained files the builder's.
sys.path[1:1] = [str(RECIPES / "train-tiny-image"), str(RECIPES / "build-tiny-video")]

from rich.console import Console  # noqa: E402
from tiny_films.curves import write_curves  # noqa: E402
from tiny_films.evaluate import answers, questions, rates, write_failures  # noqa: E402
from tiny_films.export import digests, export  # noqa: E402
from tiny_films.model_card import Facts, model_card, stage_of  # noqa: E402
from tiny_films.pool import read_pool  # noqa: E402
from tiny_films.stages import WholeRun, base_stage, decoder_stage, flow_stage, vae_stage  # noqa: E402
from tiny_films.train_decoder import DecoderRun  # noqa: E402
from tiny_films.train_flow import FlowRun, trained_network  # noqa: E402
from tiny_films.train_vae import VaeRun, trained_vae  # noqa: E402
from tiny_world.progress import waiting  # noqa: E402

_SHARES = {"vae": 0.35, "decoder": 0.25, "flow": 0.4}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, required=True, help="training time in all")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run; resumes")
    parser.add_argument("--workers", type=int, default=min(4, os.cpu_count() or 1))
    parser.add_argument("--hardware", default="", help="for the model card, in your words")
    parser.add_argument("--eval-count", type=int, default=72, help="films of a kind to judge")
    parser.add_argument("--films", type=int, default=16, help="encoded films of a scene")
    parser.add_argument("--max-steps", type=int, help="of each stage; for a trial")
    return parser.parse_args()


def main() -> None:
    chosen, console = arguments(), Console(stderr=True)
    run = whole_run(chosen)
    out: Path = chosen.out
    out.mkdir(parents=True, exist_ok=True)
    base_stage(run)
    with waiting(console, "vae", out / "vae_log.jsonl", run.vae.minutes) as tick:
        vae_stage(run, tick)
    with waiting(console, "decoder", out / "decoder_log.jsonl", run.decoder.minutes) as tick:
        decoder_stage(run, tick)
    with waiting(console, "flow", out / "flow_log.jsonl", run.flow.minutes) as tick:
        flow_stage(run, tick)
    write_curves(out, out / "curves.png")
    checkpoint = out / "checkpoint"
    shutil.rmtree(checkpoint, ignore_errors=True)
    vae, factor = trained_vae(out), read_pool(run.pool).scaling_factor
    export(trained_network(out, run.flow.seed), vae, factor, run.base, checkpoint)
    console.print(f"checkpoint: {checkpoint}")
    measured = {}
    if chosen.eval_count:
        given = answers(checkpoint, questions(chosen.eval_count), out / "eval")
        measured = rates(given)
        write_failures(given, out / "failures.png")
        (out / "rates.json").write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    stages = {name: stage_of(out / f"{name}_log.jsonl") for name in ("vae", "decoder", "flow")}
    hardware = chosen.hardware or f"{chosen.workers} CPU workers"
    facts = Facts(stages, hardware, digests(checkpoint))
    (checkpoint / "README.md").write_text(model_card(facts, measured), encoding="utf-8")
    console.print_json(data=measured)


def whole_run(chosen: argparse.Namespace) -> WholeRun:
    """Return all stages' settings from the command line."""
    minutes = {stage: chosen.minutes * share for stage, share in _SHARES.items()}
    folder, steps = chosen.out, chosen.max_steps
    return WholeRun(
        vae=VaeRun(minutes["vae"], folder, max_steps=steps),
        decoder=DecoderRun(minutes["decoder"], folder, max_steps=steps),
        flow=FlowRun(minutes["flow"], folder, max_steps=steps),
        workers=chosen.workers,
        films=chosen.films,
    )


if __name__ == "__main__":
    main()
