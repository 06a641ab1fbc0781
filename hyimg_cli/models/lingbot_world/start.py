"""The first picture as the network reads it: resized as it is published, then Wan's own encode."""

# Legend: C channel, H W pixels
import torch
import torch.nn.functional as fun
from torch import Tensor

from hyimg_cli.media.images import Pixels
from hyimg_cli.models.diffusers_video.start import StartEncoder
from hyimg_cli.models.latent_video import ImageConditioning


class LingBotStart(StartEncoder):
    """Wan's, but for how a picture is stretched: by cubic curves in float32, past -1 and 1 where
    they swing out.
    """

    def frame(self, pixels: Pixels, view: ImageConditioning) -> Tensor:
        if view.size is None or view.fit == "crop":
            return super().frame(pixels, view)
        values_1CHW = torch.from_numpy(pixels.astype("float32") / 255).permute(2, 0, 1)[None]
        size = (view.size.height, view.size.width)
        resized = fun.interpolate((values_1CHW - 0.5) / 0.5, size=size, mode="bicubic")
        return resized[:, :, None].contiguous()
