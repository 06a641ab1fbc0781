"""Commands typed wrongly, as a new user does: each says what to do, and runs nothing.

Words of other tools, slips, wrong order, files that are missing or of another kind.
"""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

# By command: a part of the hint. Most work on photos, a folder with one picture.
WRONG = {
    # Options of other tools, and slips.
    'generate photos -p "make it blue"': 'give --prompt "make it evening"',
    "generate -i photos/cat.jpg --prompt x": "write it without an option: hyimg generate photos",
    "generate photos --prompt x --out out": "give -o, as in -o results",
    "generate photos --prompt x --num_inference_steps 4": "write --num-inference-steps",
    "generate photos --prompt x --true_cfg_scale 4": "give --guidance-scale",
    "generate photos --prompt x --sampler euler": "the checkpoint decides it",
    "generate photos --prompt x --denoise 0.5": "give --strength",
    "generate photos --prompt x --mask m.png": "give --region mask.png",
    "generate photos --prompt x --batch-size 4": "--batching-max-size 4 limits a batch",
    "generate photos --prompt x --gpu 0": "--device cuda:0",
    "generate photos --prompt x --width 512": "give --size, width first",
    "generate photos --prompt x --lowvram": "give --cpu-offload group",
    "generate photos --prompt x --fp16": "give --dtype bfloat16",
    "generate photos --prompt x --load-in-4bit": "--quantization nf4",
    "generate photos --prompt x -n 4": "give --n, as in --n 4",
    "generate photos --prompt x --overwrite": "give --force",
    "generate photos --prompt x --skip-existing": "run the same command again",
    "generate photos --prompt x --regoin 0,0,9,9": "did you mean --region?",
    # Values.
    "generate photos --prompt x --steps four": "give a whole number from 1 to 1000",
    "generate photos --prompt x --seed -1": "from 0 to 2^63-1",
    "generate photos --prompt x --size 512*512": '"WxH"',
    "generate photos --prompt x --device gpu": "a GPU is cuda",
    "generate photos --prompt x --device cuda:0,1": "CUDA_VISIBLE_DEVICES=0,1",
    "generate photos --prompt x --quantization int4": "allowed: none, fp8, nf4",
    "generate photos --prompt x --format jpgg": 'did you mean "jpeg"?',
    "generate photos --prompt x --halt ten": "such as 10%, or a number, such as 30",
    "generate photos --prompt x --time-limit 8": "8h, 90m, 1h30m, 45s",
    "generate photos --prompt x --job-timeout 20min": "8h, 90m, 1h30m, 45s",
    "generate photos --prompt x --select failed": "did you mean --select status=failed?",
    "generate photos --prompt x --select status=broken": "write status=done, status=failed",
    "generate - --follow --prompt x": "remove --prompt",
    "generate photos --prompt x --model ./nowhere": "give a folder",
    "generate photos --prompt x --model https://huggingface.co/Qwen/Qwen-Image": "Qwen/Qwen-Image",
    # Order, prompts and files.
    "generate photos": "add a prompt: --prompt",
    'generate photos "make it blue"': 'put the prompt in quotes: photos --prompt "make it blue"',
    "generate photos --prompt": "hyimg generate --help lists all options",
    "generate photo --prompt x": "did you mean photos?",
    "generate photos/dog.jpg --prompt x": "give a folder, files or a quoted pattern",
    "generate photos/*.gif --prompt x": "* matches names in one folder",
    "generate empty --prompt x": "images are recognized by suffix",
    "generate notes.pdf --prompt x": "images are recognized by suffix",
    "generate jobs.jsonl --prompt x": "remove --prompt",
    "generate jobs.jsonl quotes.jsonl": "run one after the other, or join files",
    "generate jobs.jsonl -o notes.pdf": "choose another folder with -o",
    "generate quotes.jsonl": 'write double quotes: "prompt"',
    "generate trailing.jsonl": "remove the comma before }",
    "generate array.json": "write one JSON object per line",
    "generate jobs.json": "jq -c '.jobs[]' FILE",
    "generate comfy.json": "this is a workflow of ComfyUI",
    "generate other.jsonl": 'did you mean "guidance_scale"?',
    "generate table.csv": "for example custom_id,prompt,images,seed",
    "generate jobs.jsonl --recipe quotes.toml": "texts in quotes",
    "generate jobs.jsonl --recipe name.toml": "did you mean model?",
    "generate jobs.jsonl --recipe limit.toml": "write hours, minutes or seconds: 8h",
    "generate jobs.jsonl --recipe photos": "give the path of a .toml file",
    # Commands.
    "generat jobs.jsonl": "hyimg --help lists all commands",
    "txt2img jobs.jsonl": "run hyimg generate jobs.jsonl",
    "photos --prompt x": "run hyimg generate photos --prompt x",
    "--prompt x photos": "begin with a command, such as hyimg generate",
    "config": "put settings into hyimg.toml",
    "login": "HF_TOKEN",
    "models": "docs/gpus.md lists models by GPU",
    "download Qwen/Qwen-Image": "run hyimg pull Qwen/Qwen-Image",
    "train photos": "hyimg has no training",
    "status photos": "name the -o of hyimg generate",
    "explain nope": "hyimg explain lists all codes",
    "diff photos": "hyimg diff --help lists all options",
    "eval psnr photos nowhere": "give two files, two folders or two runs",
    "eval photos photos": "run hyimg eval lpips photos photos",
    "pull Qwen": "did you mean Qwen/Qwen-Image",
    "info photos": "give a .png, .jpg, .webp or .mp4 that hyimg wrote",
    "replay photos/cat.jpg": "use a file as hyimg wrote it",
    "merge photos": "run hyimg merge photos -o all",
    "serve 8000": "run hyimg serve --port 8000",
    "bench": "run hyimg bench --compare kv-reuse",
    "cache clean": "did you mean hyimg cache clear?",
    "first-night nowhere": "give a folder, files or a quoted pattern",
    "first-night photos/cat.jpg": "name the folder of the photographs: hyimg first-night photos",
}
FILES = {
    "jobs.jsonl": '{"prompt": "x"}\n',
    "notes.pdf": "%PDF-1.4\n",
    "quotes.jsonl": "{'prompt': 'x'}\n",
    "trailing.jsonl": '{"prompt": "x",}\n',
    "array.json": '[{"prompt": "x"}]',
    "jobs.json": '{"jobs": [{"prompt": "x"}]}',
    "comfy.json": json.dumps({"3": {"class_type": "KSampler", "inputs": {"seed": 1}}}),
    "other.jsonl": '{"prompt": "x", "sampler": "euler", "denoise": 0.5, "width": 512, "cfg": 4}\n',
    "table.csv": "a cat;3\na dog;4\n",
    "quotes.toml": "[failure]\ntime_limit = 8h\n",
    "name.toml": '[modle]\nmodel = "a"\n',
    "limit.toml": '[failure]\ntime_limit = "8"\n',
}


@pytest.fixture
def _files(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    for folder in ("photos", "empty"):
        (tmp_path / folder).mkdir()
    Image.new("RGB", (32, 32), "red").save(tmp_path / "photos" / "cat.jpg")


def test_there_are_sixty() -> None:
    assert len(WRONG) >= 60


@pytest.mark.usefixtures("_files")
@pytest.mark.parametrize(("command", "hint"), WRONG.items(), ids=WRONG)
def test_a_wrong_command_says_what_to_do(
    run_cli: Callable[..., Any], fake_session: Any, tmp_path: Path, command: str, hint: str
) -> None:
    before = sorted(tmp_path.rglob("*"))
    ran = run_cli(*shlex.split(command))
    # A checkpoint is no part of the command: as for a machine that cannot run it.
    assert ran.code == (3 if "error[checkpoint." in ran.err else 2), ran.err
    assert ran.err.startswith(("error[", "skipped ")), ran.err
    assert "Traceback" not in ran.err
    hints = [line for line in ran.err.splitlines() if line.startswith("  hint: ")]
    assert any(hint in line for line in hints), ran.err
    assert ran.out == ""
    assert fake_session.ran == []
    assert sorted(tmp_path.rglob("*")) == before, "nothing is written"
