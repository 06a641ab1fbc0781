"""Z-Image's denoiser with the guidance of diffusers' classic pipeline."""

from typing import Any

import torch
from diffusers.modular_pipelines.z_image.denoise import ZImageLoopDenoiser


class JoinedBranches(ZImageLoopDenoiser):
    """Compute both guidance branches in one forward; the library's block has other bits."""

    @torch.no_grad()
    def __call__(self, components: Any, block_state: Any, i: int, t: torch.Tensor) -> Any:
        if block_state.negative_prompt_embeds is None:
            return super().__call__(components, block_state, i, t)
        found = components.transformer(
            x=block_state.latent_model_input * 2,
            t=block_state.timestep.repeat(2),
            cap_feats=[*block_state.prompt_embeds, *block_state.negative_prompt_embeds],
            return_dict=False,
        )[0]
        towards, away = (one[None].squeeze(2).float() for one in found)
        difference = components.guider.guidance_scale * (towards - away)
        block_state.noise_pred = -(towards + difference)
        return components, block_state
