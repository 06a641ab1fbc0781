"""Options and commands of other tools or of a first guess, and the words for them here."""

import difflib
import re
from collections.abc import Collection, Iterator, Mapping

from hyimg_cli.settings.other_names import field_of, plain, spellings
from hyimg_cli.settings.table import BY_NAME

# What to write for an option with another name, by meaning. The last hints of a row are for
# commands that lack an option of the first.
_OPTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "gpu gpu_id cuda cuda_device device_id cuda_visible_devices",
        ("choose a GPU with --device, as in --device cuda:0",),
    ),
    ("cpu use_cpu no_gpu no_cuda", ("give --device cpu",)),
    (
        "gpus num_gpus n_gpus ngpu ngpus gpu_count gpu_ids nproc_per_node device_map multi_gpu "
        "pp pp_size pipeline_parallel_size",
        (
            "copy a model to several GPUs with --replicas 4, or split it with --device balanced",
            "split a model over several GPUs with --device balanced",
        ),
    ),
    (
        "workers num_workers j processes num_processes parallel concurrency instances dp "
        "dp_size data_parallel data_parallel_size",
        ("copy a model to several GPUs with --replicas 4; one copy batches jobs by itself",),
    ),
    ("sp sp_size cp cp_size ulysses ulysses_degree ring_degree", ("give --context-parallel-size",)),
    (
        "threads num_threads cpu_threads n_threads",
        ("set the variable OMP_NUM_THREADS, as in OMP_NUM_THREADS=8",),
    ),
    (
        "prompt_file prompts prompts_file prompt_list from_file",
        ("give the file to --prompt, as in --prompt prompts.txt",),
    ),
    ("p text caption instruction edit_prompt", ('give --prompt "make it evening"',)),
    (
        "width height w h max_size max_resolution res image_size img_size megapixels ar",
        ("give --size, width first, as in --size 1024x768 or --size 4:3",),
    ),
    ("size resolution aspect_ratio", ("give --size, width first, as in --size 1024x768",)),
    ("guidance_scale scale g", ("give --guidance-scale, as in --guidance-scale 4",)),
    (
        "quantize quant fp8 nf4 int8 int4 bits 4bit 8bit load_in_8bit load_in_4bit weight_dtype "
        "gguf bnb bitsandbytes",
        ("give --quantization fp8 or --quantization nf4",),
    ),
    ("region", ("give --region mask.png, white where edits are allowed",)),
    (
        "precision fp16 bf16 fp32 float16 bfloat16 float32 half torch_dtype variant "
        "mixed_precision",
        ("give --dtype bfloat16 or --dtype float32",),
    ),
    (
        "n num number count copies n_iter iterations num_outputs_per_prompt",
        (
            "give --n, as in --n 4, for several pictures of each job",
            "give --pick 2 to keep two pictures of each job",
            "give --candidates 4",
        ),
    ),
    (
        "batch batch_size bs b max_batch_size max_batch",
        (
            "jobs are batched anyway; --batching-max-size 4 limits a batch, and --n 4 draws "
            "several pictures of each job",
            "jobs are batched anyway; --batching-max-size 4 limits a batch",
        ),
    ),
    ("s iters num_inference_steps", ("give --steps, as in --steps 28",)),
    ("negative_prompt", ('give --negative-prompt "blurry"',)),
    (
        "out output output_dir outdir out_dir output_folder output_path save save_dir save_path "
        "dest destination results target to",
        ("give -o, as in -o results",),
    ),
    (
        "overwrite f force_overwrite clobber redo",
        ("give --force to overwrite results that differ",),
    ),
    ("y yes assume_yes no_input", ("leave it out; hyimg never asks",)),
    ("top best top_n", ("give --pick 2 to keep two pictures of each job",)),
    (
        "skip_existing resume_from continue restart no_overwrite",
        ("run the same command again; jobs that are done are skipped (--resume)",),
    ),
    ("retry retries", ("give --retry-failed to run failed jobs again",)),
    (
        "m checkpoint ckpt ckpt_path model_path model_id model_name base_model repo repo_id "
        "hf_model pretrained_model_name_or_path weights transformer unet",
        (
            "give --model, a hub id or a folder, as in --model Qwen/Qwen-Image-Edit-2511",
            "give --recipe, a file with the settings of the run",
        ),
    ),
    (
        "vae text_encoder encoder tokenizer",
        ("give --model; these parts come with the checkpoint",),
    ),
    ("lora", ("give --lora style.safetensors@0.8; the number is its weight",)),
    (
        "c config config_file settings conf preset",
        ("give --recipe settings.toml; a file hyimg.toml in this folder is read anyway",),
    ),
    (
        "offload low_vram lowvram medvram vram sequential_offload sequential_cpu_offload "
        "model_cpu_offload save_memory",
        ("give --cpu-offload group; hyimg plan shows what fits",),
    ),
    ("compile torch_compile", ("give --compile-blocks",)),
    (
        "tile tiled tiling vae_tiling enable_vae_tiling vae_slicing",
        ("give --vae-use-tiling",),
    ),
    (
        "ext extension suffix image_format output_format file_format filetype jpg jpeg png webp",
        ("give --format jpeg",),
    ),
    ("jpeg_quality compression", ("give --quality, as in --quality 90",)),
    ("num_frames", ("give --num-frames, as in --num-frames 81; with --fps it sets the length",)),
    ("fps", ("give --fps, as in --fps 16",)),
    (
        "prefix filename file_name file_prefix output_name name_template rename",
        ('give --name, as in --name "{stem}-{seed}"',),
    ),
    (
        "first head max_images max_jobs limit_images num_jobs",
        ("give --limit, as in --limit 10",),
    ),
    (
        "filter where only include ids id status state query",
        ('give --select, as in --select "cat-*" or --select status=failed',),
    ),
    (
        "timeout max_time walltime wall_time time deadline time_budget stop_after max_runtime",
        ("give --time-limit 8h for the whole run, or --job-timeout 20m for each job",),
    ),
    (
        "watch tail live poll monitor",
        (
            "give --follow, to run lines and pictures as they come",
            "run it again now and then, as in: watch hyimg status OUT",
        ),
    ),
    (
        "failed only_failed failed_only only_failures rerun resume_failed errors",
        (
            "give --retry-failed; with --select status=failed, no other job runs",
            "give --select status=failed",
            "hyimg status counts failed jobs by their error code",
        ),
    ),
    (
        "max_failures max_errors max_fails failures fail_limit max_failed error_limit",
        ("give --halt 10%, or --halt 30 for a number of jobs",),
    ),
    ("k ignore_errors", ("leave it out; a failed job does not end a run (--keep-going)",)),
    ("no_rc ignore_config isolated no_hyimg_toml no_settings", ("give --no-config",)),
    ("r recurse subfolders subdirs", ("give --recursive",)),
    ("seed seeds", ("give --seed 7, or --n 4 for several seeds",)),
    ("debug log_level loglevel d trace", ("give -v for more details",)),
    ("silent no_progress", ("give -q, or --progress none", "give -q")),
    (
        "token hf_token auth_token use_auth_token",
        ("set the variable HF_TOKEN; it is never written to files or logs",),
    ),
    ("api_key key", ("give --api-key-file keys.txt",)),
    (
        "download local_files_only offline no_download",
        ("set the variable HF_HUB_OFFLINE=1 to use only downloaded checkpoints",),
    ),
    ("cache", ("give --cache-dir for hyimg's own files, and set HF_HOME for checkpoints",)),
    ("flow_shift", ("give --flow-shift, as in --flow-shift 3",)),
    ("bot_task", ("give --bot-task think_recaption, or --bot-task none for no text",)),
    (
        "exif no_exif save_metadata embed_metadata",
        ("give --no-metadata to leave settings out of files",),
    ),
    ("grid concat side_by_side comparison", ("open report.html in the output folder",)),
    ("bind listen address server", ("give --host 0.0.0.0 and --api-key-file keys.txt",)),
    ("server_port http_port", ("give --port, as in --port 8000",)),
    ("model_alias alias", ("give --served-model-name",)),
    ("cors cors_origin allowed_origins allow_origins", ("give --allow-origin ADDRESS",)),
    ("scorer scorers metric", ("give --score, as in --score text",)),
    (
        "task mode video i2v img2vid image_to_video",
        ("give --task i2v to make a video from each picture",),
    ),
)
# Where commands without arguments get their pictures and jobs.
_SOURCES = ("give --manifest jobs.jsonl", "clients send pictures and prompts to --port")
_HINTS = {word: hints for words, hints in _OPTIONS for word in words.split()}
# Options for what a command takes without one, and an example of it for commands of a run.
_INPUTS = (
    (
        "image images input inputs input_image input_images input_dir input_folder indir "
        "init_image init_img source sources src photo photos picture pictures folder dir i path",
        'photos --prompt "make it evening"',
    ),
    (
        "file files manifest manifest_file jobs jobs_file input_file jsonl csv line lines",
        "jobs.jsonl",
    ),
)
_EXAMPLE = {word: example for words, example in _INPUTS for word in words.split()}
_HINTS |= dict.fromkeys(_EXAMPLE, _SOURCES)
# By a word in place of a command: the command or the option that is meant.
COMMANDS = {
    **dict.fromkeys(
        ("gen", "edit", "run", "draw", "create", "make", "img2img", "txt2img", "batch", "start"),
        "generate",
    ),
    **dict.fromkeys(("validate", "lint", "verify", "test"), "check"),
    **dict.fromkeys(("estimate", "dry-run", "preview"), "plan"),
    **dict.fromkeys(("benchmark", "profile"), "bench"),
    **dict.fromkeys(("server", "api", "web", "ui"), "serve"),
    **dict.fromkeys(("evaluate", "metrics"), "eval"),
    **dict.fromkeys(("show", "inspect", "metadata"), "info"),
    **dict.fromkeys(("dataset",), "export"),
    **dict.fromkeys(("view", "html", "open"), "report"),
    **dict.fromkeys(("choose", "select", "best"), "pick"),
    **dict.fromkeys(("error", "errors", "why", "describe"), "explain"),
    **dict.fromkeys(("env", "system"), "doctor"),
    **dict.fromkeys(("compare", "cmp", "difference"), "diff"),
    **dict.fromkeys(
        ("state", "progress", "summary", "st", "ls", "list", "jobs", "ps", "queue", "history"),
        "status",
    ),
    **dict.fromkeys(("log", "logs", "watch", "monitor", "tail"), "status"),
    # It prints the command that goes on.
    **dict.fromkeys(("resume", "continue", "retry", "rerun"), "status"),
    **dict.fromkeys(("version",), "--version"),
    **dict.fromkeys(("help", "man", "usage"), "--help"),
    **dict.fromkeys(("download", "fetch", "install", "get"), "pull"),
}

