"""What commands say, whole: each file of `transcripts/` is typed and compared line by line.

    # why this is here                     a comment
    file jobs.jsonl                        writes a file: the lines below it that begin with "| "
    | {"prompt": "a cat"}
    bytes name.txt ff0a                    writes a file of bytes that are not text
    picture in/cat.png 64x48               writes a picture (a red square on white)
    picture in/grey.png 64x48 #646464      writes a picture of one colour
    folder kept                            makes a folder
    link in/dog.png cat.png                makes a link
    pipe in/pipe.png                       makes a pipe
    remove in/cat.png                      removes a file or a folder
    absent runs                            fails where there is a file or a folder of that name
    $ hyimg check jobs.jsonl               a command; a file called "stdin" is its standard input
    $ HYIMG_SEED=1 hyimg check jobs.jsonl  a command with a variable of the environment
    > a line on standard output
    ! a line on standard error
    = 2                                    the exit code; not written where it is 0

`pytest tests/cli/test_transcripts.py --rewrite` writes what commands say today; read the
difference. Pictures are made by the fake session, so that no model is loaded. Words in brackets
stand for what differs from run to run: [here] is the working folder.
"""

import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

TRANSCRIPTS = Path(__file__).parent / "transcripts"
MAKES = ("file", "bytes", "picture", "folder", "link", "pipe")
ANSWERS = ("> ", "! ", "= ", ">", "!")
# In this order: a path may hold a number.
_VARYING = (
    (re.compile(r"\b[0-9a-f]{64}\b"), "[sha256]"),
    (re.compile(r"\b\d+(\.\d+)? s\b"), "[seconds] s"),
    (re.compile(r"\b\d{4}-\d\d-\d\dT[\d:.+Z]+"), "[time]"),
    (re.compile(r"\bprocess \d+ on \S+"), "process [number] on [machine]"),
)


@pytest.mark.usefixtures("fake_session")
@pytest.mark.parametrize("path", sorted(TRANSCRIPTS.glob("*.txt")), ids=lambda path: path.stem)
def test_commands_say_what_is_written(
    path: Path,
    tmp_path: Path,
    run_cli: Callable[..., Any],
    write_picture: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    pytestconfig: pytest.Config,
) -> None:
    def run(line: str, stdin: str) -> Any:
        words = shlex.split(line)
        command = words.index("hyimg")
        with monkeypatch.context() as environment:
            for variable in words[:command]:
                environment.setenv(*variable.split("=", 1))
            return run_cli(*words[command + 1 :], stdin=stdin)

    written = path.read_text(encoding="utf-8")
    typed = "\n".join(_typed(written.splitlines(), tmp_path, run, write_picture)) + "\n"
    if pytestconfig.getoption("rewrite"):
        path.write_text(typed, encoding="utf-8")
    else:
        assert typed == written


def _typed(
    lines: list[str],
    folder: Path,
    run: Callable[[str, str], Any],
    write_picture: Callable[..., Path],
) -> Iterator[str]:
    """The same lines, with what each command says now in place of what is written."""
    for at, line in enumerate(lines):
        if line.startswith(ANSWERS):
            continue
        yield line
        word, _, rest = line.partition(" ")
        name, *given = rest.split(" ")
        target = folder / name
        if word in MAKES:
            target.parent.mkdir(parents=True, exist_ok=True)
        if word == "file":
            content = (text[2:] for text in _following(lines[at + 1 :], "|"))
            target.write_text("".join(f"{text}\n" for text in content), encoding="utf-8")
        elif word == "bytes":
            target.write_bytes(bytes.fromhex(given[0]))
        elif word == "picture":
            width, height = map(int, given[0].split("x"))
            if given[1:]:
                Image.new("RGB", (width, height), given[1]).save(target)
            else:
                write_picture(name, (width, height))
        elif word == "folder":
            target.mkdir()
        elif word == "link":
            target.symlink_to(given[0])
        elif word == "pipe":
            os.mkfifo(target)
        elif word == "remove":
            shutil.rmtree(target) if target.is_dir() else target.unlink()
        elif word == "absent":
            assert not os.path.lexists(target), f"{name} was made"
        elif word == "$":
            yield from _answers(run, rest, folder)
        else:
            assert not line or word in ("#", "|"), f"not a line of a transcript: {line}"


def _following(lines: list[str], mark: str) -> Iterator[str]:
    for line in lines:
        if not line.startswith(mark):
            return
        yield line


def _answers(run: Callable[[str, str], Any], line: str, folder: Path) -> Iterator[str]:
    given = folder / "stdin"
    ran = run(line, given.read_text(encoding="utf-8") if given.exists() else "")
    for mark, text in ((">", ran.out), ("!", ran.err)):
        text = text.replace(str(folder), "[here]")
        for pattern, word in _VARYING:
            text = pattern.sub(word, text)
        yield from (f"{mark} {line}".rstrip() for line in text.splitlines())
    if ran.code:
        yield f"= {ran.code}"
