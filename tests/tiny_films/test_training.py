"""Training computes what the product computes, and a resumed run is an undisturbed one."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo15
from tiny_checkpoints import hunyuan_video15
from tiny_films.draw import no_jitter, render
from tiny_films.forward import texts_of, velocity
from tiny_films.pool import draw_pool, read_pool
from tiny_films.prompts import PromptBank, PromptEncoder
from tiny_films.train_decoder import DecoderRun, DecoderTrainer
from tiny_films.train_flow import FlowRun, FlowTrainer, is_matrix, new_network, random_sigmas
from tiny_films.train_vae import (
    PHASES,
    VaeRun,
    VaeTrainer,
    jointly_trained_vae,
    moments,
    new_vae,
    trained_vae,
)
from tiny_films.world import TRAINABLE, Scene

from hyimg_cli.kernels.offload import Offload
from hyimg_cli.models.diffusers_video.encoders import HunyuanPrompts
from hyimg_cli.models.diffusers_video.hunyuan_video15 import (
    Forward,
    MaskFreeAttention,
    hoisted_forward,
)
from hyimg_cli.models.diffusers_video.layout import read_layout
from hyimg_cli.models.diffusers_video.record import HUNYUAN_MAX_TOKENS
from hyimg_cli.models.diffusers_video.weights import LoadTarget
from hyimg_cli.models.latent import PromptEmbedding

PROMPTS = ("a red circle moves left", 'the blue square that says "hi" slides up', "", "blurred")
PLACE = LoadTarget(Offload(torch.device("cpu")), torch.float32)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "tiny-video"
    hunyuan_video15.write(folder)
    return folder


@pytest.fixture(scope="module")
def encoder(base: Path) -> PromptEncoder:
    return PromptEncoder(base)


def shaken(network: Any) -> Any:
    """Weights away from their start, where nothing depends on the prompt."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return network


def test_prompts_are_embedded_as_the_product_does(base: Path, encoder: PromptEncoder) -> None:
    product = HunyuanPrompts(read_layout(base), PLACE, HUNYUAN_MAX_TOKENS)
    for text in PROMPTS:
        found, wanted = encoder.encode(text).tensors, product.encode(text).tensors
        assert found.keys() == wanted.keys()
        for name in wanted:
            assert torch.allclose(found[name], wanted[name], atol=1e-5), (text, name)


