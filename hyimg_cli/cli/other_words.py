"""Options and commands of other tools, and the words for them here."""

import re
from collections.abc import Collection

# By an option of A1111, ComfyUI, diffusers' scripts, vllm or a first guess: what to write.
OPTIONS = {
    **dict.fromkeys(
        ("--gpu", "--cuda", "--gpu-id"), "choose a GPU with --device, as in --device cuda:0"
    ),
    **dict.fromkeys(
        ("--gpus", "--num-gpus", "--workers", "--num-workers", "--jobs", "--data-parallel-size"),
        "copy a model to several GPUs with --replicas 4, or split it with --device balanced",
    ),
    **dict.fromkeys(
        (
            "--image",
            "--images",
            "--input",
            "--input-image",
            "--init-image",
            "--init-img",
            "-i",
            "--folder",
        ),
        'name pictures without an option: hyimg generate photo.png --prompt "make it evening"',
    ),
    **dict.fromkeys(
        ("--width", "--height", "-W", "-H", "--resolution"),
        "give both with --size, width first, as in --size 1024x768",
    ),
    **dict.fromkeys(
        ("--cfg", "--cfg-scale", "--true-cfg-scale", "--guidance", "--scale"),
        "give --guidance-scale, as in --guidance-scale 4",
    ),
    **dict.fromkeys(
        ("--quantize", "--quant", "--fp8", "--nf4", "--load-in-8bit", "--load-in-4bit"),
        "give --quantization fp8 or --quantization nf4",
    ),
    **dict.fromkeys(
        ("--mask", "--mask-image", "--inpaint"),
        "give --region mask.png, white where edits are allowed",
    ),
    **dict.fromkeys(
        ("--precision", "--fp16", "--bf16", "--half", "--torch-dtype"), "give --dtype bfloat16"
    ),
    **dict.fromkeys(
        ("-p", "--text", "--instruction"),
        'give --prompt: hyimg generate photos --prompt "make it evening"',
    ),
    **dict.fromkeys(
        ("-n", "--num", "--num-images", "--batch-count", "--num-images-per-prompt"),
        "give --n, as in --n 4, for several pictures of each job",
    ),
    **dict.fromkeys(("--sampling-steps", "-s"), "give --steps, as in --steps 28"),
    **dict.fromkeys(("--negative", "--neg"), 'give --negative-prompt "blurry"'),
    **dict.fromkeys(("--out", "--outdir", "--output-folder"), "give -o, as in -o results"),
    **dict.fromkeys(("--overwrite", "-f"), "give --force"),
    **dict.fromkeys(
        ("-m", "--checkpoint", "--ckpt", "--model-path"),
        "give --model, as in --model Qwen/Qwen-Image-Edit-2509",
    ),
}
# By a word in place of a command: what to write.
COMMANDS = {
    **dict.fromkeys(
        ("gen", "edit", "run", "draw", "create", "make", "img2img", "txt2img", "batch"),
        'hyimg generate photos --prompt "make it evening"',
    ),
    "help": "hyimg --help",
    "validate": "hyimg check jobs.jsonl",
    "estimate": "hyimg plan jobs.jsonl",
    "benchmark": "hyimg bench",
    "server": "hyimg serve",
    "version": "hyimg --version",
}
# Dashes that word processors and web pages put in place of --.
DASHES = "‐‑‒–—―−"


def advice(option: str, flags: Collection[str]) -> str:
    """Return what to write for an option that is not in a command's `flags`.

    Empty if the table lacks it, or if the command lacks the option to write.
    """
    if option[:1] and option[0] in DASHES:
        return f"write two hyphens: --{option.lstrip(DASHES + '-')}"
    meant = OPTIONS.get(option) or OPTIONS.get(option.replace("_", "-").lower(), "")
    named = re.findall(r"(?<!\S)--?[a-z][a-z-]*", meant)
    return meant if not {*named} - {*flags} else ""
