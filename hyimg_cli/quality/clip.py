"""Cosine similarity of two pictures' CLIP embeddings, by a checkpoint in a local folder.

It says whether two pictures show the same things, but barely detects whether they are equal.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyimg_cli.errors import UsageError
from hyimg_cli.files import TABLE_BYTES, json_of, text_of
from hyimg_cli.quality.metrics import Metric, Pixels

if TYPE_CHECKING:
    from torch import Tensor


class Clip:
    """A loaded image encoder with its projection."""

    def __init__(self, model: Any, processor: Any) -> None:
        self._model, self._processor = model, processor

    @classmethod
    def load(cls, folder: Path) -> "Clip":
        """Load the CLIP checkpoint in `folder`, from safetensors; nothing is downloaded.

        Raises UsageError for a folder without one.
        """
        from transformers import CLIPImageProcessor, CLIPModel

        hint = "give a folder with config.json, preprocessor_config.json and model.safetensors"
        try:
            kind = json_of(text_of(folder / "config.json", TABLE_BYTES)).get("model_type")
            if kind != "clip":
                raise ValueError(f"its model_type is {kind!r}")
            model = CLIPModel.from_pretrained(
                folder, use_safetensors=True, local_files_only=True
            ).eval()
            return cls(model, CLIPImageProcessor.from_pretrained(folder, local_files_only=True))
        except (OSError, ValueError, AttributeError) as error:
            what = f"not a CLIP checkpoint: {error}"
            raise UsageError(what, where=folder, hint=hint, code="clip.checkpoint") from None

    @property
    def metric(self) -> Metric:
        return Metric("clip", "", True, self.similarity)

    def similarity(self, a: Pixels, b: Pixels) -> float:
        """Return the cosine of the angle between two pictures' embeddings, -1 to 1."""
        import torch

        of_a, of_b = self._embedding(a), self._embedding(b)
        return float(torch.nn.functional.cosine_similarity(of_a, of_b))

    def _embedding(self, pixels: Pixels) -> "Tensor":
        import torch

        with torch.no_grad():
            inputs = self._processor(
                images=pixels, input_data_format="channels_last", return_tensors="pt"
            )
            seen = self._model.vision_model(pixel_values=inputs["pixel_values"])
            projected: Tensor = self._model.visual_projection(seen.pooler_output)
        return projected
