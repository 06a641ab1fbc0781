"""Picture editors of diffusers, run by diffusers' own modular blocks.

A job's inputs select the blocks, which are named by stage:

    text_encoder.resize ▸ text_encoder.encode      a condition: texts with the pictures they see
    vae_encoder.preprocess ▸ vae_encoder.encode    another: source pictures
    denoise.input ▸ .. ▸ denoise.denoise           the last one is the loop over timesteps
    denoise.after_denoise ▸ decode.decode ▸ ..     latents to pixels

No family is named here. A condition depends on the inputs that its blocks declare, as `record`
lists them. The loop runs one timestep per call, as a loop of length one. Both give the bits of the
classic pipeline.
"""

# Legend: H W pixels, C colours
from collections.abc import Hashable, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import diffusers
import numpy as np
import torch
from diffusers.modular_pipelines.modular_pipeline import PipelineState
from torch import Tensor, nn
from torch.nn import functional
from torchvision.transforms.functional import (  # type: ignore[import-untyped]
    to_pil_image,
    to_tensor,
)

from hyimg_cli.cache.disk import PROMPT_EMBEDDINGS, SOURCE_IMAGES
from hyimg_cli.diffusion.step_cache import VelocityCache
from hyimg_cli.errors import JobError, OutputError
from hyimg_cli.kv.slices import Slice
from hyimg_cli.kv.tree import KVTree
from hyimg_cli.media.images import Pixels, stretch
from hyimg_cli.models.diffusers_image.inpaint import Inpainting, inpainting_of
from hyimg_cli.models.diffusers_image.joined import joined_state
from hyimg_cli.models.diffusers_image.own_blocks import OWN_BLOCKS
from hyimg_cli.models.diffusers_image.prefix import PREFIXES, Prefix
from hyimg_cli.models.diffusers_image.record import (
    NEGATIVE,
    OF_PICTURES,
    Condition,
    EditorFolder,
    shifted,
)
from hyimg_cli.models.diffusers_image.source_encoder import SourceEncoder
from hyimg_cli.models.diffusers_video.encoders import CheckpointEncoder, cut_note, device_class
from hyimg_cli.models.diffusers_video.layout import Component
from hyimg_cli.models.diffusers_video.lora import Adapters
from hyimg_cli.models.diffusers_video.networks import load_network
from hyimg_cli.models.diffusers_video.start import read_given
from hyimg_cli.models.diffusers_video.weights import (
    configured,
    empty_module,
    load_target,
    load_weights,
)
from hyimg_cli.models.latent import LatentDenoiser, LatentModel, PromptEmbedding
from hyimg_cli.settings.run import ModelChoice
from hyimg_cli.spec.events import BranchTokens
from hyimg_cli.spec.job import ImageJob, Size, View

_EMBEDS = frozenset({"prompt_embeds", "negative_prompt_embeds"})
_SIDES = ("height", "width")
# What blocks call the latents of sources.
_SOURCE_LATENTS = ("image_latents", "image_cond_latents")


