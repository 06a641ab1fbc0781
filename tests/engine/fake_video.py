"""A video model that behaves without a network: seeded arithmetic, in the protocol's own steps.

What a denoiser remembers (a momentum) shapes every later step, so state that is lost, shared or
restored at the wrong place shows in the pixels.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor

from hyimg_cli.cache.disk import PROMPT_EMBEDDINGS
from hyimg_cli.diffusion.step_cache import VelocityCache
from hyimg_cli.errors import JobError
from hyimg_cli.journal.keys import precision
from hyimg_cli.models import registry
from hyimg_cli.models.latent import LatentDenoiser, PromptEmbedding
from hyimg_cli.pipelines.video import pipeline as video_pipeline
from hyimg_cli.settings.run import ModelChoice
from hyimg_cli.spec import digest
from hyimg_cli.spec.card import TileRule, VideoCard
from hyimg_cli.spec.job import Size, VideoJob

WIDTH = 8


def video_job(custom_id: str = "job", **changes: Any) -> VideoJob:
    facts: dict[str, Any] = {
        "custom_id": custom_id,
        "task": "t2v",
        "prompt": "a dog on a beach",
        "negative_prompt": "",
        "model": "tiny-video",
        "seed": 7,
        "size": Size(32, 48),
        "num_frames": 5,
        "fps": 8,
        "num_inference_steps": 4,
        "guidance_scale": 6.0,
        "flow_shift": 5.0,
        "source_line": "jobs.jsonl:1",
    }
    return VideoJob(**(facts | changes))


@dataclass
class FakeEncoder:
    """Embeds by the digest of the text; a quoted text runs a second encoder."""

    template: str = "plain"
    runs: Counter[str] = field(default_factory=Counter)
    is_loaded: bool = False
    log: list[str] = field(default_factory=list)

    @property
    def encoder_runs(self) -> Mapping[str, int]:
        return dict(self.runs)

    def key(self, text: str) -> str:
        return digest.of_json([self.template, text])

    def encode(self, text: str) -> PromptEmbedding:
        self.is_loaded = True
        self.log.append(f"encode {text}")
        self.runs["text"] += 1
        self.runs["glyph"] += '"' in text
        if "unreadable" in text:
            raise JobError("the text cannot be read", code="job.text")
        generator = torch.Generator().manual_seed(digest.seed_from(self.template + text))
        rows = torch.randn(1 + len(text) % 5, WIDTH, generator=generator)
        notes = ("the prompt was cut",) if len(text) > 200 else ()
        return PromptEmbedding(self.key(text), {"text": rows}, notes)

    def pack(self, embedding: PromptEmbedding) -> bytes:
        return safetensors.torch.save(dict(embedding.tensors))

    def unpack(self, data: bytes, key: str) -> PromptEmbedding:
        try:
            return PromptEmbedding(key, safetensors.torch.load(data))
        except Exception as error:
            raise ValueError("not an embedding") from error

    def release(self) -> None:
        self.is_loaded = False
        self.log.append("release")


class FakeDenoiser(LatentDenoiser):
    def __init__(self, job: VideoJob, embeddings: Mapping[str, PromptEmbedding], card: VideoCard):
        self.job = job
        self.shape = (1, 4, *card.latent_grid(job.size, job.num_frames))
        pulls = [embeddings[text].tensors["text"].mean() for text in texts(job)]
        self.pull = pulls[0] * job.guidance_scale - sum(pulls[1:])
        self.momentum = torch.zeros(self.shape)
        noise = torch.randn(self.shape, generator=torch.Generator().manual_seed(job.seed))
        super().__init__(noise, VelocityCache(None, [0] * job.num_inference_steps))

    @property
    def steps(self) -> int:
        return self.job.num_inference_steps

    def step(self, index: int, latents_BCFYX: Tensor) -> Tensor:
        if f"fails in step {index}" in self.job.prompt:
            raise RuntimeError("a kernel failed")
        change = torch.tanh(latents_BCFYX * (1 + index) + self.pull)
        self.momentum = 0.7 * self.momentum + 0.3 * change
        return latents_BCFYX - self.momentum / self.steps

    def state(self) -> Mapping[str, Tensor]:
        return {} if self.is_done else {"momentum": self.momentum}

    def restore(self, done: int, latents: Tensor, state: Mapping[str, Tensor]) -> None:
        super().restore(done, latents, state)
        self.momentum = state["momentum"]


def texts(job: VideoJob) -> tuple[str, ...]:
    return (job.prompt,) if job.guidance_scale == 1 else (job.prompt, job.negative_prompt)


class FakeVideo:
    """`log` tells in which order weights come, strings are embedded, steps and decodes run."""

    device = torch.device("cpu")
    device_name, dtype_name, parameter_count = "cpu", "float32", 1000
    own_notes = ()

    def __init__(self, model: str, template: str = "plain") -> None:
        self._card = registry.video_card("tiny-video")
        self.name = model
        self.log: list[str] = []
        self.prompts = FakeEncoder(template, log=self.log)
        self.encoders = {PROMPT_EMBEDDINGS: self.prompts}
        self.denoisers: list[FakeDenoiser] = []

    def unload_networks(self) -> None:
        """Nothing takes turns here."""

    @property
    def card(self) -> VideoCard:
        return self._card

    def load_weights(self, *, with_transformer: bool = True) -> None:
        self.log.append("load" if with_transformer else "vae")

    def conditions(self, job: VideoJob, digests: object) -> dict[str, str]:
        assert not job.images
        return dict.fromkeys(texts(job), PROMPT_EMBEDDINGS)

    def notes(self, job: VideoJob) -> tuple[str, ...]:
        return ()

    def denoiser(self, job: VideoJob, embeddings: Mapping[str, PromptEmbedding]) -> FakeDenoiser:
        self.denoisers.append(FakeDenoiser(job, embeddings, self._card))
        return self.denoisers[-1]

    def unload_transformer(self) -> None:
        self.log.append("release transformer")

    def smaller_tilings(self, latents_BCFYX: Tensor) -> list[tuple[str, TileRule]]:
        return [("half", TileRule(2, 1, 1))]

    def decode_latents(
        self, latents_BCFYX: Tensor, tiling: TileRule | None = None
    ) -> Iterator[np.ndarray]:
        """In tiles one level brighter."""
        self.log.append(f"decode {tuple(latents_BCFYX.shape[2:])}")
        base = 128 if tiling is None else 129
        levels = (latents_BCFYX[0, :3] * 40 + base).clamp(0, 255).to(torch.uint8)
        cell = self._card.pixels_per_cell
        big = levels.repeat_interleave(cell, 2).repeat_interleave(cell, 3)
        stride = self._card.frame_stride
        times = [0] + [1 + t // stride for t in range((latents_BCFYX.shape[2] - 1) * stride)]
        frames = big[:, times].permute(1, 2, 3, 0).contiguous().numpy()
        for start in range(0, len(frames), 2):
            yield frames[start : start + 2]


def frames_by_seed(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[bytes]]:
    """What is made from here on, as it was made last: without an output folder nothing else keeps
    it.
    """
    made: dict[int, list[bytes]] = {}
    inner = video_pipeline.checked

    def seen(job: VideoJob, pieces: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
        made[job.seed] = []
        for piece in inner(job, pieces):
            made[job.seed].append(piece.tobytes())
            yield piece

    monkeypatch.setattr(video_pipeline, "checked", seen)
    return made


class Studios:
    """Stands in for `registry.load_video`; `models` are those it opened."""

    def __init__(self) -> None:
        self.models: list[FakeVideo] = []
        self.template = "plain"

    def __call__(self, choice: ModelChoice, **_: Any) -> FakeVideo:
        self.models.append(FakeVideo(choice.model, self.template))
        self.models[-1].dtype_name = precision(choice)[1]
        return self.models[-1]
