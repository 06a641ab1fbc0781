"""Train the embedded checkpoint from nothing: `python recipes/train-tiny-image/train.py --help`.

Stages, each resumed where an earlier run with the same `--out` stopped: tokenizer, vae, joint,
export, eval. Needs hyimg installed; no data, no network, and no GPU: `--device cuda` uses one.
"""

import argparse
import os
from pathlib import Path

import torch
from rich.console import Console
from tiny_world.curves import write_curves
from tiny_world.device import fault
from tiny_world.evaluate import answers, questions, rates, write_failures
from tiny_world.export import Provenance, export
from tiny_world.model_card import Facts, model_card, seconds_of, write_rates
from tiny_world.progress import waiting
from tiny_world.stages import (
    WholeRun,
    finished_network,
    joint_stage,
    scenes_seen,
    tokenizer_of,
    vae_stage,
)
from tiny_world.train_joint import JointRun
from tiny_world.train_vae import VaeRun

_VAE_SHARE = 0.3


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, required=True, help="training time in all")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run; resumes")
    parser.add_argument("--device", default="cpu", help="cpu, cuda (every GPU), or cuda:N")
    parser.add_argument("--workers", type=int, help="processes; default: one a core, one a GPU")
    parser.add_argument("--hardware", default="", help="for the model card, in your words")
    parser.add_argument("--eval-count", type=int, default=256, help="held-out jobs of a kind")
    parser.add_argument("--max-steps", type=int, help="of each stage; for a trial")
    parser.add_argument("--pairs", type=int, default=5000, help="encoded pictures per worker")
    chosen = parser.parse_args()
    if wrong := fault(chosen.device):
        parser.error(wrong)
    chosen.workers = chosen.workers or default_workers(chosen.device)
    return chosen


def default_workers(device: str) -> int:
    """Return one for a named GPU, one for each GPU, or a few for the CPU's cores."""
    if device == "cpu":
        return min(4, os.cpu_count() or 1)
    return torch.cuda.device_count() if device == "cuda" else 1


def main() -> None:
    chosen, console = arguments(), Console(stderr=True)
    run = whole_run(chosen)
    chosen.out.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer_of(run)
    with waiting(console, "vae", run.vae.folder / "vae_log.jsonl", run.vae.minutes) as tick:
        vae_stage(run, tick)
    with waiting(console, "joint", run.joint.folder / "joint_log.jsonl", run.joint.minutes) as tick:
        joint_stage(run, tick)
    write_curves(chosen.out)
    checkpoint = chosen.out / "checkpoint"
    network, seen = finished_network(run), scenes_seen(run)
    facts = Facts(run, seconds_of(chosen.out), chosen.hardware)
    export(network, tokenizer, Provenance(True, seen, model_card(facts, {})), checkpoint)
    console.print(f"checkpoint: {checkpoint}")
    measured = evaluated(checkpoint, chosen.out / "eval", chosen.eval_count, chosen.workers)
    write_rates(measured, chosen.out / "rates.json")
    (checkpoint / "README.md").write_text(model_card(facts, measured), encoding="utf-8")
    console.print_json(data={kind: rate["right"] for kind, rate in measured.items()})


def whole_run(chosen: argparse.Namespace) -> WholeRun:
    """Return both stages' settings from the command line."""
    vae_minutes = chosen.minutes * _VAE_SHARE
    return WholeRun(
        vae=VaeRun(
            minutes=vae_minutes,
            folder=chosen.out,
            max_steps=chosen.max_steps,
            device=chosen.device,
        ),
        joint=JointRun(
            minutes=chosen.minutes - vae_minutes,
            folder=chosen.out,
            max_steps=chosen.max_steps,
            device=chosen.device,
        ),
        workers=chosen.workers,
        pairs=chosen.pairs,
    )


def evaluated(
    checkpoint: Path, folder: Path, count: int, workers: int
) -> dict[str, dict[str, float]]:
    """Return rates on held-out jobs; writes the failures' pictures."""
    if count == 0:
        return {}
    given = answers(checkpoint, questions(count), folder, workers=workers)
    write_failures(given, folder / "failures.png")
    return rates(given)


if __name__ == "__main__":
    main()