class BlockEncoder(CheckpointEncoder):
    """The stages before denoising, as a `ConditionEncoder`."""

    def __init__(self, model: "LatentImageModel") -> None:
        super().__init__(model.layout, model.place)
        self._model = model
        # Warnings of the tokenizers that cut the current text.
        self.cuts: list[str] = []

    def key(self, condition: Condition) -> str:
        model, device = self._model, device_class(self.place.device)
        return model.folder.encoding_key(condition, model.choice, self.place.dtype_name, device)

    @torch.no_grad()
    def encode(self, condition: Condition) -> PromptEmbedding:
        model, inputs = self._model, dict[str, Any](condition.options)
        field, text = condition.text or ("", "")
        if field:
            # A negative text is encoded as a prompt. Some blocks take an empty string for no text,
            # but not a list with one.
            inputs["prompt"] = text or [text]
        given, notes = read_given(condition.images, keeps_alpha=model.kind.reads_alpha)
        if given:
            size = condition.size
            pixels = [stretch(one.pixels, size) if size else one.pixels for one in given]
            pictures = list(map(to_pil_image, pixels))
            if model.kind.layers:  # its VAE encodes transparency, of every picture
                pictures = [one.convert("RGBA") for one in pictures]
            inputs["image"] = pictures if len(pictures) > 1 else pictures[0]
        blocks = model.blocks(condition)
        self.encoder_runs[condition.stage] += 1
        model.guide(is_on=False)
        self.cuts.clear()
        try:
            state = model.run(blocks, PipelineState(inputs))
        except JobError as error:  # the blocks know it as a prompt
            error.where = field or error.where
            raise
        made = dict[str, Tensor]()
        for name in {out.name for block in blocks for out in block.intermediate_outputs}:
            value = state.get(name)
            for number, one in enumerate(value if isinstance(value, list) else [value]):
                if isinstance(one, Tensor):
                    made[f"{name}.{number}" if isinstance(value, list) else name] = one.cpu()
        # Some blocks derive the size from a picture if the line has none.
        made |= {name: torch.tensor(state.get(name)) for name in _SIDES if state.get(name)}
        if field == NEGATIVE:
            outputs = {out.name for block in blocks for out in block.intermediate_outputs}
            named = {f"negative_{name}": tensor for name, tensor in made.items()}
            made = {name: made for name, made in named.items() if name.partition(".")[0] in outputs}
        most = dict(condition.options).get("max_sequence_length")
        for name in sorted(_EMBEDS & made.keys()):
            rows, mask = made[name].shape[1], made.get(f"{name}_mask")
            # Texts without a mask are filled up to that number.
            if rows == most and mask is not None:
                told = f"a text fills the {most} tokens that its encoder reads"
                self.cuts.append(f"{told}; the rest was ignored")
            if rows > model.kind.most_rows:
                what = (
                    f"text and pictures take {rows:,} rows; the limit is {model.kind.most_rows:,}"
                )
                where = name.removesuffix("_embeds")
                raise JobError(what, where=where, hint="shorten it", code="job.too-long")
        # A text that is read twice is cut twice.
        return PromptEmbedding(self.key(condition), made, (*notes, *dict.fromkeys(self.cuts)))

    def _drop_networks(self) -> bool:
        own = [name for name in self.layout.components if name.startswith("text_encoder")]
        return True in [self._model.release(name) for name in own]


def tell_cuts(tokenizer: Any, what: str, told: list[str]) -> None:
    """Make a tokenizer append a warning to `told` when it cuts a text.

    The blocks cut silently.
    """
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # a processor's
    encode = tokenizer._encode_plus

    def encode_and_tell(*texts: Any, **options: Any) -> Any:
        made = encode(*texts, **options)
        for one in made.encodings or ():
            # Without the tokens that mark a text's ends, which each part has.
            counts = [part.special_tokens_mask.count(0) for part in (one, *one.overflowing)]
            told.extend(cut_note(sum(counts), counts[0], what))
        return made

    tokenizer._encode_plus = encode_and_tell


