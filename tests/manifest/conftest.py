"""A model card and ready-made jobs for the tests of this room; no checkpoint is read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hyimg_cli.settings.config import Setting, settle
from hyimg_cli.spec.card import Bucket, ModelCard, SamplingDefaults
from hyimg_cli.spec.job import ImageJob, Size, SizeRequest
from hyimg_cli.spec.options import OF_STEPS, OF_TEXT, TextSampling

DEFAULTS = SamplingDefaults(
    num_inference_steps=4,
    guidance_scale=5.0,
    flow_shift=3.0,
    bot_task="think_recaption",
    drop_think=False,
    use_system_prompt="None",
    temperature=0.6,
    top_k=1024,
    top_p=0.95,
    max_new_tokens=2048,
)
SIZES = (Size(64, 256), Size(96, 160), Size(128, 128), Size(160, 96), Size(256, 64))
CARD = ModelCard(
    model="tiny-image",
    family="hunyuan_image3",
    name="tiny",
    is_trained=False,
    is_distilled=False,
    buckets=tuple(Bucket(index, size) for index, size in enumerate(SIZES)),
    pixels_per_cell=16,
    source_vit_tokens=16,
    kv_bytes_per_token=64,
    weight_bytes=1000,
    max_positions=1024,
    vocab_size=328,
    defaults=DEFAULTS,
    follows=OF_STEPS
    | OF_TEXT
    | {"drop_think", "use_system_prompt", "system_prompt", "infer_align_image_size"},
)


def a_job(custom_id: str = "cat", **changes: Any) -> ImageJob:
    fields: dict[str, Any] = {
        "custom_id": custom_id,
        "task": "it2i" if changes.get("images") else "t2i",
        "prompt": "a cat",
        "images": (),
        "model": "tiny-image",
        "seed": 1,
        "size": SizeRequest(),
        "num_inference_steps": 4,
        "guidance_scale": 5.0,
        "flow_shift": 3.0,
        "bot_task": "think_recaption",
        "ar_seed": 1,
        "text": TextSampling(temperature=0.6, top_k=1024, top_p=0.95, max_new_tokens=64),
    }
    return ImageJob(**(fields | changes))


@pytest.fixture(scope="session")
def make_job() -> Callable[..., ImageJob]:
    """Makes a job: an id, and what differs from a plain t2i one."""
    return a_job


@pytest.fixture(scope="session")
def card() -> ModelCard:
    return CARD


@pytest.fixture(scope="session")
def card_of() -> Callable[[str], ModelCard]:
    return lambda model: CARD


@pytest.fixture(scope="session")
def settings() -> dict[str, Setting]:
    """What holds where neither flag nor environment nor recipe says anything."""
    return settle({}, {}, {})


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes files below the working folder; `write` fills each, which is empty by default."""
    monkeypatch.chdir(tmp_path)

    def make(*names: str, write: Callable[[Path], object] = Path.touch) -> None:
        for path in map(Path, names):
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path)

    return make
