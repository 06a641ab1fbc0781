"""A loaded prompt rewriter, run by diffusers' own function.

Its texts are greedy, so seeds do not count: the same prompt, pictures and files give the same text.
"""

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.modular_pipelines.flux3 import prompt_upsampler as library
from torchvision.transforms.functional import to_pil_image  # type: ignore[import-untyped]

from hyimg_cli.errors import JobError
from hyimg_cli.models.diffusers_image.rewriter.record import RewriterFiles
from hyimg_cli.models.diffusers_video.start import read_given
from hyimg_cli.models.diffusers_video.weights import load_target, load_tokenizer, load_weights
from hyimg_cli.models.latent import Rewritten
from hyimg_cli.settings.run import ModelChoice
from hyimg_cli.spec.job import ImageJob

# Of the library's error for a text without letters.
_NO_TEXT = "empty caption"


class PromptRewriter:
    """FLUX.3's rewriter. `parameters`: its number of them."""

    def __init__(self, files: RewriterFiles, choice: ModelChoice) -> None:
        """Load it to the device of `choice`. Raises CheckpointError, or MachineError."""
        self._place = load_target(choice)
        self._processor = load_tokenizer(files.processor, files.network)
        self._network = load_weights(files.network, self._place)
        self.parameters = sum(one.numel() for one in self._network.parameters())
        self.device, self.dtype = str(self._place.device), self._place.dtype_name

    @torch.no_grad()
    def rewrite(self, job: ImageJob, digests: Sequence[str]) -> Rewritten:
        """Return the prompt of a job, rewritten by what its sources show.

        `digests`: of its sources as they are read.
        """
        given, notes = read_given(tuple(zip(job.views, digests, strict=True)), keeps_alpha=False)
        pictures = [to_pil_image(one.pixels) for one in given]
        self._place.offload.onload(self._network)
        counted: Any = _Counted(self._network, self._place.device)
        try:
            text = library.upsample_prompt(
                counted,
                self._processor,
                job.prompt,
                images=library.prepare_references(pictures) if pictures else None,
            )
        except RuntimeError as error:
            if _NO_TEXT not in str(error):
                raise
            what, hint = "the prompt rewriter wrote no text", "word the prompt in another way"
            raise JobError(what, where="prompt", hint=hint, code="job.not-rewritten") from error
        return Rewritten(
            text, counted.tokens, notes, is_cut=counted.tokens >= library.MAX_NEW_TOKENS
        )


class _Counted:
    """A network as the library uses it, and the number of tokens that it wrote."""

    def __init__(self, network: Any, device: torch.device) -> None:
        self._network, self.device, self.tokens = network, device, 0

    def generate(self, *, input_ids: torch.Tensor, **options: Any) -> torch.Tensor:
        made: torch.Tensor = self._network.generate(input_ids=input_ids, **options)
        self.tokens = made.shape[1] - input_ids.shape[1]
        return made