class BlockDenoiser(LatentDenoiser):
    """A job's denoising, with a scheduler and a block state of its own.

    It may take the steps of other jobs, too: then `latents` have a row for each.
    """

    def __init__(
        self,
        model: "LatentImageModel",
        job: ImageJob,
        embeddings: Mapping[Condition, PromptEmbedding],
        scope: str,
    ) -> None:
        """Start the denoising; prefixes are shared within `scope`."""
        self._model = model
        blocks = model.stage("denoise", has_images=bool(job.images))
        at = next(n for n, block in enumerate(blocks) if hasattr(block, "loop_step"))
        before, self._loop, self._after = blocks[:at], blocks[at], blocks[at + 1 :]
        self._loop.set_progress_bar_config(disable=True)
        scheduler = model.layout.components["scheduler"]
        self.scheduler = configured(scheduler, **shifted(scheduler.config(), job.flow_shift))
        self._guidance, self._loras = (model.kind.is_guided(job), job.guidance_scale), job.lora
        self._use()
        inputs = {
            "generator": torch.Generator().manual_seed(job.seed),
            "num_inference_steps": job.num_inference_steps,
            "guidance_scale": job.guidance_scale,
            **model.kind.own_inputs(job, model.card),
        }
        if bucket := model.card.bucket_of(job.size):
            inputs |= {"height": bucket.size.height, "width": bucket.size.width}
        self._state = PipelineState(inputs)
        digests = dict(image for condition in embeddings for image in condition.images)
        for _, condition in model.folder.encodings(job, [digests[view] for view in job.views]):
            if condition.text or model.kind.most:
                model.put(self._state, condition, embeddings[condition])
        model.run(before, self._state)
        for name, value in self._state.values.items():
            if name.endswith("embeds_mask") and value is not None and value.all():
                # As in the classic pipeline: attention takes longer with a mask that masks nothing.
                self._state.set(name, None)
        # Inpainting may leave out the first steps.
        self._first = job.skipped_steps
        self._timesteps = self._tensor("timesteps")[self._first :]
        latents = self._tensor("latents")
        self._inpainting = None
        if job.inpaints:
            self._state.set("num_inference_steps", self.steps)
            self._inpainting = self._new_inpainting(job, digests, embeddings, latents)
            latents = self._inpainting.start()
        super().__init__(latents, VelocityCache(job.step_cache, [0] * self.steps))
        # K/V that are the same at each step, shared with other jobs in the model's tree.
        self._prefix: Prefix | None = None
        if kind := model.kind.prefix:
            root = f"{model.card.model} {model.dtype_name} {job.lora} of {scope!r}"
            self._prefix = PREFIXES[kind](model.have("transformer"), model.tree, root)
        self.scheduler.set_begin_index(self._first)
        self._index = 0

    def join(self, others: Sequence["BlockDenoiser"]) -> None:
        """Take the steps of other new jobs of the same form together with this one's."""
        every = [self, *others]
        self._state = joined_state([one._state for one in every])
        self.latents = torch.cat([one.latents for one in every])
        if self._inpainting:
            inpaintings = (one._inpainting for one in others)
            self._inpainting = self._inpainting.joined([one for one in inpaintings if one])

    @property
    def steps(self) -> int:
        return len(self._timesteps)

    @property
    def branches(self) -> list[BranchTokens]:
        """Return the rows of each guidance branch, if some are kept between steps."""
        return self._prefix.branches if self._prefix else []

    @torch.no_grad()
    def step(self, index: int, latents: Tensor) -> Tensor:
        self._use()
        self._index = index
        self._state.set("latents", latents)
        # One turn of the library's loop; its blocks get the step's own place in the schedule.
        self._state.set("timesteps", self._timesteps[index : index + 1])
        is_last = index + 1 == self.steps
        with self._prefix.attached(index) if self._prefix else nullcontext():
            self._model.run([self._loop, *(self._after if is_last else ())], self._state)
        if self._prefix and is_last:
            self._prefix.release()
        return self._tensor("latents")

    def restore(self, done: int, latents: Tensor, state: Mapping[str, Tensor]) -> None:
        self.scheduler.set_begin_index(self._first + done)
        super().restore(done, latents, state)

    def _loop_step(self, pipe: Any, state: Any, *, t: Tensor, **_first: int) -> tuple[Any, Any]:
        """Run the library's step, without the transformer if the step cache skips it.

        Blocks see the true index and all timesteps: some read the next one.
        """
        state.timesteps, at = self._timesteps, {"i": self._index, "t": t}
        for block in self._loop.sub_blocks.values():
            evaluates = any(one.name == "transformer" for one in block.expected_components)
            if evaluates and not self.velocities.steps[self._index]:
                (state.noise_pred,) = self.velocities.estimate(self._index)
                continue
            pipe, state = block(pipe, state, **at)
            if evaluates:
                self.velocities.keep(self._index, [state.noise_pred])
        if self._inpainting:
            state.latents = self._inpainting.blend(state.latents, self._index)
        return pipe, state

    def _new_inpainting(
        self,
        job: ImageJob,
        digests: Mapping[View, str],
        embeddings: Mapping[Condition, PromptEmbedding],
        noise: Tensor,
    ) -> Inpainting:
        kept = ((job.kept_view, digests[job.kept_view]),)
        (encoded,) = (
            tensor
            for one, made in embeddings.items()
            if one.text is None and one.images == kept
            for name, tensor in made.tensors.items()
            if name.partition(".")[0] in _SOURCE_LATENTS
        )
        values: Any = self._state.values
        drawn = Size(*(int(values[side]) for side in _SIDES))
        sigmas = self.scheduler.sigmas[self._first :]
        is_smooth = self._model.kind.smooths_masks
        return inpainting_of(job, encoded, noise, sigmas, drawn, is_smooth=is_smooth)

    def _tensor(self, name: str) -> Tensor:
        value: Any = self._state.get(name)
        assert isinstance(value, Tensor), f"the blocks make {name}"
        return value

    def _use(self) -> None:
        self._loop.loop_step = self._loop_step
        self._model.pipe.scheduler = self.scheduler
        self._model.guide(*self._guidance)
        self._model.adapters.use(self._loras)


