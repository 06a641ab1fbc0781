"""The stages of a whole run; each one writes its result to the run's folder."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from hyimg_cli.models.hunyuan_image3.model import HunyuanImage3ForCausalMM
from hyimg_cli.models.hunyuan_image3.vocabulary import Vocabulary
from tiny_world.architecture import tiny_architecture, with_scaling
from tiny_world.batches import RowBuilder
from tiny_world.device import worker_device
from tiny_world.pool import Pool, drawn_pool
from tiny_world.sample import quick_rates
from tiny_world.scenes import PICTURE_PX, Scene
from tiny_world.tokenizer import trained_tokenizer
from tiny_world.train_joint import JointRun, JointTrainer
from tiny_world.train_vae import VaeRun, train_vae, trained_vae
from tiny_world.workers import rank, run_workers

_RATIO_TOKENS = 37
# Below torch's own 1, so that the layers' contributions count from the start.
_EMBEDDING_STD = 0.3


@dataclass(frozen=True)
class WholeRun:
    """Both training stages of one run; `pairs` is the number of encoded pairs per worker."""

    vae: VaeRun
    joint: JointRun
    workers: int
    pairs: int = 5000
    check_count: int = 48


def tokenizer_of(run: WholeRun) -> Tokenizer:
    """Return the run's tokenizer, learnt once and kept in its folder."""
    file = run.vae.folder / "tokenizer.json"
    if not file.exists():
        trained_tokenizer().save(str(file))
    return Tokenizer.from_file(str(file))


def vae_stage(run: WholeRun, tick: Callable[[], None]) -> None:
    """Train the autoencoder until its time is up."""
    arch = tiny_architecture(tokenizer_of(run)).vae
    run_workers(run.workers, tick, train_vae, arch, run.vae)
    # Measured here, once, so that all workers and the export agree.
    trained_vae(arch, run.vae.folder)


def joint_stage(run: WholeRun, tick: Callable[[], None]) -> None:
    """Train everything else until its time is up."""
    run_workers(run.workers, tick, _joint_worker, run)


def finished_network(run: WholeRun) -> HunyuanImage3ForCausalMM:
    """Return the network with the smoothed weights of both stages."""
    network = _network(run)
    file = run.joint.folder / "joint_state.pt"
    trained = torch.load(file, weights_only=True, map_location="cpu")["ema"]
    named = {n: p for n, p in network.named_parameters() if not n.startswith("vae.")}
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(trained[name])
    network.eval()
    return network


def scenes_seen(run: WholeRun) -> frozenset[Scene]:
    """Return every scene in the joint stage's pools, over all workers."""
    texts = (run.joint.folder / f"scenes_{worker}.txt" for worker in range(run.workers))
    lines = {line for text in texts for line in text.read_text(encoding="utf-8").splitlines()}
    return frozenset(Scene(*line.split()) for line in lines)


def row_builder(tokenizer: Tokenizer) -> RowBuilder:
    """Return a builder of rows with this tokenizer's official control tokens."""
    words = Vocabulary(tokenizer, base_size=PICTURE_PX, ratio_count=_RATIO_TOKENS)
    return RowBuilder(words)


def _network(run: WholeRun) -> HunyuanImage3ForCausalMM:
    """Return a fresh network, equal in every worker, around the finished autoencoder."""
    torch.manual_seed(run.joint.seed)
    arch = tiny_architecture(tokenizer_of(run))
    vae = trained_vae(arch.vae, run.vae.folder)
    arch = with_scaling(arch, vae.architecture.scaling_factor)
    network = HunyuanImage3ForCausalMM(arch)
    torch.nn.init.normal_(network.model.wte.weight, std=_EMBEDDING_STD)
    network.vae = vae
    return network


def _joint_worker(run: WholeRun) -> None:
    network = _network(run).to(worker_device(run.joint.device))
    pool = drawn_pool(network.vae, pairs=run.pairs, seed=run.joint.seed * 1000 + rank())
    _note_scenes(pool, run.joint.folder / f"scenes_{rank()}.txt")
    rows = row_builder(tokenizer_of(run))

    def check(network: HunyuanImage3ForCausalMM, step: int) -> dict[str, float]:
        sheet = run.joint.folder / f"samples_{step:06d}.png"
        return quick_rates(network, rows, sheet, count=run.check_count)

    JointTrainer(network, rows, pool, run.joint, check).train()


def _note_scenes(pool: Pool, file: Path) -> None:
    lines = sorted(
        " ".join((s.shape, s.colour, s.background, s.place, s.size)) for s in pool.scenes
    )
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
