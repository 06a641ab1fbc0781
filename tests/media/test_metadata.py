"""Metadata of a PNG: parameters that viewers know, the whole job, and nothing of the machine."""

import json
from dataclasses import asdict, replace
from typing import Any

from hyimg_cli.manifest.resolved import public_line
from hyimg_cli.media.metadata import PictureFacts, PictureText, Provenance, picture_text
from hyimg_cli.spec.job import ImageJob, Size, SizeRequest
from hyimg_cli.spec.options import TextSampling

JOB = ImageJob(
    custom_id="cat-001",
    task="it2i",
    prompt="make the scarf red,\nand the hat: blue",
    images=("/home/me/in/cat.png", "in/dog.png"),
    model="/models/tiny",
    seed=42,
    size=SizeRequest(),
    num_inference_steps=7,
    guidance_scale=2.5,
    flow_shift=3.0,
    bot_task="think",
    ar_seed=1,
    text=TextSampling(0.6, 1024, 0.95, 64),
    metadata_json='{"path": "/home/me/secret"}',
    extra_json='{"x_path": "/home/me/secret"}',
)
LINE = public_line(JOB)
FACTS = PictureFacts(
    model_name="HunyuanImage-3.0-Instruct",
    provenance=Provenance("0.1.0", "0123456789abcdef", {"dtype": "float32"}, {"torch": "2.11.0"}),
    source_sha256=("aa", "bb"),
    cot_text="<think>red</think>",
    cot_token_ids=(1, 2, 3),
    ratio_index=33,
)


def text_of(line: dict[str, Any] = LINE, facts: PictureFacts = FACTS) -> PictureText:
    return picture_text(JOB, line, facts, Size(height=768, width=1024), "cc")


def settings_in(parameters: str) -> dict[str, str]:
    """The last line of the parameters, read as viewers read it."""
    return dict(part.split(": ", 1) for part in parameters.splitlines()[-1].split(", "))


def test_parameters_have_the_layout_that_viewers_read() -> None:
    parameters = text_of().parameters
    assert parameters.startswith(JOB.prompt + "\n")
    assert settings_in(parameters) == {
        "Steps": "7",
        "Sampler": "Flow-match Euler",
        "CFG scale": "2.5",
        "Seed": "42",
        "Size": "1024x768",
        "Model hash": "0123456789",
        "Model": "HunyuanImage-3.0-Instruct",
        "Version": "hyimg 0.1.0",
    }


def test_the_record_has_the_job_and_what_became_of_it() -> None:
    record = json.loads(text_of().record)
    assert record["job"]["prompt"] == JOB.prompt
    assert record["job"]["images"] == ["cat.png", "dog.png"]
    assert record["cot_token_ids"] == [1, 2, 3]
    assert record["cot_text"] == "<think>red</think>"
    assert (record["size"], record["ratio_index"]) == ("1024x768", 33)
    assert record["model_fingerprint"] == "0123456789abcdef"
    assert record["source_sha256"] == ["aa", "bb"]
    assert record["pixel_sha256"] == "cc"
    assert record["settings"] == {"dtype": "float32"}
    assert record["packages"] == {"torch": "2.11.0"}
    assert (record["bot_task"], record["version"]) == ("think", "0.1.0")


def test_nothing_of_the_machine_and_of_the_users_own_data_is_told() -> None:
    line = public_line(replace(JOB, file_name="secret/{seed}"))
    for text in asdict(text_of(line)).values():
        assert "/home" not in text
        assert "/models" not in text
        assert "secret" not in text


def test_a_hub_id_is_no_path() -> None:
    line = public_line(replace(JOB, model="tencent/HunyuanImage-3.0-Instruct"))
    record = json.loads(text_of(line).record)
    assert record["job"]["model"] == "tencent/HunyuanImage-3.0-Instruct"


def test_a_model_name_with_commas_stays_one_setting() -> None:
    facts = PictureFacts("a, b: c", FACTS.provenance)
    assert 'Model: "a, b: c"' in text_of(facts=facts).parameters


def test_what_no_file_and_no_xml_can_hold_is_an_escape() -> None:
    name = "\udce4\uffff é 犬.png"
    record = text_of(LINE | {"images": [name]}).record
    assert r"\udce4\uffff é 犬.png" in record
    assert json.loads(record)["job"]["images"] == [name]


def test_an_edit_and_a_picture_from_nothing_are_told_apart() -> None:
    """The addresses whole, as IPTC's list has them."""
    made = picture_text(replace(JOB, task="t2i"), LINE, FACTS, Size(1, 1), "")
    start = "http://cv.iptc.org/newscodes/digitalsourcetype/"
    assert text_of().source_type == f"{start}compositeWithTrainedAlgorithmicMedia"
    assert made.source_type == f"{start}trainedAlgorithmicMedia"
