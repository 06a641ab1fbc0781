"""Read a checkpoint folder in diffusers' layout, from its JSON files and headers; no torch.

    model_index.json                   which pipeline, and each component's library and class; or
                                       modular_model_index.json (see `modular`)
    transformer/ vae/                  config.json + diffusion_pytorch_model.safetensors
    text_encoder/ text_encoder_2/      config.json + model.safetensors
    image_encoder/                     the same, if a video starts from a picture
    tokenizer/ scheduler/ guider/      configuration only, as are image_processor/ and
                                       feature_extractor/

Only components of the libraries named below are loaded; code in a checkpoint (`auto_map`, a
component of its own module) is never imported. Some checkpoints name a known pipeline, but would
fail in the middle of a job or make wrong films: they are refused by what their JSON files say.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from hyimg_cli.errors import CheckpointError, installed_version
from hyimg_cli.loading import checkpoint
from hyimg_cli.loading.declared import unknown_options
from hyimg_cli.loading.scaled import unscaled_index
from hyimg_cli.loading.single_file import SingleFile
from hyimg_cli.models.architectures import architecture_of
from hyimg_cli.models.common.config import Config
from hyimg_cli.models.diffusers_video.modular import plain_entry
from hyimg_cli.spec import digest

HUNYUAN_VIDEO15 = "hunyuan_video15"
WAN = "wan"
_STEMS = {"diffusers": "diffusion_pytorch_model", "transformers": checkpoint.STEM}
_CONFIGS = {
    "scheduler": "scheduler_config.json",
    "guider": "guider_config.json",
    "image_processor": "preprocessor_config.json",
    "feature_extractor": "preprocessor_config.json",
}
# Blocks of a network that are on the device while one of them works.
_AT_ONCE = 2
# A list of at most so many layers, all of them small, is none of blocks.
_FEW = 3
# Of a block's tensor, the name of its list and its number.
_BLOCK = re.compile(r"(\D+?)\.(\d+)\.")
_WITHOUT_WEIGHTS = ("tokenizer", "tokenizer_2", "processor", "text_processor", *_CONFIGS)
_TOKENIZER_SUFFIXES = (".json", ".jinja", ".txt", ".model")
_WAN_NETWORK = frozenset({"WanTransformer3DModel"})
_KNOWN = {
    HUNYUAN_VIDEO15: {
        "transformer": frozenset({"HunyuanVideo15Transformer3DModel"}),
        "vae": frozenset({"AutoencoderKLHunyuanVideo15"}),
        "text_encoder": frozenset({"Qwen2_5_VLTextModel"}),
        "text_encoder_2": frozenset({"T5EncoderModel"}),
        "tokenizer": frozenset({"Qwen2Tokenizer", "Qwen2TokenizerFast"}),
        "tokenizer_2": frozenset({"ByT5Tokenizer"}),
        "scheduler": frozenset({"FlowMatchEulerDiscreteScheduler"}),
        "guider": frozenset({"ClassifierFreeGuidance"}),
        "image_encoder": frozenset({"SiglipVisionModel"}),
        "feature_extractor": frozenset({"SiglipImageProcessor", "SiglipImageProcessorFast"}),
    },
    WAN: {
        "transformer": _WAN_NETWORK,
        "transformer_2": _WAN_NETWORK,
        "vae": frozenset({"AutoencoderKLWan"}),
        "text_encoder": frozenset({"UMT5EncoderModel"}),
        "tokenizer": frozenset({"T5Tokenizer", "T5TokenizerFast"}),
        "scheduler": frozenset({"UniPCMultistepScheduler", "FlowMatchEulerDiscreteScheduler"}),
        "image_encoder": frozenset({"CLIPVisionModel"}),
        "image_processor": frozenset({"CLIPImageProcessor", "CLIPImageProcessorFast"}),
    },
}
_START = "ImageToVideoPipeline"
FAMILIES = {
    "HunyuanVideo15Pipeline": HUNYUAN_VIDEO15,
    f"HunyuanVideo15{_START}": HUNYUAN_VIDEO15,
    "WanPipeline": WAN,
    f"Wan{_START}": WAN,
}
_OPTIONAL = frozenset({"transformer_2"})
# An encoder's results are recomputed if the format or a version differs.
_ENCODING_FORMAT = 1
_LIBRARIES = ("torch", "transformers", "diffusers", "tokenizers")
# Networks that read a video's start picture: only in an i2v pipeline, and not in Wan 2.2's.
_OF_PICTURES = frozenset({"image_encoder", "image_processor", "feature_extractor"})
_OF_ANOTHER_LAYOUT = (
    "use the edition for diffusers, for example "
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers or hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v"
)
_OTHER_FILES = "download the checkpoint again with all its JSON files, or use another edition of it"
# A tile is 256 pixels and overlaps the next one by 64; half a tile is half of both. All of these
# are whole latent cells.
_SHARED_PIXELS = 32
# For a picture's latents: four frames per latent frame.
_MASK_CHANNELS = 4


@dataclass(frozen=True)
class Component:
    """One part of a checkpoint: its folder, and its library and class.

    `weights`: the file that replaces the folder's weights. `built_in`: the configuration of a part
    that diffusers' blocks make themselves, without files.
    """

    folder: Path
    library: str
    class_name: str
    weights: SingleFile | None = None
    built_in: Mapping[str, Any] | None = field(default=None, hash=False)

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def stem(self) -> str:
        """The name of its weight files, before `.safetensors`."""
        return _STEMS[self.library]

    @property
    def has_weights(self) -> bool:
        return self.name not in _WITHOUT_WEIGHTS

    def config(self) -> Config:
        """Return the component's configuration. Raises CheckpointError if it is missing."""
        if self.built_in is not None:
            return Config(self.built_in, self.folder)
        return Config.read(self.folder / _CONFIGS.get(self.name, "config.json"))

    def identity(self) -> str:
        """A digest of everything in it that affects its results."""
        if self.built_in is not None:
            return digest.of_json(dict(self.built_in))
        if self.weights is not None:
            own = checkpoint.file_digest(self.folder / "config.json")
            return digest.of_json([own, checkpoint.file_fingerprint(self.weights.path)])
        if self.has_weights:
            return checkpoint.fingerprint(self.folder, self.stem)
        files = sorted(f for f in self.folder.glob("*") if f.suffix in _TOKENIZER_SUFFIXES)
        return digest.of_json([[file.name, checkpoint.file_digest(file)] for file in files])

    def tensors(self) -> dict[str, checkpoint.TensorInfo]:
        """Return the headers of its weight files. Raises CheckpointError.

        Of a single file they may have the names of the model's authors.
        """
        if self.weights is not None:
            return unscaled_index(self.weights, architecture_of(self.weights).prefix)
        return checkpoint.tensor_index(self.folder, self.stem)

    def known_tensors(self) -> dict[str, checkpoint.TensorInfo]:
        """Return the headers of its weight files, without missing files."""
        try:
            return self.tensors()
        except CheckpointError:
            return {}

    def stored_bytes(self) -> int | None:
        """Return the bytes of its weights, by the index's sum if it has one; None without them.

        Raises CheckpointError if they are only available as pickles.
        """
        if self.weights is not None:
            return checkpoint.weight_bytes(self.weights.tensors)
        promised = checkpoint.promised_bytes(self.folder, self.stem)
        kinds = {".safetensors", *checkpoint.PICKLE_SUFFIXES}
        if promised is None and any(file.suffix in kinds for file in self.folder.glob("*")):
            return checkpoint.weight_bytes(self.tensors())
        return promised


