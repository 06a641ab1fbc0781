"""Sigmas against diffusers' scheduler, guidance against its formula, the loop against an
integral.
"""

import pytest
import torch

from hyimg_cli.diffusion.denoise import DenoisePlan, DenoiseState, denoise_step
from hyimg_cli.diffusion.guidance import CFG, guided
from hyimg_cli.diffusion.schedule import Schedule


@pytest.mark.parametrize(("count", "shift"), [(1, 3.0), (4, 3.0), (8, 1.0), (50, 3.0), (50, 5.0)])
def test_equals_diffusers_with_explicit_sigmas(count: int, shift: float) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler

    theirs = FlowMatchEulerDiscreteScheduler(shift=shift)
    theirs.set_timesteps(sigmas=torch.linspace(1, 0, count + 1)[:-1].tolist())
    schedule = Schedule(count, shift)
    torch.testing.assert_close(schedule.sigmas(), theirs.sigmas, atol=1e-6, rtol=0)
    latents = torch.randn(1, 2, 3, 3)
    ours_latents, their_latents = latents[0], latents
    for step in schedule.steps():
        velocity = torch.randn(2, 3, 3)
        ours_latents = step.advance(ours_latents, velocity)
        their_latents = theirs.step(
            velocity[None], theirs.timesteps[step.index], their_latents
        ).prev_sample
    torch.testing.assert_close(ours_latents, their_latents[0], atol=1e-5, rtol=0)


def test_next_timestep_of_the_last_step_is_zero() -> None:
    steps = Schedule(8, 3.0).steps()
    assert len(steps) == 8
    assert steps[0].timestep == 1000.0
    assert steps[-1].next_timestep == 0.0
    assert [s.next_timestep for s in steps[:-1]] == [s.timestep for s in steps[1:]]


@pytest.mark.parametrize("scale", [1.0, 2.5, 5.0])
def test_guidance_of_two_branches(scale: float) -> None:
    conditional, unconditional = torch.randn(2, 3, 4, 4)
    expected = unconditional + scale * (conditional - unconditional)
    ours = guided(torch.stack([conditional, unconditional]), [scale])
    torch.testing.assert_close(ours, expected)


def test_one_branch_needs_no_guidance() -> None:
    velocity = torch.randn(1, 3, 4, 4)
    assert torch.equal(guided(velocity, []), velocity[0])


def test_two_other_branches_push_independently() -> None:
    velocity = torch.randn(3, 2, 2, 2)
    v, a, b = velocity
    expected = v + 1.5 * (v - a) + 0.5 * (v - b)
    torch.testing.assert_close(guided(velocity, [2.5, 1.5]), expected)


def test_counts_must_agree() -> None:
    with pytest.raises(ValueError, match="one scale fewer"):
        guided(torch.zeros(2, 1, 1, 1), [])


def test_a_straight_flow_is_integrated_exactly() -> None:
    """With the true velocity noise - picture, any number of steps ends at the picture."""
    picture, noise = torch.randn(2, 3, 5, 5)
    plans = [
        DenoisePlan(noise, Schedule(7, 3.0), CFG([])),
        DenoisePlan(2 * noise, Schedule(7, 1.0), CFG([])),
    ]
    true = [(noise - picture)[None], (2 * noise - picture)[None]]
    states = [DenoiseState(plan, None) for plan in plans]
    for _ in range(7):
        assert not any(state.is_done for state in states)
        denoise_step(states, lambda _: true)
    for state in states:
        assert state.is_done
        torch.testing.assert_close(state.latents, picture, atol=1e-5, rtol=0)