class LatentImageModel(LatentModel):
    """A loaded editor. `tree` shares prefixes between jobs; None: each job has its own."""

    def __init__(self, folder: EditorFolder, choice: ModelChoice, parameter_count: int) -> None:
        """`parameter_count`: of its parts, which `check_all` has accepted."""
        self.folder, self.choice, self.parameter_count = folder, choice, parameter_count
        self.card, self.layout, self.kind = folder.card, folder.layout, folder.kind
        self.place = load_target(choice)
        library: Any = getattr(diffusers, self.kind.blocks, None)
        if library is None:  # its imports take a third of a second
            from hyimg_cli.models.diffusers_image import longcat

            library = getattr(longcat, self.kind.blocks)
        # The library would use the device of the first network, which may be offloaded.
        at_work = {"_execution_device": property(lambda _: self.device)}
        self.pipe: Any = type(library.__name__, (library,), at_work)()
        # Blocks of other stages read the configurations of these two.
        parts = self.layout.components
        self._absent = {name: empty_module(parts[name]) for name in ("transformer", "vae")}
        self.pipe.transformer, self.pipe.vae = self._absent.values()
        if self.kind.sigmas:
            self.pipe.update_components(sample_sigmas=list(self.kind.sigmas))
        self._blocks: dict[bool, dict[str, Any]] = {}
        self.encoder = BlockEncoder(self)
        self.tree: KVTree[Slice] | None = None

    @property
    def encoders(self) -> dict[str, BlockEncoder]:
        return dict.fromkeys((PROMPT_EMBEDDINGS, SOURCE_IMAGES), self.encoder)

    def conditions(self, job: ImageJob, digests: Sequence[str]) -> dict[Condition, str]:
        return {one: kind for kind, one in self.folder.encodings(job, digests)}

    @property
    def own_notes(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.folder.card.made_as,)))

    def notes(self, job: ImageJob) -> tuple[str, ...]:
        return self.folder.notes(job)

    @torch.no_grad()
    def denoiser(
        self, job: ImageJob, embeddings: Mapping[Condition, PromptEmbedding], scope: str = ""
    ) -> BlockDenoiser:
        return BlockDenoiser(self, job, embeddings, scope)

    @torch.no_grad()
    def denoiser_of(
        self, pictures: Sequence[tuple[ImageJob, Mapping[Condition, PromptEmbedding]]]
    ) -> BlockDenoiser:
        """Return the denoiser of jobs with one `batch_key`, and conditions of one form."""
        first, *others = (self.denoiser(*one) for one in pictures)
        first.join(others)
        return first

    def batch_key(self, job: ImageJob) -> Hashable | None:
        return self.folder.batch_key(job)

    @torch.no_grad()
    def decode_latents(self, job: ImageJob, latents: Tensor) -> list[Pixels]:
        """Decode latents into a picture, or into its layers from the lowest to the highest.

        uint8 [H, W, 3], or [H, W, 4] if the model draws RGBA.
        """
        if not torch.isfinite(latents).all():
            raise OutputError("the latents are not finite", code="output-image.not-finite")
        blocks = self.stage("decode", has_images=bool(job.images))
        given: dict[str, Any] = {"latents": latents, "output_type": "pil"}
        if canvas := self.kind.canvas(job):
            given["reference_crop"] = [canvas.box]
        state = self.run(blocks, PipelineState(given))
        pictures: Any = state.get("images")
        drawn = pictures[0] if self.kind.layers else pictures[:1]
        return [np.asarray(one) for one in drawn]

    @torch.no_grad()
    def round_trip(self, pixels: Pixels, digest: str) -> Pixels:
        """Encode and decode a picture with the VAE, to compare an edit with it."""
        vae = self.have("vae")
        self.place.offload.onload(vae)
        # Some VAEs read an alpha channel, and some are VAEs of videos.
        planes = vae.config.get("in_channels", 3)
        levels_CHW = to_tensor(pixels).to(self.device, vae.dtype) * 2 - 1
        levels_CHW = functional.pad(levels_CHW, (0, 0, 0, 0, 0, planes - 3), value=1)
        is_of_videos = "temperal_downsample" in vae.config
        seen = levels_CHW[None, :, None] if is_of_videos else levels_CHW[None]
        made = vae.decode(vae.encode(seen).latent_dist.mode()).sample
        made_CHW = made.reshape(levels_CHW.shape)[:3].float() / 2 + 0.5
        return np.asarray((made_CHW.clamp(0, 1).permute(1, 2, 0) * 255).round().byte().cpu())

    # --- the library's blocks

    def stage(self, stage: str, *, has_images: bool) -> list[Any]:
        """Return a stage's blocks in order, for jobs with or without source pictures."""
        has_images = has_images and self.kind.most > 0
        if has_images not in self._blocks:
            given: dict[str, Any] = {"prompt": ""} | ({"image": True} if has_images else {})
            blocks = dict(self.pipe.blocks.get_execution_blocks(**given).sub_blocks)
            if not self.kind.most:
                blocks[OF_PICTURES] = SourceEncoder()
            if self.kind.own_blocks:
                OWN_BLOCKS[self.kind.own_blocks](blocks)
            self._blocks[has_images] = blocks
        every = self._blocks[has_images].items()
        return [block for name, block in every if name.split(".")[0] == stage]

    def blocks(self, condition: Condition) -> list[Any]:
        """Return the blocks that make a condition."""
        has_images = bool(self.kind.fewest or condition.images)
        return self.stage(condition.stage, has_images=has_images)

    def run(self, blocks: Any, state: PipelineState) -> PipelineState:
        """Run blocks in order; a network is loaded when it is first needed."""
        for block in blocks:
            parts = [self.have(one.name) for one in block.expected_components]
            if networks := [part for part in parts if isinstance(part, nn.Module)]:
                self.place.offload.onload(*networks)
            _, state = block(self.pipe, state)
        return state

    def put(self, state: PipelineState, condition: Condition, found: PromptEmbedding) -> None:
        """Put a condition into a state as its blocks would leave it."""
        kinds = {
            out.name: out.kwargs_type
            for block in self.blocks(condition)
            for out in block.intermediate_outputs
        }
        for name, tensor in sorted(found.tensors.items()):
            own, _, number = name.partition(".")
            value: Any = tensor.to(self.device)
            if own in _SIDES:  # of several pictures, the first one decides
                state.set(own, state.get(own) or int(tensor))
                continue
            if number:  # an item of a list that several conditions of a stage share
                value = [*(state.get(own) or ()), value]
            state.set(own, value, kinds[own])

    def guide(self, is_on: bool, scale: float = 4.0) -> None:
        """Switch guidance on or off: the blocks' default differs from the classic pipeline's."""
        if "guider" in self.pipe.component_names:
            self.pipe.guider = self.pipe.guider.new(guidance_scale=scale, enabled=is_on)

    def release(self, name: str) -> bool:
        """Free a network, if it is loaded; its next use loads it again."""
        if getattr(self.pipe, name, None) is None:
            return False
        self.place.offload.unload()
        setattr(self.pipe, name, None)
        return True

    def load_weights(self, *, with_transformer: bool = True) -> None:
        for name in ("transformer", "vae") if with_transformer else ("vae",):
            self.have(name)

    @cached_property
    def adapters(self) -> Adapters:
        """The LoRAs of the current job."""
        return Adapters([self.have("transformer")], self.layout, self.place.offload.unload)

    def have(self, name: str) -> Any:
        """Return a part of the pipeline, and load it at its first use."""
        found, part = getattr(self.pipe, name, None), self.layout.components.get(name)
        if part is not None and found in (None, self._absent.get(name)):
            found = self._read(part)
            setattr(self.pipe, name, found)
        return found

    def _read(self, part: Component) -> Any:
        if not part.has_weights:
            tokenizer = self.encoder.tokenizer(part.name)
            if part.name.startswith("tokenizer"):
                encoder = part.name.replace("tokenizer", "text_encoder")
                tell_cuts(tokenizer, f"the text for {encoder}", self.encoder.cuts)
            return tokenizer
        if part.name == "transformer":
            return load_network(part, self.place, self.choice)
        is_of_texts = part.name.startswith("text_encoder")
        prepare = self._leave_out_unread if is_of_texts else None
        network = load_weights(part, self.place, prepare=prepare)
        if part.name == "vae" and self.choice.vae_use_tiling:
            network.enable_tiling()
        return network

    def _leave_out_unread(self, network: Any) -> None:
        """Remove what the blocks never read from a text encoder: its head, and its last layers."""
        if hasattr(network, "lm_head"):
            network.lm_head = nn.Identity()
        if self.kind.text_layers:
            decoder = network.get_decoder()
            decoder.layers = decoder.layers[: self.kind.text_layers]
