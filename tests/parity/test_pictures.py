"""Golden cases 7 to 12 and 14: first step, later steps, whole runs, KV reuse, distilled model."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from kv_rows import read
from layouts import shared_length
from masks import visibility
from parity.golden_layouts import Grids, layout_of, target_grid
from safetensors.torch import save_file
from torch import Tensor

from hyimg_cli.diffusion.denoise import DenoisePlan, DenoiseState, denoise_step
from hyimg_cli.diffusion.guidance import CFG, guided
from hyimg_cli.diffusion.schedule import Schedule, Step
from hyimg_cli.kv.arena import Storage
from hyimg_cli.loading.checkpoint import tensor_index
from hyimg_cli.models.common.spans import Grid, query_spans
from hyimg_cli.models.hunyuan_image3.model import Branch
from hyimg_cli.models.hunyuan_image3.rope import positions
from hyimg_cli.models.hunyuan_image3.sequence import Layout
from hyimg_cli.models.hunyuan_image3.vision import VisionInputs
from hyimg_cli.models.hunyuan_image3.weights import load
from hyimg_cli.models.protocols import DenoiseInput, Prefill

pytestmark = pytest.mark.parity


@dataclass
class Scene:
    """A case's network, layout, source rows and settings, ready to be computed."""

    case: Any
    network: Any
    layout: Layout
    sources: list[Any]
    guidance: float
    shift: float

    @property
    def grid(self) -> Grid:
        assert self.layout.target is not None
        return self.layout.target.image.grid

    def branches(self) -> list[Branch]:
        """Every branch computed from nothing, as `generate --no-kv-reuse` does."""
        rows = [self.layout.ids, self.layout.unconditional_ids]
        count = 1 if self.network.arch.cfg_distilled else 2
        return [self._branch(ids, self.network.new_buffer()) for ids in rows[:count]]

    def _branch(self, ids: Any, buffer: Any) -> Branch:
        assert self.layout.target is not None
        self.network.prefill(
            [Prefill(self.layout, ids, self.sources, buffer, self.layout.target.live_start)]
        )
        return self.network.branch(self.layout, buffer)

    def velocity(self, latents: Tensor, step: Step, branches: list[Branch]) -> Tensor:
        return self.network.velocity([DenoiseInput(latents, step, self.guidance, branches)])[0]


@pytest.fixture
def open_scene(
    open_case: Any, network: Any, vocabulary: Any, arch: Any, generation: dict[str, Any]
) -> Any:
    def opener(
        name: str, *, fallback: Any = None, with_network: Any = None, borrowed: bool = False
    ) -> Scene:
        case = open_case(name, borrowed=borrowed)
        given = case if "input_ids" in case else fallback
        rows = given["input_ids"].tolist()
        sources = _sources(given)
        grids = Grids(
            target=target_grid(given),
            vae=tuple(Grid(*latents.shape[-2:]) for latents, _ in sources),
            vit=tuple(inputs.grid for _, inputs in sources),
        )
        layout = layout_of(
            rows[0],
            rows[-1],
            grids=grids,
            vocabulary=vocabulary,
            is_joint=arch.has_joint_source_span,
        )
        chosen = with_network or network
        scale = case.tensors.get("guidance_scale")
        return Scene(
            case=case,
            network=chosen,
            layout=layout,
            sources=[chosen.encode_source(latents, inputs) for latents, inputs in sources],
            guidance=float(generation["diff_guidance_scale"] if scale is None else scale),
            shift=float(generation["flow_shift"]),
        )

    return opener


def _sources(case: Any) -> list[tuple[Tensor, VisionInputs]]:
    """Stored source latents and ViT patches: `cond_*` of one source, `cond1_*`, `cond2_*` of
    several.
    """
    found = []
    for name in ("cond", "cond1", "cond2", "cond3"):
        if f"{name}_vae_latents" in case:
            inputs = VisionInputs(
                case[f"{name}_vit_patches"],
                case[f"{name}_vit_attention_mask"],
                case[f"{name}_vit_spatial_shapes"].reshape(1, 2),
            )
            found.append((case[f"{name}_vae_latents"], inputs))
    return found


