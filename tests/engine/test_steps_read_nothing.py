"""A denoise step after the first asks no tensor for a number, in any family.

On a GPU each such question waits for all work that is queued. Here the host is the device, so it
costs nothing and changes nothing, but can be counted, with the tiny checkpoints of other tests. So
can tensors that a step brings to the host, and attention that reads a mask, for which a GPU has
only slower kernels.
"""

import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_editors
import torch
from conftest import thorough_but
from every_checkpoint import FOLDERS, WRITERS
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import hyimg_cli
from hyimg_cli.engine.session import Session
from hyimg_cli.spec.events import Progress

PACKAGE = str(Path(hyimg_cli.__file__).parent)
PICTURE = {"custom_id": "a", "prompt": "a red circle", "seed": 1, "num_inference_steps": 4}
EDIT = PICTURE | {"images": ["in.png"]}
FILM = PICTURE | {"task": "t2v", "size": "32x32", "num_frames": 5}
WORLD = FILM | {
    "task": "i2v", "images": ["in.png"], "size": "32x48", "num_frames": 9, "camera": "none-1",
}  # fmt: skip
READY = ("tiny-image", "tiny-video", "lingbot")
# A kind of each way to step; the others differ from one of them in numbers.
QUICK = {*READY, "bagel", "wan22", "klein", "klein-kv", "kontext", "qwen-image", "z-image"}
QUICK |= {"qwen-image-2.1", "longcat", "flux2-dev", "flux3", "krea2", "qwen-image-layered"}
EVERY = {*QUICK, *tiny_editors.PIPELINES}
TAKE_SOURCES = {"klein", "klein-base", "klein-kv", "kontext", "qwen-image-2.1"}
TAKE_SOURCES |= {"flux2-dev", "flux3", "flux3-base", "qwen-image-layered"}
# Their sizes are the library's, in the source's shape.
OWN_SIZES = {"longcat-edit", "qwen-image-layered"}
# On a CPU, its texts are filled up.
MASKED = {"krea2", "krea2-turbo"}


class Reads(TorchDispatchMode):
    """Counts questions to tensors by the stage and by the line of ours that asks."""

    ASKING = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)

    def __init__(self) -> None:
        super().__init__()
        self.stage, self.counts = "", Counter[tuple[str, str]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.ASKING:
            ours = [one for one in traceback.extract_stack() if one.filename.startswith(PACKAGE)]
            self.counts[self.stage, f"{Path(ours[-1].filename).name}:{ours[-1].lineno}"] += 1
        return func(*args, **(kwargs or {}))


class Calls(TorchFunctionMode):
    """Counts calls by stage: what brings a tensor to the host, moves weights, or has a mask."""

    TO_HOST = (torch.Tensor.cpu, torch.Tensor.numpy, torch.Tensor.tolist)
    ATTENTION = torch.nn.functional.scaled_dot_product_attention

    def __init__(self) -> None:
        super().__init__()
        self.stage, self.counts = "", Counter[tuple[str, str]]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self.TO_HOST:
            self.counts[self.stage, func.__name__] += 1
        # A network that is moved moves each of its weights so; Wan's reads a table's device.
        if func is torch.Tensor.to and sys._getframe(1).f_code.co_name == "convert":
            self.counts[self.stage, "weights moved"] += 1
        if func is self.ATTENTION:
            mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
            self.counts[self.stage, "attention" if mask is None else "masked attention"] += 1
        return func(*args, **kwargs)


@pytest.mark.parametrize("family", thorough_but(QUICK, sorted(EVERY)))
def test_a_step_after_the_first_reads_nothing(
    run_cli: Any,
    write_manifest: Any,
    write_picture: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
) -> None:
    if family in WRITERS:
        WRITERS[family](tmp_path / "model")
    model = FOLDERS.get(family, tmp_path / "model")
    write_picture("in.png", (64, 64))
    is_film = family in ("tiny-video", "wan22", "lingbot")
    line = {"tiny-video": FILM, "wan22": FILM, "lingbot": WORLD}.get(family, PICTURE)
    if "edit" in family or family in TAKE_SOURCES:
        line = EDIT
    if family in tiny_editors.PIPELINES and family not in OWN_SIZES:
        line = line | {"size": "64x64"}
    if "layered" in family:
        line = line | {"layers": 1}
    if "turbo" in family:  # its steps are fixed
        line = {name: value for name, value in line.items() if name != "num_inference_steps"}
    reads, calls, inner = Reads(), Calls(), Session.run

    def noting_stages(session: Session, *given: Any) -> Iterator[Any]:
        for event in inner(session, *given):
            if isinstance(event, Progress):
                reads.stage = f"step {event.done + 1}" if event.phase == "denoise" else ""
                calls.stage = reads.stage
            yield event

    monkeypatch.setattr(Session, "run", noting_stages)
    flags = ("--video-model" if is_film else "--model", model, "--device", "cpu", "--no-prewarm")
    with reads, calls:
        ran = run_cli("generate", write_manifest(line), *flags, "--bot-task", "none", "-o", "out")
    assert ran.code == 0, ran.err
    assert reads.counts, "nothing was counted"
    assert {line: n for (stage, line), n in reads.counts.items() if stage == "step 2"} == {}
    expected = {"attention", "masked attention"} if family in MASKED else {"attention"}
    assert {call for stage, call in calls.counts if stage == "step 2"} == expected