# Words for the end of a run, which needs no command.
ENDS = ("stop", "cancel", "kill", "abort", "pause", "quit")

# Words for what no command does, with the place where it is done.
NO_COMMANDS = {
    **dict.fromkeys(
        ("config", "configure", "settings", "init", "setup"),
        "put settings into hyimg.toml, here or in ~/.config; hyimg schema recipe prints its schema",
    ),
    **dict.fromkeys(
        ("login", "auth", "token"), "put the token of the hub into the variable HF_TOKEN"
    ),
    **dict.fromkeys(
        ("models", "model"), "docs/gpus.md lists models by GPU; hyimg pull MODEL fetches one"
    ),
    **dict.fromkeys(("update", "upgrade"), "update it as you installed it, with pip or uv"),
    **dict.fromkeys(
        ("upscale", "enlarge"),
        "hyimg has no upscaling; --size selects one of the model's sizes",
    ),
    **dict.fromkeys(
        ("train", "finetune", "lora"),
        "hyimg has no training; hyimg export writes a dataset, and --lora takes what was trained",
    ),
    **dict.fromkeys(
        ("webui", "gui", "studio"),
        "hyimg has no editor; hyimg report writes a page of a run, and hyimg serve answers clients",
    ),
}

# The same for `hyimg cache`.
OF_THE_CACHE = {
    **dict.fromkeys(("rm", "remove", "delete", "clean", "purge", "prune", "empty"), "clear"),
    **dict.fromkeys(("ls", "show", "dir"), "list"),
    **dict.fromkeys(("du", "info", "status"), "size"),
}