def _close_run(scene: Scene, branches: list[Branch], initial: Tensor) -> Tensor:
    """The whole denoise loop against the stored trajectory; the last latents."""
    case = scene.case
    count = case["timesteps"].shape[0] if "timesteps" in case else case["pred"].shape[0]
    schedule = Schedule(count, scene.shift)
    case.close("sigmas", schedule.sigmas())
    case.close("timesteps", torch.tensor([step.timestep for step in schedule.steps()]))
    case.close("timesteps_r", torch.tensor([step.next_timestep for step in schedule.steps()]))
    raw: list[Tensor] = []

    def velocities(states: Sequence[DenoiseState]) -> list[Tensor]:
        raw.append(scene.velocity(states[0].latents, states[0].step, branches))
        return raw[-1:]

    scales = [scene.guidance] * (len(branches) - 1)
    state, steps = (
        DenoiseState(DenoisePlan(initial[0], schedule, CFG(scales)), None),
        list[Tensor](),
    )
    while not state.is_done:
        denoise_step([state], velocities)
        steps.append(state.latents)
    case.close("pred", torch.stack(raw))
    case.close("velocity", torch.stack([guided(v, scales) for v in raw])[:, None])
    case.close("latents", torch.stack([initial[0], *steps])[:, None])
    decoded = scene.network.vae.decode(steps[-1][None])
    case.close("decoded_image", decoded)
    case.close("image_01", (decoded / 2 + 0.5).clamp(0, 1))
    vae = scene.network.arch.vae
    unscaled = steps[-1] / vae.scaling_factor + (vae.shift_factor or 0.0)
    case.close("vae_decode_input", unscaled[None, :, None])
    return steps[-1]


def _close_layout(scene: Scene) -> None:
    case, layout = scene.case, scene.layout
    assert layout.target is not None
    length, target, rows = len(layout.ids), layout.target, len(case["input_ids"])
    case.equal("gen_image_slices", [[target.image.start, target.image.stop]] * rows)
    case.equal("gen_timestep_index", [[target.live_start]] * rows)
    case.equal("cond_vae_slices", [[s.vae.start, s.vae.stop] for s in layout.sources])
    case.equal("cond_vit_slices", [[s.vit.start, s.vit.stop] for s in layout.sources])
    case.equal("cond_joint_slices", [[s.vae.start, s.vit.stop] for s in layout.sources])
    case.equal("cond_timestep_index", [[s.timestep for s in layout.sources]] * rows)
    case.equal("guidance_index", [[target.guidance]])
    case.equal("timesteps_r_index", [[target.timestep_r]])
    case.equal("rope_pos_yx", positions(length, layout.image_blocks))
    dense = visibility(query_spans(0, length, layout.full_spans), length)
    case.equal("attention_mask", dense.expand(rows, -1, -1))
    live = list(range(target.live_start, target.image.stop))
    case.equal("second_step_position_ids", [live] * rows)


def _close_first_kv(scene: Scene, seen: list[tuple[Tensor, Tensor]]) -> None:
    """K/V as attention saw them, layer by layer and branch by branch, up to the image's last token;
    later rows influence nothing and are not computed.
    """
    if "first_step_kv" not in scene.case or scene.layout.target is None:
        return
    stop = scene.layout.target.image.stop
    scene.case.tensors["first_step_kv"] = scene.case["first_step_kv"][..., :stop, :]
    layers = len(scene.network.model.layers)
    both = torch.stack([torch.stack(sides).transpose(1, 2) for sides in seen])
    ours = both.unflatten(0, (layers, -1)).transpose(1, 2)
    scene.case.close("first_step_kv", ours)


def _close_first_step(scene: Scene, initial: Tensor) -> None:
    """The first step of freshly computed branches, with the rows that the final layer is given."""
    branches = scene.branches()
    seen: list[Tensor] = []
    hook = scene.network.final_layer.register_forward_pre_hook(
        lambda _module, args: seen.append(args[0])
    )
    steps = scene.case["timesteps"].shape[0] if "timesteps" in scene.case else 4
    step = Schedule(steps, scene.shift).steps()[0]
    sides: list[tuple[Tensor, Tensor]] = []
    storage = scene.network.arena.storage

    def read(*arguments: Any) -> tuple[Tensor, Tensor]:
        sides.append(Storage.read(storage, *arguments))
        return sides[-1]

    with patch.object(storage, "read", read):
        raw = scene.velocity(initial[0], step, branches)
    hook.remove()
    scene.case.close("first_step_image_hidden", seen[0])
    if "timesteps" not in scene.case:
        scene.case.close("pred", raw)
    _close_first_kv(scene, sides)


def test_07_t2i_first_step(open_scene: Any) -> None:
    scene = open_scene("07_t2i_first_step")
    assert float(scene.case["timestep"][0]) == 1000.0, "a first step starts from pure noise"
    _close_layout(scene)
    _close_first_step(scene, scene.case["initial_latents"])