def count_in_groups(tensors: Mapping[str, checkpoint.TensorInfo]) -> int:
    """Return how many numbers of a network are at work at most if its blocks come one by one.

    They are those of its two largest blocks, and all that is in no block: also the few layers of a
    list that are less than half of the largest block, such as those of an embedding.
    """
    lists, beside = defaultdict[str, Counter[str]](Counter), 0
    for name, tensor in tensors.items():
        block, count = _BLOCK.match(name), math.prod(tensor.shape)
        if block is None:
            beside += count
        else:
            lists[block[1]][block[2]] += count
    sizes, most = list[int](), max((max(one.values()) for one in lists.values()), default=0)
    for one in lists.values():
        if len(one) > _FEW or 2 * max(one.values()) >= most:
            sizes += one.values()
        else:
            beside += one.total()
    return beside + sum(sorted(sizes)[-_AT_ONCE:])


@dataclass(frozen=True)
class CheckpointLayout:
    """A checkpoint's family and components, each checked to be one that hyimg can load."""

    folder: Path
    family: str
    components: dict[str, Component]
    index: Config

    @property
    def starts_from_pictures(self) -> bool:
        """True if its pipeline is an image-to-video one."""
        return str(self.index.values["_class_name"]).endswith(_START)

    @property
    def expands_timesteps(self) -> bool:
        """True if every patch has its own timestep: Wan 2.2's 5B model."""
        return self.index.flag("expand_timesteps", False)

    @property
    def boundary_ratio(self) -> float | None:
        """The noise level from which Wan 2.2's second transformer works; None without one."""
        name = "boundary_ratio"
        return self.index.number(name) if self.index.has(name) else None

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """Warnings for every job: options that the installed libraries do not know."""
        found = []
        for name, part in self.components.items():
            if not (part.has_weights or name in ("scheduler", "guider")):
                continue
            own = part.config()
            if options := unknown_options(own.values, part.library, part.class_name):
                version = f"{part.library} {installed_version(part.library)}"
                what = (
                    f"{name}/{Path(own.where).name} has {', '.join(options)}, unknown to {version}"
                )
                newer = f"a newer {part.library} may follow it"
                found.append(f"{what}, which ignores it: results may differ; {newer}")
        return tuple(found)

    def fingerprint(self, first: str) -> str:
        """Return a digest of every file that matters; `first`: other folders' fingerprints."""
        parts = sorted((name, part.identity()) for name, part in self.components.items())
        extra = self.folder / "card.json"
        card = checkpoint.file_digest(extra) if extra.exists() else None
        return digest.of_json([first, card, parts])

    @cached_property
    def identity_of(self) -> Callable[[str], str]:
        """Return a component's digest by its name; its files are read once."""
        return cache(lambda name: self.components[name].identity())

    def encoding_key(self, dtype: str, device: str, **parts: Any) -> str:
        """Return a digest of `parts` and of everything that decides the encoders' results.

        `device`: "cpu" or a GPU's name, which decides a kernel's rounding.
        """
        facts = {"format": _ENCODING_FORMAT, "family": self.family, "dtype": dtype}
        return digest.of_json({**facts, "device": device, "libraries": _libraries(), **parts})

    def weights(self) -> list[tuple[Path, str]]:
        """Return the folder and the stem of each component's weight files."""
        return [(part.folder, part.stem) for part in self.components.values() if part.has_weights]

    def tensors(self) -> dict[str, dict[str, checkpoint.TensorInfo]]:
        """Return the headers of each component's weight files."""
        return {n: part.tensors() for n, part in self.components.items() if part.has_weights}


