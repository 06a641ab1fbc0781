"""A second family that writes text and draws: bytes for tokens, one size, no ratio token,
branches of different lengths, guidance that ends half way. It uses only what all families have
in common.
"""

# Legend: D width, V vocabulary, C channel, Y X latent rows and columns, G branch
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from hyimg_cli.diffusion.denoise import DenoisePlan
from hyimg_cli.diffusion.schedule import Schedule
from hyimg_cli.kv.arena import CPU_PAGE, Arena, Storage
from hyimg_cli.kv.buffer import Buffer
from hyimg_cli.kv.segments import Segment, TextSegment
from hyimg_cli.manifest.cost import JobTokens
from hyimg_cli.models.common.model import DecoderModel
from hyimg_cli.models.family import Family, ImageCheckpoint
from hyimg_cli.models.protocols import BranchSequence, Canvas, TextPrompt, TextScript
from hyimg_cli.spec.card import Bucket, ModelCard, SamplingDefaults
from hyimg_cli.spec.job import Size
from hyimg_cli.spec.options import OF_STEPS, OF_TEXT

THINK, END, WIDTH, CELLS = 256, 257, 8, 4
SQUARE = Bucket(0, Size(32, 32))
DRAWN: Any = {"num_inference_steps": 3, "guidance_scale": 2.0, "flow_shift": 1.0}
WRITTEN: Any = {"bot_task": "think", "top_k": 0, "top_p": 1.0, "max_new_tokens": 12}
SAID: Any = {"drop_think": False, "use_system_prompt": "None"}
DEFAULTS = SamplingDefaults(**DRAWN, **WRITTEN, **SAID, temperature=1.0)
FACTS = (True, False, (SQUARE,), 8, 0, 64, 8000, 4096, END + 1, DEFAULTS)
FOLLOWS = OF_STEPS | OF_TEXT | {"negative_prompt"}


def prompt_ids(job: Any) -> tuple[int, ...]:
    return (*job.prompt.encode(), *([THINK] if job.writes_text else []))


def branches(job: Any, text: Any) -> tuple[BranchSequence, ...]:
    conditional, negative = (*job.prompt.encode(), *text), (*job.negative_prompt.encode(), END)
    rows = [conditional, negative][: 1 + (job.guidance_scale > 1)]
    return tuple(BranchSequence(ids, len(ids), len(ids) + CELLS**2) for ids in rows)


class ToyCheckpoint(ImageCheckpoint):
    def __init__(self, folder: Path, model: str) -> None:
        self.folder, self.card = folder, ModelCard(model, "toy", "toy", *FACTS, FOLLOWS)

    def count(self, job: Any, source_sizes: Any, assumed_think: int) -> JobTokens:
        prompt, text = len(prompt_ids(job)), assumed_think * job.writes_text
        return JobTokens(
            ar_prefill=prompt * job.writes_text,
            positive=prompt + text,
            step_rows=CELLS**2,
            branches=1 + (job.guidance_scale > 1),
            assumed_think=text,
        )

    def prefixes(self, job: Any) -> list[list[Segment]]:
        rows = [prompt_ids(job)] if job.writes_text else [own.ids for own in branches(job, ())]
        return [self.segments(None, ids, (), len(ids) - 1) for ids in rows]

    def segments(self, layout: Any, ids: Any, digests: Any, stop: int) -> list[Segment]:
        return [TextSegment(tuple(ids[:stop]))] if stop > 0 else []

    def load(self, choice: Any, *, is_batch_invariant: bool, pool: Any) -> "ToyModel":
        return ToyModel(self, load_file(self.folder / "model.safetensors")["table"])