def test_08_t2i_second_step(open_scene: Any, open_case: Any, goldens: Path) -> None:
    case = open_case("08_t2i_second_step")
    first = open_scene("07_t2i_first_step", borrowed=True)
    target = first.layout.target
    length = len(first.layout.ids)
    live = list(range(target.live_start, target.image.stop))
    rows = len(first.case["input_ids"])
    case.equal("position_ids", [live] * rows)
    parts = query_spans(target.live_start, target.image.stop, first.layout.full_spans)
    case.equal("attention_mask", visibility(parts, length).expand(rows, -1, -1))
    branches = first.branches()
    first.velocity(
        first.case["initial_latents"][0], Step(0, 1.0, 0.5, 1000.0, 500.0, -0.5), branches
    )
    seen: list[Tensor] = []
    hook = first.network.final_layer.register_forward_pre_hook(
        lambda _module, args: seen.append(args[0])
    )
    step = Step(0, 1.0, 0.0, float(case["timestep"][0]), 0.0, -1.0)
    case.close("pred", first.velocity(case["latents_in"][0], step, branches))
    hook.remove()
    case.close("image_hidden", seen[0])


def test_09_t2i_run(open_scene: Any, open_case: Any) -> None:
    first = open_case("07_t2i_first_step", borrowed=True)
    scene = open_scene("09_t2i_run", fallback=first)
    initial = (scene.case if "initial_latents" in scene.case else first)["initial_latents"]
    _close_run(scene, scene.branches(), initial)


@pytest.mark.parametrize(
    "name", ["10_it2i_run", "11a_think_t2i_run", "11b_think_it2i_kv_reuse", "14_it2i_two_images"]
)
def test_run(open_scene: Any, name: str) -> None:
    scene = open_scene(name)
    _close_layout(scene)
    initial = scene.case["initial_latents"]
    _close_first_step(scene, initial)
    _close_run(scene, scene.branches(), initial)


def test_11b_kv_reuse(open_scene: Any) -> None:
    """AR-stage K/V, token by token, then the diffusion stage on top of it."""
    scene = open_scene("11b_think_it2i_kv_reuse")
    case, layout, network = scene.case, scene.layout, scene.network
    start, reusable = int(case["ar_decode_start"]), int(case["ar_prefix_len"])
    shared = int(case["neg_shared_prefix_len"])
    assert (layout.target.ratio, shared_length(layout)) == (reusable, shared)
    context = network.new_buffer()
    hidden = network.prefill([Prefill(layout, layout.ids, scene.sources, context, start)])[0]
    rows = [hidden]
    for id_ in layout.ids[start:reusable]:
        rows.append(network.feed([([id_], context)])[0])
    if "ar_logits_from_prefill_end" in case:
        stored = case["ar_logits_from_prefill_end"].shape[1]
        logits = network.text_logits(torch.stack(rows))[None]
        assert stored in (len(rows), len(rows) - 1)
        case.close(
            "ar_logits_from_prefill_end", logits[:, -stored:] if stored < len(rows) else logits
        )
    kv = [torch.stack(read(context, i, reusable)) for i in range(len(network.model.layers))]
    case.close("ar_prefix_kv", torch.stack(kv))
    branches = []
    for ids, prefix in ((layout.ids, reusable), (layout.unconditional_ids, shared)):
        buffer = network.new_buffer()
        buffer.share_prefix(context, prefix)
        network.prefill([Prefill(layout, ids, scene.sources, buffer, layout.target.live_start)])
        branches.append(network.branch(layout, buffer))
    _close_run(scene, branches, case["initial_latents"])


def test_12_distilled_meanflow(
    open_scene: Any, open_case: Any, goldens: Path, config: dict[str, Any], tmp_path: Path
) -> None:
    weights = open_case("12_distilled_meanflow", borrowed=True)
    folder = _distilled_checkpoint(goldens, config, weights, tmp_path)
    scene = open_scene("12_distilled_meanflow", with_network=load(folder, dtype=torch.float32))
    given: list[Tensor] = []
    hook = scene.network.guidance_emb.register_forward_pre_hook(
        lambda _module, args: given.append(args[0].float())
    )
    _close_layout(scene)
    _close_run(scene, scene.branches(), scene.case["initial_latents"])
    hook.remove()
    scene.case.close("guidance_input_bf16", given[0])


def _distilled_checkpoint(goldens: Path, config: dict[str, Any], case: Any, tmp_path: Path) -> Path:
    """The base checkpoint plus the case's two embedders, as a second shard with an index."""
    source = goldens / "checkpoint"
    extra = {n.removeprefix("weights."): t for n, t in case.tensors.items() if "weights." in n}
    (tmp_path / "first.safetensors").symlink_to(source / "model.safetensors")
    save_file(extra, tmp_path / "second.safetensors", metadata={"format": "pt"})
    weight_map = dict.fromkeys(tensor_index(source), "first.safetensors")
    weight_map |= dict.fromkeys(extra, "second.safetensors")
    index = {"metadata": {}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    distilled = dict(config, cfg_distilled=True, use_meanflow=True)
    (tmp_path / "config.json").write_text(json.dumps(distilled))
    return tmp_path