@cache
def _libraries() -> list[str]:
    return [f"{name} {installed_version(name)}" for name in _LIBRARIES]


def is_in_layout(folder: Path) -> bool:
    """True if the folder is in diffusers' layout."""
    return checkpoint.parts_index(folder).exists()


def read_layout(folder: Path) -> CheckpointLayout:
    """Read the checkpoint in `folder`.

    Raises CheckpointError for another pipeline or foreign code.
    """
    if not is_in_layout(folder):
        index = checkpoint.PARTS_INDEXES[0]
        what = f"{index} is missing, so this is not a checkpoint in diffusers' layout"
        raise checkpoint.fault("missing", what, folder, _OF_ANOTHER_LAYOUT)
    own = Config.read(checkpoint.parts_index(folder))
    pipeline = own.text("_class_name")
    if pipeline not in FAMILIES:
        what = f"the pipeline {pipeline!r} in {Path(own.where).name} is not supported"
        raise checkpoint.fault("family", what, folder, f"use one of {', '.join(FAMILIES)}")
    family = FAMILIES[pipeline]
    optional = _OPTIONAL
    if family == WAN or not pipeline.endswith(_START):
        optional |= _OF_PICTURES
    components = {
        name: component_of(folder, name, own.values.get(name), classes)
        for name, classes in _KNOWN[family].items()
        if not (name in optional and own.values.get(name) in (None, [None, None]))
    }
    return CheckpointLayout(folder, family, components, own)


def component_of(folder: Path, name: str, entry: Any, classes: Set[str]) -> Component:
    """Return the part that an index lists, of one of `classes`. Raises CheckpointError."""
    index, entry = checkpoint.parts_index(folder).name, plain_entry(folder / name, entry)
    match entry:
        case [str(library), str(class_name)] if library in _STEMS and class_name in classes:
            pass
        case _:
            what, known = f"the {name} in {index} is {entry!r}", " or ".join(sorted(classes))
            hint = f"use {known}; code in a checkpoint is never executed"
            raise checkpoint.fault("component", what, folder, hint)
    if not (folder / name).is_dir():
        checkpoint.refuse_dead_link(folder / name)
        what = f"the folder {name}/ is missing ({index} names it)"
        hint = "download the checkpoint again with all folders, or copy the missing one"
        raise checkpoint.fault("missing", what, folder, hint)
    return Component(folder / name, library, class_name)


