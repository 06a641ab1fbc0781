"""Tiled VAE decode over ranks against the library's own `tiled_decode` in one process.

Correctness is the point: every case compares all values of the picture, both sides loaded from
disk. Weights are random and channels few (the official classes, with their own tile numbers), so
seconds say nothing about a real model. Ranks share this machine's cores: with fewer cores than
ranks, wall time cannot fall in proportion, and what is measured instead is how evenly the work is
dealt: each tile is timed alone, and the busiest rank's tiles are set against all of them.

    python benchmarks/vae_parallel.py --rounds 3 --out benchmarks/results/vae-parallel.json
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import diffusers
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from tiny_vaes import VaeLoader, write_hunyuan_video, write_wan, write_wan_patches

from hyimg_cli.journal.provenance import hardware, versions
from hyimg_cli.parallel.ranks import RankPool
from hyimg_cli.tiling.decode import PatchParallelDecoder, cut, decode_tiled
from hyimg_cli.tiling.tiles import assigned, tile_plan

RANKS = (2, 4, 8)
DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Kind:
    """An autoencoder class, how to write a small one, and the latent grids to decode."""

    name: str
    library: str
    write: Callable[[Path, torch.dtype], Path]
    channels: int
    grids: dict[str, tuple[int, int]]


VIDEO_GRIDS = {
    "480x848": (30, 53),
    "720x1280": (45, 80),
    "352x624": (22, 39),
    "tall 1280x720": (80, 45),
    "odd 304x272": (19, 17),
    "narrow 528x112": (33, 7),
    "past a stride 224x272": (14, 17),
    "smaller than a tile 80x112": (5, 7),
}
KINDS = (
    Kind("HunyuanVideo-1.5", "AutoencoderKLHunyuanVideo15", write_hunyuan_video, 4, VIDEO_GRIDS),
    Kind(
        "Wan 2.1",
        "AutoencoderKLWan",
        write_wan,
        16,
        {"480x832": (60, 104), "odd 280x208": (35, 26), "narrow 72x264": (9, 33)},
    ),
    Kind(
        "Wan 2.2 TI2V",
        "AutoencoderKLWan",
        write_wan_patches,
        4,
        {"480x848": (30, 53), "odd 304x272": (19, 17)},
    ),
)


def main() -> None:
    """Measure, print a line a case, write everything as JSON."""
    arguments = _arguments()
    cases: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name, RankPool(max(RANKS)) as pool:
        for kind in KINDS:
            for dtype in DTYPES:
                folder = Path(name) / f"{kind.write.__name__}-{dtype}"
                pool.load("vae", VaeLoader(kind.write(folder, dtype), dtype))
                library = getattr(diffusers, kind.library).from_pretrained(folder, dtype=dtype)
                library.enable_tiling()
                for title, grid in kind.grids.items():
                    case = _case(pool, library, kind, grid, arguments)
                    cases.append({"vae": kind.name, "size": title, **case})
                    print(json.dumps(cases[-1]), flush=True)
    result = _result(cases, arguments)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{len(cases)} cases, largest difference {result['largest_difference']}")
    sys.exit(1 if result["largest_difference"] else 0)


def _case(
    pool: RankPool,
    library: Any,
    kind: Kind,
    grid: tuple[int, int],
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """One grid: seconds of every way to decode it, and how far each is from the library."""
    generator = torch.Generator().manual_seed(1)
    shape = (1, kind.channels, arguments.latent_frames, *grid)
    latents = torch.randn(shape, generator=generator).to(library.dtype)
    vae = pool.here.parts["vae"]
    ways = {
        "library": partial(_of_library, library, latents),
        "1": partial(decode_tiled, vae, latents),
    }
    decoders = {ranks: PatchParallelDecoder(pool, ranks=ranks) for ranks in RANKS}
    ways |= {str(ranks): partial(one.decode, latents) for ranks, one in decoders.items()}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    differences: dict[str, float] = dict.fromkeys(ways, 0.0)
    for _ in range(arguments.rounds):
        expected: torch.Tensor | None = None
        for way, decode in ways.items():
            started = perf_counter()
            picture = decode()
            seconds[way].append(perf_counter() - started)
            expected = picture if expected is None else expected
            difference = (picture.double() - expected.double()).abs().max().item()
            differences[way] = max(differences[way], difference)
    return {
        "dtype": str(latents.dtype).removeprefix("torch."),
        "latents": list(latents.shape),
        "max_abs_difference": {way: differences[way] for way in ways if way != "library"},
        "seconds": {way: _spread(found) for way, found in seconds.items()},
        "ranks": {ranks: _shares(pool, one, latents) for ranks, one in decoders.items()},
    }


@torch.no_grad()
def _of_library(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    picture: torch.Tensor = vae.decode(latents).sample
    return picture


def _shares(pool: RankPool, decoder: PatchParallelDecoder, latents: torch.Tensor) -> dict[str, Any]:
    """How the last decode was dealt, in cells and in seconds of each tile decoded alone."""
    assert decoder.report is not None
    vae = pool.here.parts["vae"]
    plan = tile_plan(vae.tiling, *latents.shape[-2:])
    alone = _tile_seconds(vae, plan, latents)
    shares = assigned(plan, len(decoder.report.ranks))
    loads = [sum(alone[tile.index] for tile in share) for share in shares]
    areas = [one.area for one in decoder.report.ranks]
    return {
        "tiles": [one.tiles for one in decoder.report.ranks],
        "area": areas,
        "bytes_received": [one.received_bytes for one in decoder.report.ranks],
        "limit_by_area": round(sum(areas) / max(areas), 3),
        "limit_by_tile_seconds": round(sum(loads) / max(loads), 3),
        "merge_s": round(decoder.report.merge_s, 4),
    }


_alone: dict[tuple[Any, ...], list[float]] = {}


def _tile_seconds(vae: Any, plan: Any, latents: torch.Tensor) -> list[float]:
    """Seconds of every tile decoded alone in this process, the fastest of two."""
    key = (id(vae), latents.shape, latents.dtype)
    if key not in _alone:
        _alone[key] = [
            min(_timed(lambda tile=tile: vae.decode_tile(cut(latents, tile))) for _ in range(2))
            for tile in plan.tiles
        ]
    return _alone[key]


def _timed(work: Callable[[], object]) -> float:
    started = perf_counter()
    work()
    return perf_counter() - started


def _spread(found: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(found), 4),
        "min": round(min(found), 4),
        "max": round(max(found), 4),
    }


def _result(cases: list[dict[str, Any]], arguments: Any) -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "what": "tiled VAE decode over gloo ranks against the library's tiled_decode, random "
        "weights, few channels; ranks share the machine's cores, so seconds are no speed-up",
        "hardware": hardware(),
        "versions": versions(),
        "threads_per_rank": torch.get_num_threads(),
        "rounds": arguments.rounds,
        "load": "other work ran on the machine" if arguments.shared else "nothing else ran",
        "largest_difference": max(
            value for case in cases for value in case["max_abs_difference"].values()
        ),
        "cases": cases,
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--latent-frames", type=int, default=1)
    parser.add_argument("--shared", action="store_true", help="other work runs on this machine")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/vae-parallel.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
