"""Words of other tools, of a first guess and from a web page, and the words for them here."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hyimg_cli.cli import other_words
from hyimg_cli.cli.commands import COMMANDS, LazyCommand
from hyimg_cli.models import releases
from hyimg_cli.models.diffusers_image.table import KINDS

Run = Callable[..., Any]


def _params(name: str) -> Any:
    return LazyCommand(name).load_command().params


FLAGS = {
    name: {flag for one in _params(name) for flag in (*one.opts, *one.secondary_opts)}
    for name in COMMANDS
    if name != "cache"
}
RUN = "generate"


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("generate x --gpu 0", "choose a GPU with --device, as in --device cuda:0"),
        ("generate x --timeout 8h", "give --time-limit 8h for the whole run, or --job-timeout"),
        ("generate x --walltime 8h", "give --time-limit 8h for the whole run"),
        ("generate x --watch", "give --follow, to run lines and pictures as they come"),
        ("status x --watch", "run it again now and then, as in: watch hyimg status OUT"),
        ("generate x --only-failed", "give --retry-failed; with --select status=failed"),
        ("export x --failed", "give --select status=failed"),
        ("report x --where a", 'give --select, as in --select "cat-*" or --select status=failed'),
        ("generate x --max-failures 3", "give --halt 10%, or --halt 30"),
        ("generate x -k", "leave it out; a failed job does not end a run"),
        ("check x --no-rc", "give --no-config"),
        ("compare a b", "run hyimg diff a b"),
        ("logs out", "run hyimg status out"),
        ("rerun out", "run hyimg status out"),
        ("cancel", "press Ctrl-C where the run works"),
        ("generate x --gpus 4", "copy a model to several GPUs with --replicas 4"),
        ("bench --gpus 4", "split a model over several GPUs with --device balanced"),
        ("info a.png --gpu 0", "with hyimg generate, choose a GPU with --device"),
        ("generate x --workers 4", "copy a model to several GPUs with --replicas 4"),
        ("generate x --threads 4", "set the variable OMP_NUM_THREADS"),
        ("generate --image a.png", "write it without an option: hyimg generate photos --prompt"),
        ("generate -i a.png", "write it without an option: hyimg generate photos --prompt"),
        ("generate --input-dir a", "write it without an option: hyimg generate photos --prompt"),
        ("check --manifest a.jsonl", "write it without an option: hyimg check jobs.jsonl"),
        ("info --image a.png", "write it without an option: hyimg info FILE"),
        ("bench --input a.jsonl", "give --manifest jobs.jsonl"),
        ("serve --image a.png", "clients send pictures and prompts to --port"),
        ("check x --width 64", "give --size, width first, as in --size 1024x768"),
        ("plan x -H 64", "give --size, width first, as in --size 1024x768"),
        ("generate x --cfg 4", "give --guidance-scale, as in --guidance-scale 4"),
        ("generate x --cfg_scale 4", "give --guidance-scale, as in --guidance-scale 4"),
        ("generate x --quantize fp8", "give --quantization fp8"),
        ("generate x --mask m.png", "give --region mask.png, white where edits are allowed"),
        ("eval psnr a b --mask m.png", "give --region mask.png, white where edits are allowed"),
        ("generate x --precision fp16", "give --dtype bfloat16"),
        ("generate x -p red", 'give --prompt "make it evening"'),
        ("generate x -n 4", "give --n, as in --n 4, for several pictures"),
        ("pick x -n 4", "give --pick 2 to keep two pictures of each job"),
        ("generate x --batch-size 4", "jobs are batched anyway; --batching-max-size 4 limits"),
        ("generate x -s 4", "give --steps, as in --steps 28"),
        ("generate x --num_inference_steps 4", "write --num-inference-steps"),
        ("generate x --neg ugly", 'give --negative-prompt "blurry"'),
        ("generate x --outdir y", "give -o, as in -o results"),
        ("generate x --lora-path y", "give --lora style.safetensors@0.8"),
        ("generate x --ext jpg", "give --format jpeg"),
        ("generate x --output-format jpg", "give --format"),
        ("generate x --port 80", "hyimg serve has it"),
        ("serve --prompt x", "hyimg generate has it"),
        ("generate x --memory-gb 4", "write memory_gb below [batch] in a recipe"),
        ("generate x -steps 4", "write --steps"),
        ("generate x -output y", "write --output"),
        ("generate x prompt=red", "write --prompt"),
        ("bench kv-reuse", "run hyimg bench --compare kv-reuse"),
        ("gen", 'run hyimg generate photos --prompt "make it evening"'),
        ("edit x --prompt red", "run hyimg generate x --prompt red"),
        ("run jobs.jsonl", "run hyimg generate jobs.jsonl"),
        ("jobs.jsonl", "run hyimg generate jobs.jsonl"),
        ("help", "run hyimg --help"),
        ("help pick", "run hyimg pick --help"),
        ("--model x", "begin with a command, such as hyimg generate"),
        ("generate x –-prompt red", "write two hyphens: --prompt"),
        ("generate x —prompt red --seed 1", "write two hyphens: --prompt"),
        ("generate x –o out", "write one hyphen: -o"),
        ("report –-single-file", "write two hyphens: --single-file"),
        ("eval psnr a b –-json", "write two hyphens: --json"),
        ("generate x --prompt “make it green”", 'write straight quotes: --prompt "make it green"'),
        ("generate „my photos“ --prompt red", 'write straight quotes: "my photos"'),
        ("generate x --prompt=‘a b’", 'write straight quotes: --prompt="a b"'),
    ],
)
def test_a_word_that_is_not_known_here_is_answered_by_its_meaning(
    run_cli: Run, words: str, hint: str
) -> None:
    ran = run_cli(*words.split())
    assert ran.code == 2
    assert f"hint: {hint}" in ran.err
    assert "did you mean" not in ran.err.lower()


@pytest.mark.parametrize(
    "flag",
    ["--upscale", "--controlnet", "--clip-skip", "--sampler",
     "--no-safety-checker", "--trust-remote-code"],
)  # fmt: skip
def test_what_hyimg_does_not_have_is_said(run_cli: Run, flag: str) -> None:
    ran = run_cli("generate", "jobs.jsonl", flag, "0.5")
    assert (ran.code, f"{flag} is not supported: hyimg has no" in ran.err) == (2, True), ran.err


@pytest.mark.parametrize("word", ["--samples", "--ext", "--bs", "--first", "--eta", "--xyz"])
def test_no_flag_is_guessed_that_is_only_spelled_a_little_alike(word: str) -> None:
    assert other_words.misspelt(word, FLAGS[RUN]) == []


@pytest.mark.parametrize("word", sorted(other_words._HINTS))
def test_each_hint_names_options_that_exist(word: str) -> None:
    option = word if len(word) > 1 else f"-{word}"
    hint = other_words.advice(f"--{option}", (), FLAGS)
    assert hint, word
    assert f"--{word.replace('_', '-')}" not in FLAGS[RUN] or word in (
        *("prompt", "size", "n", "region", "lora", "seed", "fps", "task", "output_dir"),
        *("num_frames", "guidance_scale", "negative_prompt", "flow_shift", "bot_task", "output"),
        "num_inference_steps",
    ), f"{word} is an option of hyimg generate"


def test_values_may_begin_with_a_dash_or_a_quote(run_cli: Run, tmp_path: Path) -> None:
    """The table of other words does not refuse texts of prompts, or files that exist."""
    (tmp_path / "–prompt").write_text("a red circle\n")
    for words in (
        ["manifest", "--prompt", "—red, not blue"],
        ["manifest", "--prompt", "“Sale” in red"],
        ["manifest", "--prompt", "“Sale”"],
        ["manifest", "--prompt=-steps"],
        ["manifest", "--prompt", "size=large"],
        ["manifest", "--prompt", "a", "--", "–prompt"],
    ):
        ran = run_cli(*words)
        assert "hyphen" not in ran.err, (words, ran.err)
        assert "quotes" not in ran.err, (words, ran.err)


@pytest.mark.parametrize(
    ("names", "hint"),
    [
        (["pcis"], "did you mean pics?"),
        (["./Pics"], "did you mean ./pics?"),
        (["pics/red.pgn"], "did you mean pics/red.png?"),
        (["pisc/red.png"], "did you mean pics?"),
        (["pics\\red.png"], "write folders with forward slashes: pics/red.png"),
        (["picsred.png"], "did you mean pics/red.png? A shell drops single backslashes"),
        (["C:\\Users\\me\\pics"], "paths of Windows are found in WSL: /mnt/c/Users/me/pics"),
        (["my", "photos"], 'put the name in quotes: "my photos"'),
    ],
)
def test_a_path_that_does_not_exist_is_answered_with_one_that_does(
    run_cli: Run, tmp_path: Path, write_picture: Callable[..., Path], names: list[str], hint: str
) -> None:
    (tmp_path / "pics").mkdir()
    (tmp_path / "my photos").mkdir()
    write_picture("pics/red.png")
    for prompt in ("red", "make it red"):
        ran = run_cli("generate", *names, "--prompt", prompt)
        assert (ran.code, f"hint: {hint}" in ran.err) == (2, True), ran.err
        assert "prompt in quotes" not in ran.err


@pytest.mark.parametrize(
    "words",
    [
        "pics --prompt make it green",
        "--prompt make it green pics",
        "--prompt make it green, please pics",
        "--prompt=make it green pics",
        "pics make it green",
    ],
)
@pytest.mark.parametrize("command", ["generate", "manifest"])
def test_words_of_a_prompt_without_quotes_are_shown_in_quotes(
    run_cli: Run, tmp_path: Path, command: str, words: str
) -> None:
    (tmp_path / "pics").mkdir()
    if command == "manifest" and "--prompt" not in words:
        return
    ran = run_cli(command, *words.split())
    text = "make it green, please" if "please" in words else "make it green"
    assert (ran.code, f'put the prompt in quotes: pics --prompt "{text}"' in ran.err) == (2, True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("serve 8000", "run hyimg serve --port 8000;"),
        ("serve 0.0.0.0:8000 -q", "run hyimg serve --host 0.0.0.0 --port 8000 -q;"),
        ("serve http://localhost:9/", "run hyimg serve --host localhost --port 9;"),
        ("serve 127.0.0.1", "run hyimg serve --host 127.0.0.1;"),
        ("serve tiny-image --port 80", "run hyimg serve --model tiny-image --port 80;"),
        ("serve tiny-image 80", "run hyimg serve --model tiny-image --port 80;"),
        ("serve Qwen/Qwen-Image", "run hyimg serve --model Qwen/Qwen-Image;"),
        ("bench tiny-image", "run hyimg bench --model tiny-image --compare kv-reuse;"),
        ("bench kv-reuse", "run hyimg bench --compare kv-reuse;"),
        ("bench a.jsonl -q", "run hyimg bench --manifest a.jsonl -q --compare kv-reuse;"),
        ("bench", "run hyimg bench --compare kv-reuse;"),
        ("bench --compare kv-reuse big", "run hyimg bench --compare kv-reuse --model big;"),
        ("eval a.png b.png", "run hyimg eval lpips a.png b.png; allowed: lpips, psnr"),
        ("eval kv-reuse", "run hyimg bench --compare kv-reuse, then hyimg eval lpips"),
        ("pick out 3", "run hyimg pick out --pick 3;"),
        ("pick out text", "run hyimg pick out --by text;"),
        ("pick 3", "run hyimg pick OUT --pick 3"),
        ("score out text", "run hyimg score out --score text;"),
        ("merge a b", "run hyimg merge a b -o all;"),
        ("merge a", "run hyimg merge a -o all;"),
        ("think a.jsonl", "run hyimg think a.jsonl -o texts.jsonl;"),
        ("export out", "hyimg export out -o dataset"),
        ("export out more set", "hyimg export out more -o set"),
        ("cache rm", "did you mean hyimg cache clear?"),
        ("cache ls", "did you mean hyimg cache list?"),
        ("schema manifest", "did you mean line?"),
    ],
)
def test_a_value_without_its_option_is_answered_with_the_whole_command(
    run_cli: Run, words: str, said: str
) -> None:
    ran = run_cli(*words.split())
    assert (ran.code, said in f"{ran.err.strip()};") == (2, True), ran.err


def test_a_mistyped_manifest_is_answered_too(run_cli: Run, tmp_path: Path) -> None:
    (tmp_path / "jobs.jsonl").write_text("{}")
    assert "hint: did you mean jobs.jsonl?" in run_cli("check", "job.jsonl").err
    assert "hint: did you mean quickstart?" in run_cli("check", "quickstrat").err
    assert '--prompt "a red circle"' in run_cli("check", "a red circle").err


@pytest.mark.parametrize(
    ("name", "release"),
    [
        ("qwen-image-edit", "Qwen/Qwen-Image-Edit?"),
        ("Qwen Image Edit 2511", "Qwen/Qwen-Image-Edit-2511?"),
        ("flux", "black-forest-labs/FLUX.2-dev or black-forest-labs/FLUX.1-dev or"),
        ("firered", "FireRedTeam/FireRed-Image-Edit-1.1 or FireRedTeam/FireRed-Image-Edit-1.0?"),
        ("kontext", "black-forest-labs/FLUX.1-Kontext-dev?"),
        ("bagel", "ByteDance-Seed/BAGEL-7B-MoT?"),
        ("hunyuanimage-3", "tencent/HunyuanImage-3.0-Instruct or"),
        ("z-image", "Tongyi-MAI/Z-Image-Turbo?"),
        ("tiny", "tiny-image or tiny-video?"),
    ],
)
def test_the_short_name_of_a_model_is_answered_with_its_hub_id(
    run_cli: Run, name: str, release: str
) -> None:
    ran = run_cli("check", "quickstart", "--model", name)
    assert (ran.code, f"hint: did you mean {release}" in ran.err) == (3, True), ran.err


def test_names_of_no_release_are_not_guessed() -> None:
    assert [releases.meant_by(name) for name in ("sdxl", "model", "", "…")] == [()] * 4


def test_the_page_of_models_and_the_list_of_releases_agree() -> None:
    page = (Path(__file__).parents[2] / "docs" / "gpus.md").read_text()
    named = {one for one in re.findall(r"`([\w.-]+/[\w.-]+)`", page) if one[0].isalpha()}
    assert {one for one in named if "/" in one and one.split("/")[1][:1].isupper()} <= {
        *releases.RELEASES
    }
    assert len(KINDS) <= len(releases.RELEASES)
