"""BAGEL and HunyuanImage-3 as released, by their numbers: files without weights."""

import json
import shutil
from pathlib import Path

from fake_gpu.released_networks import write_hole
from released import released_folder

from hyimg_cli.models.bagel.config import read_architecture
from hyimg_cli.models.bagel.weights import _vae_names, stored_shape, without_weights
from hyimg_cli.models.common.weights import tensor_shapes
from hyimg_cli.models.hunyuan_image3.config import architecture
from hyimg_cli.models.hunyuan_image3.weights import expected_shapes

_GOLDEN = Path(__file__).parents[1] / "models" / "bagel" / "golden" / "checkpoint"
_LLM = {
    "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064,
}  # fmt: skip
_VIT = {
    "hidden_size": 1152, "num_attention_heads": 16, "intermediate_size": 4304,
    "num_hidden_layers": 27, "image_size": 980,
}  # fmt: skip
_BAGEL = {
    "max_latent_size": 64,
    "vit_max_num_patch_per_side": 70,
    "image_transforms": {
        "vae": {"max_size": 1024, "min_size": 512, "stride": 16},
        "vit": {"max_size": 980, "min_size": 224, "stride": 14},
        "max_pixels": 14 * 14 * 9 * 1024,
    },
}


def write_bagel(folder: Path) -> Path:
    shutil.copytree(_GOLDEN, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    for name, own in (("config", _BAGEL), ("llm_config", _LLM), ("vit_config", _VIT)):
        path = folder / f"{name}.json"
        values = json.loads(path.read_text()) | own
        if name == "config":
            values["vae_config"] |= {"ch": 128, "ch_mult": [1, 2, 4, 4]}
        path.write_text(json.dumps(values))
    network, vae = without_weights(read_architecture(folder))
    write_hole(folder / "ema.safetensors", tensor_shapes(network))
    shapes = tensor_shapes(vae)
    stored = {name: stored_shape(name, shapes[own]) for name, own in _vae_names(vae).items()}
    write_hole(folder / "ae.safetensors", stored, dtype="F32", width=4)
    return folder


def write_hunyuan(folder: Path) -> Path:
    released_folder(folder)
    (folder / "model.safetensors.index.json").unlink()
    arch = architecture(json.loads((folder / "config.json").read_text()))
    write_hole(folder / "model.safetensors", expected_shapes(arch))
    return folder
