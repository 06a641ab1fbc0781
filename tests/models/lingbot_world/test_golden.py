"""Against the published code's own numbers: camera, text, picture, one pass, whole clips."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hyimg_cli.errors import JobError
from hyimg_cli.journal.keys import source_digest
from hyimg_cli.models.lingbot_world import poses
from hyimg_cli.models.lingbot_world.model import LingBotWorld
from hyimg_cli.models.lingbot_world.network import patches, plucker, rope, rotated
from hyimg_cli.models.lingbot_world.schedule import levels
from hyimg_cli.models.lingbot_world.weights import load_network, original_name
from hyimg_cli.pipelines.video import pipeline as video_pipeline
from hyimg_cli.settings.run import OutputConfig, RunConfig
from hyimg_cli.spec.card import StartRule
from hyimg_cli.spec.job import Size

from .conftest import (
    CASES,
    JOB,
    NUMBERS,
    SIZE,
    denoiser_of,
    passes,
    run,
    worst,
    write_image,
    write_path,
)


@pytest.mark.parametrize("name", CASES["paths"])
def test_a_path_is_spread_made_relative_and_normalised(name: str) -> None:
    facts, given = (
        CASES["paths"][name],
        {key.split(".")[2]: value for key, value in NUMBERS.items() if f"camera.{name}." in key},
    )
    used = given["poses"][: facts["poses_used"]].double().numpy()
    fx, fy, cx, cy = given["intrinsics"][0].tolist()
    path = poses.CameraPath(used, (fx, fy, cx, cy))
    found = path.at(facts["lat_f"])
    assert worst(found, given["c2w_relative"]) < 1e-5
    assert worst(path.intrinsics_of(SIZE), given["intrinsics_scaled"]) < 1e-5
    if name == "turn_away_from_origin":
        assert not found[:, :3, 3].any()
    if "plucker" in given:
        grid = plucker(torch.from_numpy(found).float(), path.intrinsics_of(SIZE), SIZE)
        assert worst(grid, given["plucker"]) < 1e-5


def test_channels_are_folded_by_component_row_and_column() -> None:
    turned = torch.eye(4)[None]
    grid = plucker(turned, (30.0, 28.0, 25.0, 15.0), Size(16, 24))
    # Component 3 (x of the direction) at pixel row 5, column 2 of latent row 1, column 2.
    x, y = (2 * 8 + 2 + 0.5 - 25) / 30, (8 + 5 + 0.5 - 15) / 28
    expected = x / np.sqrt(x * x + y * y + 1)
    assert grid[3 * 64 + 5 * 8 + 2, 0, 1, 2].item() == pytest.approx(expected, abs=1e-6)
    one_hot = torch.zeros(1, 2, 1, 2, 4)
    one_hot[0, 1, 0, 1, 2] = 1
    assert patches(one_hot, (1, 2, 2))[0].nonzero().tolist() == [[1, 4 + 2]]


def test_keys_move_and_turn_the_camera() -> None:
    for number, text in enumerate(CASES["keys"]):
        found, expected = poses.key_poses(text), NUMBERS[f"keys.{number}"]
        assert worst(found[::31] if len(expected) > 1 else found[-1:], expected) < 1e-9
    for text, verdict in CASES["errors"].items():
        if verdict == "accepted":
            poses.key_poses(text)
        else:
            with pytest.raises(JobError):
                poses.key_poses(text)


def test_each_sigma_is_looked_up_by_its_whole_timestep() -> None:
    for shift in (3, 5, 10):
        expected, found = CASES["schedule"][f"shift{shift}"], levels(shift)
        assert [level.timestep for level in found] == expected["timesteps"]
        assert [level.sigma for level in found] == expected["sigma_x0"]
        assert [level.renoise for level in found] == expected["sigma_renoise"]


def test_sizes_are_those_of_the_published_arithmetic() -> None:
    for area, picture, expected in CASES["sizes"]:
        assert StartRule(1, 1, "stretch", area=area).size_for(Size(*picture)) == Size(*expected)


def test_prompts_and_pictures_are_encoded_as_published(
    golden: LingBotWorld, tmp_path: Path
) -> None:
    for number, prompt in enumerate(CASES["prompts"]):
        found = golden.prompts.encode(prompt).tensors["text"]
        assert worst(found, NUMBERS[f"text.{number}"]) < 5e-5
    for name in "bc":
        expected = NUMBERS[f"condition.{name}.image_latents"]
        image = write_image(tmp_path / f"{name}.png", NUMBERS[f"condition.{name}.image"])
        size = Size(expected.shape[2] * 8, expected.shape[3] * 8)
        frames = (expected.shape[1] - 1) * 4 + 1
        job = replace(JOB, images=(image,), size=size, num_frames=frames)
        (view,) = golden.pictures.views(job, [source_digest(image)])
        assert worst(golden.pictures.encode(view).tensors["latents"], expected) < 5e-5


@torch.no_grad()
def test_a_pass_over_a_filled_cache_and_its_clean_pass(golden: LingBotWorld) -> None:
    found = rotated(NUMBERS["rope.x"].transpose(0, 1)[None], _from(300, (3, 2, 3)))
    assert worst(found[0].transpose(0, 1), NUMBERS["rope.300"]) < 1e-5
    given = {key[5:]: value for key, value in NUMBERS.items() if key.startswith("pass.")}
    text = torch.zeros(1, golden.shape.text_len, golden.shape.text_dim)
    text[0, : len(given["text_embeds"])] = given["text_embeds"]
    network = golden.networks[0]
    clip = network.clip(text, [825, 0], chunks=4, rows=4, columns=6)
    for layer in range(golden.shape.num_layers):
        for side, name in zip(clip.cache[layer], ("cache_k", "cache_v"), strict=True):
            side[0].copy_(given[f"filled.{name}_before"][layer].transpose(0, 1))
    network.begin(clip, given["filled.plucker"][None])
    for number, name in enumerate(("filled", "clean")):
        taken = torch.cat([given[f"{name}.x"], given["filled.y"]])[None]
        velocity = network(clip, 2, number, taken)
        assert worst(velocity[0], given[f"{name}.velocity"]) < 5e-5
    keys = torch.stack([keys[0] for keys, _ in clip.cache]).transpose(1, 2)
    assert worst(keys, given["clean.cache_k_after"]) < 5e-5


def _from(first: int, grid: tuple[int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rope of a grid whose frames begin at `first`."""
    frames, rows, columns = grid
    whole = rope((first + frames, rows, columns), 14)
    return whole[0][first * rows * columns :], whole[1][first * rows * columns :]