def test_the_batched_forward_is_the_products_one_by_one(encoder: PromptEncoder) -> None:
    """Prompts of four lengths, one of them quoting, at four noise levels."""
    network = shaken(new_network(0))
    embeddings = [encoder.encode(text) for text in PROMPTS]
    noisy = torch.randn(4, 16, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    sigma = torch.tensor([0.1, 0.5, 0.9, 1.0])
    with torch.no_grad():
        found = velocity(network, noisy, sigma, texts_of(embeddings, 24))
        for number, embedding in enumerate(embeddings):
            one = noisy[number : number + 1]
            condition = torch.zeros(1, 17, 3, 4, 4)
            product = product_forward(network, embedding, one)
            wanted = product(
                torch.cat([one, condition], dim=1), 1000 * sigma[number : number + 1], None
            )
            assert torch.allclose(found[number], wanted[0], atol=2e-5)
    assert found.std() > 0.1


def product_forward(network: Any, embedding: PromptEmbedding, noise: torch.Tensor) -> Forward:
    """The product's way through the same weights, its own attention in the blocks."""
    copy: Any = type(network).from_config(network.config)
    copy.load_state_dict(network.state_dict())
    for block in copy.transformer_blocks:
        block.attn.set_processor(MaskFreeAttention())
    return hoisted_forward(copy.eval(), embedding, noise, None)


def test_the_batched_autoencoder_is_the_librarys_one_by_one() -> None:
    torch.manual_seed(0)
    vae = new_vae()
    config = hunyuan_video15.arguments(hunyuan_video15.VAE)
    library = AutoencoderKLHunyuanVideo15(**config)
    library.load_state_dict(vae.state_dict())
    films = render(TRAINABLE[:2], no_jitter(2))
    with torch.no_grad():
        mean, _ = moments(vae, films)
        drawn = vae.decoder(mean)
        for number in range(2):
            posterior = library.encode(films[number : number + 1]).latent_dist
            assert torch.allclose(mean[number], posterior.mean[0], atol=2e-5)
            wanted = library.decode(posterior.mean, return_dict=False)[0]
            assert torch.allclose(drawn[number], wanted[0], atol=5e-5)


@pytest.mark.thorough
def test_a_resumed_first_stage_is_an_undisturbed_one(tmp_path: Path) -> None:
    run = VaeRun(minutes=math.inf, folder=tmp_path / "whole", max_steps=2)
    part = replace(run, folder=tmp_path / "part")
    for each in (run, replace(part, max_steps=1), part):
        each.folder.mkdir(exist_ok=True)
        VaeTrainer(each).train()
    assert_equal_states(run.folder / "vae_state.pt", part.folder / "vae_state.pt")
    behind = DecoderRun(minutes=math.inf, folder=run.folder, max_steps=2, batch=1)
    resumed = replace(behind, folder=part.folder)
    for decoder in (behind, replace(resumed, max_steps=1), resumed):
        DecoderTrainer(decoder).train()
    assert_equal_states(run.folder / "decoder_state.pt", part.folder / "decoder_state.pt")
    joint, after = jointly_trained_vae(run.folder), trained_vae(run.folder)
    assert_equal(joint.encoder.state_dict(), after.encoder.state_dict())
    kernel = "conv_out.conv.weight"
    assert not torch.equal(joint.decoder.state_dict()[kernel], after.decoder.state_dict()[kernel])


@pytest.mark.thorough
def test_a_resumed_second_stage_is_an_undisturbed_one(
    tmp_path: Path, encoder: PromptEncoder
) -> None:
    torch.manual_seed(0)
    draw_pool(new_vae().requires_grad_(False), tmp_path / "pool.pt", films=1, seed=0)
    pool = read_pool(tmp_path / "pool.pt")
    samples = pool.sampled(torch.arange(len(pool.scenes)), torch.Generator().manual_seed(0))
    assert abs(samples.std().item() - 1) < 0.05
    bank = one_wording(encoder)
    run = FlowRun(minutes=math.inf, folder=tmp_path / "whole", max_steps=2, batch=4)
    part = replace(run, folder=tmp_path / "part")
    for each in (run, replace(part, max_steps=1), part):
        each.folder.mkdir(exist_ok=True)
        FlowTrainer(new_network(0), pool, bank, each).train()
    assert_equal_states(run.folder / "flow_state.pt", part.folder / "flow_state.pt")


def one_wording(encoder: PromptEncoder) -> PromptBank:
    """Every scene under the same words: enough for two steps."""
    embedding, empty = encoder.encode("a red circle"), encoder.encode("")
    by_scene: dict[Scene, Any] = dict.fromkeys(TRAINABLE, (embedding,))
    return PromptBank(by_scene, empty, (empty,))


def assert_equal_states(one: Path, other: Path) -> None:
    states = [torch.load(file, weights_only=True) for file in (one, other)]
    for state in states:
        assert state.pop("step") == 2
        state.pop("elapsed_s")
    assert_equal(*states)


def assert_equal(one: Any, other: Any, where: str = "") -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_equal(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    else:
        assert one == other, where


def test_frozen_parts_stay_and_the_output_is_not_muons() -> None:
    named = dict(new_network(0).named_parameters())
    frozen = {name.split(".")[0] for name, p in named.items() if not p.requires_grad}
    assert frozen == {"context_embedder_2", "image_embedder"}
    assert not is_matrix("proj_out.weight", named["proj_out.weight"])
    assert is_matrix("x_embedder.proj.weight", named["x_embedder.proj.weight"])


def test_noise_levels_cover_the_schedulers() -> None:
    sigma = random_sigmas(4000, 3.0, torch.Generator().manual_seed(0))
    assert 0 <= sigma.min() < 0.01
    assert 0.99 < sigma.max() <= 1
    assert sigma.mean() > 0.55


def test_phases_cover_the_time() -> None:
    assert [phase.until for phase in PHASES] == sorted(phase.until for phase in PHASES)
    assert PHASES[-1].until == 1.0
    assert all((phase.frames - 1) % 4 == 0 and phase.side_px % 16 == 0 for phase in PHASES)