class ToyModel(DecoderModel):
    dtype_name, layer_devices, rows_seen = "float32", (torch.device("cpu"),), 0

    def __init__(self, prompter: ToyCheckpoint, table_VD: torch.Tensor) -> None:
        self.prompter, self.card = prompter, prompter.card
        self.table_VD, self.parameter_count = table_VD, table_VD.numel()
        kind = {"kv_heads": 1, "head_dim": WIDTH, "dtype": torch.float32}
        self.kept = Arena(Storage(devices=self.layer_devices, **kind), CPU_PAGE)

    @property
    def arena(self) -> Arena:
        return self.kept

    def script(self, job: Any) -> TextScript:
        return TextScript((THINK,), END)

    def decode_text(self, ids: Any) -> str:
        return "".join({THINK: "<think>", END: "</think>"}.get(id_) or chr(id_) for id_ in ids)

    def opening(self, job: Any, sources: Any) -> TextPrompt | None:
        return TextPrompt(ids := prompt_ids(job), len(ids) + 64) if job.writes_text else None

    def prefill(self, prefills: Any) -> list[torch.Tensor]:
        return [self._state(one.ids, one.buffer, one.stop) for one in prefills]

    def _state(self, ids: Any, buffer: Any, stop: int) -> torch.Tensor:
        for id_ in ids[buffer.length : stop]:
            row_11D, at = self.table_VD[id_][None, None], buffer.length
            buffer.reserve(at + 1)
            new = buffer.span(at, at + 1)
            self.arena.storage.write(0, new, row_11D * (1 + at / 7), row_11D)
            buffer.commit(at + 1)
            self.rows_seen += 1
        keys_TD, values_TD = self._rows(buffer)
        return torch.softmax(keys_TD @ self.table_VD[ids[stop - 1]], dim=0) @ values_TD

    def _rows(self, buffer: Buffer) -> list[torch.Tensor]:
        """Keys and values, [T, D] each."""
        rows = self.arena.storage.read(0, buffer.span(0, buffer.length))
        return [side_TKD[:, 0] for side_TKD in rows]

    def feed(self, runs: Any) -> None:
        for context, ids in runs:
            known = [*[0] * context.buffer.length, *map(int, ids)]
            context.hidden_M = self._state(known, context.buffer, len(known))

    def text_logits(self, contexts: Any) -> torch.Tensor:
        return torch.stack([self.table_VD @ context.hidden_M for context in contexts])

    def canvas(self, job: Any, sources: Any, text: Any) -> Canvas:
        return Canvas(SQUARE, branches(job, text.ids or ()))

    def branch(self, layout: Any, buffer: Buffer) -> torch.Tensor:
        return self._rows(buffer)[1].mean(dim=0)

    def denoise_plan(self, job: Any, canvas: Canvas, branches: int) -> DenoisePlan:
        noise_CYX = torch.randn(3, CELLS, CELLS, generator=torch.Generator().manual_seed(job.seed))

        def guidance(velocity_GCYX: torch.Tensor, step: Any) -> torch.Tensor:
            scale = job.guidance_scale if step.sigma > 0.5 else 1.0
            return velocity_GCYX[-1] + scale * (velocity_GCYX[0] - velocity_GCYX[-1])

        return DenoisePlan(noise_CYX, Schedule(job.num_inference_steps, job.flow_shift), guidance)

    def velocities(self, pictures: Any) -> list[torch.Tensor]:
        ramp_YX, found = torch.linspace(-1, 1, CELLS**2).view(CELLS, CELLS), []
        for one in pictures:
            drawn = [torch.tanh(mean_D[:3, None, None] + ramp_YX) for mean_D in one.branches]
            away = torch.stack([one.latents_CYX - shown_CYX for shown_CYX in drawn])
            found.append(0.8 * away / one.step.sigma)
        return found

    def decode_latents(self, latents_CYX: torch.Tensor) -> torch.Tensor:
        levels_YXC = (latents_CYX / 2 + 0.5).clamp(0, 1).permute(1, 2, 0)
        return levels_YXC.repeat_interleave(8, 0).repeat_interleave(8, 1)


TOY = Family("toy", "pictures", ToyCheckpoint)