def test_a_clip_from_prompt_picture_and_poses_to_frames(
    golden: LingBotWorld, tmp_path: Path
) -> None:
    image = write_image(tmp_path / "start.png", NUMBERS["clip.image"])
    camera = write_path(tmp_path / "walk", NUMBERS["clip.poses"], NUMBERS["clip.intrinsics"])
    denoiser = denoiser_of(golden, [replace(JOB, images=(image,), camera=camera)])
    with passes(golden.networks[0]) as made:
        latents = run(denoiser)
    assert worst(latents, NUMBERS["clip.final_latents"]) < 5e-5
    # 4 chunks of 4 passes and a clean one; of the last its K/V are those of its fourth.
    assert denoiser.steps == len(made) == 4 * 5 - 1
    keys = torch.stack([keys[0] for keys, _ in denoiser.clip.cache]).transpose(1, 2)
    assert worst(keys[:, :54], NUMBERS["clip.cache_k"][:, 0, :54]) < 5e-5
    frames = np.concatenate(list(golden.decode_latents(latents))).astype(int)
    off = abs(frames - NUMBERS["clip.frames"].numpy())
    assert off.max() <= 1
    assert off.mean() < 1e-3, "what another processor rounds up"


def test_two_clips_together_are_each_what_they_are_alone(
    golden: LingBotWorld, tmp_path: Path
) -> None:
    jobs, given = [], CASES["two"]
    for number in range(2):
        parts = {name: NUMBERS[f"two.{name}"][number] for name in ("image", "poses", "intrinsics")}
        image = write_image(tmp_path / f"{number}.png", parts["image"])
        camera = write_path(tmp_path / str(number), parts["poses"], parts["intrinsics"])
        prompt, seed = given["prompts"][number], given["seeds"][number]
        jobs.append(replace(JOB, images=(image,), camera=camera, prompt=prompt, seed=seed))
    together = denoiser_of(golden, jobs)
    latents = run(together)
    assert worst(latents, NUMBERS["two.final_latents"]) < 5e-5
    single = denoiser_of(golden, jobs[1:])
    assert torch.equal(together.latents[1:], single.latents)
    assert worst(latents[1:], run(single)) < 1e-5


def test_a_prewarm_leaves_nothing_behind(golden: LingBotWorld, tmp_path: Path) -> None:
    """A stand-in of one level in all chunks; neither chance nor a clip behind it knows of that."""
    image = write_image(tmp_path / "start.png", NUMBERS["clip.image"])
    jobs = [replace(JOB, images=(image,), seed=seed) for seed in range(3)]
    before, state = run(denoiser_of(golden, jobs[:1])), torch.random.get_rng_state()
    pipeline = video_pipeline.VideoPipeline(RunConfig(OutputConfig(tmp_path)))
    pipeline._model = golden
    assert pipeline._prewarm(jobs, None).shapes == 1
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(run(denoiser_of(golden, jobs[:1])), before)


def test_both_names_of_the_weights_give_the_same_network(
    golden: LingBotWorld, tmp_path: Path
) -> None:
    part = golden.layout.components["transformer"]
    own = golden.networks[0].state_dict()
    stored = load_file(part.folder / f"{part.stem}.safetensors")
    assert {original_name(name) for name in own} == set(stored)
    folder = tmp_path / "transformer"
    folder.mkdir()
    renamed = {name: stored[original_name(name)] for name in own}
    save_file(renamed, folder / f"{part.stem}.safetensors")
    other = load_network(replace(part, folder=folder), golden.shape, golden.place)
    for name, values in other.state_dict().items():
        assert torch.equal(values, own[name])