def shift_name(scheduler: Component) -> str:
    """Return the scheduler's own name for its flow shift."""
    return "shift" if scheduler.class_name == "FlowMatchEulerDiscreteScheduler" else "flow_shift"


def refuse_quantized(layout: CheckpointLayout) -> None:
    """Raise CheckpointError for components that are stored quantized."""
    for component in layout.components.values():
        if not component.has_weights:
            continue
        # A library would load it with its own quantizer, which has not been tested here.
        method = component.config().table("quantization_config", {})
        if method.values:
            how = method.text("quant_method", "unnamed")
            what = f"the {component.name} is quantized ({how}), which is not supported"
            hint = "use the original checkpoint"
            raise checkpoint.fault("quantized", what, component.folder, hint)


def refuse_unsupported(layout: CheckpointLayout) -> None:
    """Raise CheckpointError, with the reason, for a checkpoint that cannot be run."""
    refuse_quantized(layout)
    find_faults = _find_hunyuan_faults if layout.family == HUNYUAN_VIDEO15 else _find_wan_faults
    network, vae = layout.components["transformer"].config(), layout.components["vae"].config()
    for what in find_faults(layout, network, vae):
        raise checkpoint.fault("family", what, layout.folder, _OTHER_FILES)


def _find_hunyuan_faults(layout: CheckpointLayout, network: Config, vae: Config) -> Iterator[str]:
    expected = "i2v" if layout.starts_from_pictures else "t2v"
    task = network.text("task_type", "t2v")
    if task != expected:
        # Its pipeline would run it and silently ignore the picture.
        yield f"the transformer is for {task!r}, but the pipeline is for {expected!r}"
    if network.flag("use_meanflow", False) and expected == "t2v":
        # Its pipeline for text-to-video silently leaves out the second timestep.
        yield "the transformer is step-distilled (use_meanflow), which its t2v pipeline cannot run"
    # A VAE that could not be built, or would decode frames of another size.
    cell = vae.count("spatial_compression_ratio", 16)
    stride = vae.count("temporal_compression_ratio", 4)
    levels = len(vae.counts("block_out_channels", (1,) * 5))
    yield from _find_cell_fault(cell)
    if cell > 2 ** (levels - 1) or stride not in (1, 2, 4, 8, 16) or stride > cell:
        yield f"the VAE's {levels} levels cannot shrink {cell} pixels and {stride} frames to one"
    if (channels := vae.count("out_channels", 3)) != 3:
        yield f"the VAE decodes {channels} channels; expected 3"


def _find_wan_faults(layout: CheckpointLayout, network: Config, vae: Config) -> Iterator[str]:
    made = vae.count("z_dim", 16)
    reads_latents = layout.starts_from_pictures and not layout.expands_timesteps
    # The library reads these numbers separately.
    cell, patch = vae.count("scale_factor_spatial", 8), vae.count("patch_size", 1)
    levels = len(vae.counts("dim_mult", (1,) * 4))
    halves = vae.flags("temperal_downsample", (False, True, True))
    yield from _find_cell_fault(cell)
    taken, stride = network.count("in_channels", 16), vae.count("scale_factor_temporal", 4)
    for name, found, expected in (
        ("in_channels", taken, 2 * made + _MASK_CHANNELS if reads_latents else made),
        ("scale_factor_spatial", cell, 2 ** (levels - 1) * patch),
        ("scale_factor_temporal", stride, 2 ** sum(halves)),
        ("out_channels", vae.count("out_channels", 3), 3 * patch**2),
        ("length of temperal_downsample", len(halves), levels - 1),
        ("length of latents_mean", len(vae.numbers("latents_mean", (1.0,) * 16)), made),
        ("length of latents_std", len(vae.numbers("latents_std", (1.0,) * 16)), made),
    ):
        if found != expected:
            yield f"{name} is {found}; expected {expected} by the other values of config.json"
    reads = network.has("image_dim") or network.has("added_kv_proj_dim")
    if reads and not {"image_encoder", "image_processor"} <= layout.components.keys():
        yield "the image encoder, which the transformer needs, is missing"
    has_boundary = layout.boundary_ratio is not None
    if has_boundary != ("transformer_2" in layout.components):
        is_there, is_not = ("boundary_ratio", "transformer_2")[:: 1 if has_boundary else -1]
        yield f"model_index.json has {is_there} but not {is_not}; expected both or neither"


def _find_cell_fault(cell: int) -> Iterator[str]:
    if _SHARED_PIXELS % cell:
        yield f"the VAE's latent cells of {cell} pixels do not fit into tiles (overlap 64 or 32)"