def advice(
    option: str, flags: Collection[str], elsewhere: Mapping[str, Collection[str]] | None = None
) -> str:
    """Return what to write for an option that is not in a command's `flags`, by its meaning.

    `elsewhere`: flags of other commands, to name one that has it. Empty if the meaning is not
    known.
    """
    hints = list(_hints(option))
    if own := next((hint for hint in hints if not {*_named(hint)} - {*flags}), ""):
        return own
    for command, known in (elsewhere or {}).items():
        if option in known:
            return f"hyimg {command} has it"
        if other := next((hint for hint in hints if not {*_named(hint)} - {*known}), ""):
            return f"with hyimg {command}, {other}"
    return ""


def without_option(option: str, usage: str, *, takes_prompt: bool) -> str:
    """Return what to write for an option whose value a command takes without one.

    `usage`: the command and its arguments.
    """
    word = plain(option)
    if word not in _HINTS:
        word = field_of(option) or word
    if not (example := _EXAMPLE.get(word)):
        return ""
    shown = f"{usage.rpartition(' ')[0]} {example}" if takes_prompt else usage
    return f"write it without an option: {shown}"


def misspelt(option: str, flags: Collection[str]) -> list[str]:
    """Return the flags that an unknown option may be a spelling of; other words have none.

    The same letters come first, then one letter more or less, then what begins with the option or
    what it begins with, and then other slips of the fingers.
    """
    word = plain(option)
    names = {flag: plain(flag) for flag in flags if flag.startswith("--")}
    same = [flag for flag, name in names.items() if name == word]
    longer = [flag for flag, name in names.items() if name.startswith(word) and len(word) > 1]
    shorter = [flag for flag, name in names.items() if word.startswith(f"{name}_")]
    typed = [
        flag
        for flag, name in names.items()
        if name[:1] == word[:1] and abs(len(name) - len(word)) <= max(1, len(word) // 8)
    ]
    written = f"--{word.replace('_', '-')}"
    slip = difflib.get_close_matches(written, typed, 1, 0.8)
    if same or difflib.get_close_matches(written, slip, 1, 0.9):
        return same or slip
    return sorted(longer, key=len) or sorted(shorter, key=len)[-1:] or slip


def _hints(option: str) -> Iterator[str]:
    """Yield what to write for an option, the best hint first."""
    for name in spellings(option):
        meant = field_of(name) or name
        yield from _HINTS.get(name) or _HINTS.get(meant) or _of_setting(meant)


def _of_setting(name: str) -> Iterator[str]:
    """Yield a hint for a setting of that name."""
    if (row := BY_NAME.get(name)) and row.panel:
        yield f"give {row.flag}"
    elif row:
        yield f"write {row.name} below [{row.table}] in a recipe, and give --recipe recipe.toml"


def _named(hint: str) -> list[str]:
    """Return the options that a hint names."""
    return re.findall(r"(?<!\S)--?[a-z][a-z-]*", hint)
