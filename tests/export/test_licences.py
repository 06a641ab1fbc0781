"""The licence gate: which checkpoints' pictures may train other models, and why not."""

import json
from pathlib import Path
from typing import Any

import pytest
from export.runs import job, write_run

from hyimg_cli.export.licences import find_reason
from hyimg_cli.models import registry
from hyimg_cli.models.licences import UNKNOWN, licence_in, licence_of_release

TENCENT = "its outputs must not be used to improve other models"
NON_COMMERCIAL = "it is for non-commercial use only"
NOT_KNOWN = "hyimg does not know whether it permits training on outputs"
CARDS = [
    ("license: apache-2.0", "apache-2.0", ""),
    ("license: MIT", "mit", ""),
    ("license: cc-by-4.0", "cc-by-4.0", ""),
    (
        "license: other\nlicense_name: tencent-hunyuan-community\nlicense_link: LICENSE",
        "tencent-hunyuan-community",
        TENCENT,
    ),
    ("license: cc-by-nc-4.0", "cc-by-nc-4.0", NON_COMMERCIAL),
    ("license: cc-by-nc-sa-4.0", "cc-by-nc-sa-4.0", NON_COMMERCIAL),
    (
        "license: other\nlicense_name: flux-1-dev-non-commercial-license",
        "flux-1-dev-non-commercial-license",
        NON_COMMERCIAL,
    ),
    ("license: other\nlicense_name: qwen-research", "qwen-research", NON_COMMERCIAL),
    ("license:\n- apache-2.0\n- cc-by-nc-4.0", "apache-2.0 + cc-by-nc-4.0", NON_COMMERCIAL),
    ("license: openrail++", "openrail++", NOT_KNOWN),
    ("license: other", UNKNOWN, "no model card or LICENSE file on this machine names one"),
    ("license: unknown", UNKNOWN, "no model card or LICENSE file on this machine names one"),
    ("language: en", UNKNOWN, "no model card or LICENSE file on this machine names one"),
    ("license: [apache-2.0", UNKNOWN, "no model card or LICENSE file on this machine names one"),
]


@pytest.mark.parametrize(("front", "licence", "reason"), CARDS)
def test_a_card_states_a_licence(front: str, licence: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(f"---\n{front}\n---\n# A model\nlicense: mit\n")
    assert registry.licence(str(tmp_path)) == licence
    found = find_reason(licence)
    assert found.startswith(reason) if reason else not found


@pytest.mark.parametrize(
    ("text", "licence"),
    [
        ("TENCENT HUNYUAN COMMUNITY LICENSE AGREEMENT\nRelease Date", "tencent-hunyuan-community"),
        ("FLUX.1 [dev] Non-Commercial License\n\nBlack Forest Labs", "non-commercial"),
        ("Apache License\nVersion 2.0, with one more condition: …", UNKNOWN),
        ("Ours", UNKNOWN),
    ],
)
def test_a_licence_file_counts_where_there_is_no_card(
    text: str, licence: str, tmp_path: Path
) -> None:
    (tmp_path / "LICENSE").write_text(text)
    assert licence_in(tmp_path) == licence
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n")
    assert licence_in(tmp_path) == "mit"


def test_the_text_of_apache_2_is_known_by_its_digest(tmp_path: Path) -> None:
    from importlib.metadata import distribution

    (path,) = (
        one for one in distribution("safetensors").files or () if one.name.startswith("LICENSE")
    )
    text = Path(str(path.locate())).read_text()
    (tmp_path / "LICENSE.txt").write_text(text.replace("\n", "\r\n"))
    assert licence_in(tmp_path) == "apache-2.0"
    (tmp_path / "LICENSE.txt").write_text(text + "\nNot for training.\n")
    assert licence_in(tmp_path) == UNKNOWN


@pytest.mark.parametrize(
    ("hub_id", "licence"),
    [
        ("tencent/HunyuanImage-3.0-Instruct", "tencent-hunyuan-community"),
        ("ByteDance-Seed/BAGEL-7B-MoT", "apache-2.0"),
        ("Qwen/Qwen-Image-Edit-2511", "apache-2.0"),
        ("Qwen/Qwen-Image-2.1", "non-commercial"),
        ("FireRedTeam/FireRed-Image-Edit-1.1", "apache-2.0"),
        ("black-forest-labs/FLUX.2-klein-4B", "apache-2.0"),
        ("black-forest-labs/FLUX.2-klein-9b-kv", "flux-non-commercial-license"),
        ("black-forest-labs/FLUX.1-Kontext-dev", "flux-1-dev-non-commercial-license"),
        ("somebody/HunyuanImage-3.0", UNKNOWN),
    ],
)
def test_releases_are_known_by_their_hub_ids(hub_id: str, licence: str) -> None:
    assert licence_of_release(hub_id) == licence


@pytest.mark.parametrize("model", ["tiny-image", "tiny-video"])
def test_the_embedded_models_have_no_licence_yet(model: str) -> None:
    assert registry.licence(model) == UNKNOWN


def test_the_gate_refuses_with_the_reason_and_records_what_is_allowed(
    run_cli: Any, tmp_path: Path
) -> None:
    out, models = tmp_path / "out", tmp_path / "models"
    fronts = {"ours": CARDS[0][0], "hunyuan": CARDS[3][0], "nc": CARDS[4][0], "lora": CARDS[4][0]}
    for name, front in fronts.items():
        (models / name).mkdir(parents=True)
        (models / name / "README.md").write_text(f"---\n{front}\n---\n")
    jobs = [job(out, name, n) for n, name in enumerate(("ours", "hunyuan", "nc"))]
    for one in jobs:
        one["model"] = f"../models/{one['custom_id']}"
    jobs[0]["lora"] = "../models/lora/style.safetensors@0.5"
    words = ("export", write_run(out, jobs), "-o", "data", "--format", "webdataset")
    ran = run_cli(*words)
    assert ran.code == 2
    assert f"hunyuan: tencent-hunyuan-community: {TENCENT}" in ran.err
    assert f"nc: cc-by-nc-4.0: {NON_COMMERCIAL}" in ran.err
    assert f"style.safetensors: cc-by-nc-4.0: {NON_COMMERCIAL}" in ran.err
    flags = ("--allow-licence", "tencent-hunyuan-community", "--allow-licence", "cc-by-nc-4.0")
    assert "--allow-licence cc-by-nc-4.0 --allow-licence tencent-hunyuan-community" in ran.err
    assert not (tmp_path / "data").exists()
    assert run_cli(*words, *flags[:2]).code == 2
    assert run_cli(*words, *flags).code == 0
    info = json.loads((tmp_path / "data" / "dataset.json").read_text())["licences"]
    assert info["allowed"].keys() == {"tencent-hunyuan-community", "cc-by-nc-4.0"}
    assert info["models"]["style.safetensors"] == "cc-by-nc-4.0"
    card = (tmp_path / "data" / "README.md").read_text()
    assert "allowed by `--allow-licence tencent-hunyuan-community`" in card
    assert TENCENT in card
