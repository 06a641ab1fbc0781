"""`hyimg serve` from its command line: what it refuses before it loads anything."""

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hyimg_cli.errors import UsageError
from hyimg_cli.journal.disk import take_lock
from hyimg_cli.serve.app import is_loopback
from hyimg_cli.serve.keys import Keys, read_keys


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_no_other_machine_without_a_key(run_cli: Callable[..., Any], host: str) -> None:
    ran = run_cli("serve", "--host", host)
    assert ran.code == 2
    assert "error[usage.no-key]" in ran.err
    assert "--api-key-file" in ran.err
    assert not Path("runs").exists()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "::1", "localhost", "LOCALHOST"])
def test_this_machine_needs_none(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (["-o", "s3://bucket/state"], "usage"),
        (["--no-disk-cache", "--tensor-parallel-size", "2"], "usage.not-served"),
        (["--replicas", "2"], "usage.not-served"),
        (["--api-key-file", "missing"], "usage.keys"),
        (["--max-waiting", "0"], "usage"),
    ],
)
def test_what_a_server_does_not_do(
    run_cli: Callable[..., Any], flags: list[str], code: str
) -> None:
    ran = run_cli("serve", "--port", 0, *flags)
    assert ran.code == 2
    assert f"error[{code}]" in ran.err


def test_a_port_and_a_folder_have_one_server(
    run_cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from contextlib import ExitStack

    monkeypatch.setenv("OMP_WAIT_POLICY", "x")  # restored after the test
    monkeypatch.delenv("OMP_WAIT_POLICY")

    with socket.create_server(("127.0.0.1", 0)) as taken, ExitStack() as held:
        port = taken.getsockname()[1]
        ran = run_cli("serve", "--port", port)
        assert ran.code == 2
        assert f"error[usage.port]: cannot listen on 127.0.0.1:{port}" in ran.err
        assert os.environ["OMP_WAIT_POLICY"] == "passive"
        Path("state").mkdir()
        take_lock(Path("state/.lock"), held)
        ran = run_cli("serve", "--port", 0, "-o", "state")
        assert ran.code == 2
        assert "error[output.in-use]" in ran.err


def test_keys_have_names_and_no_message_shows_one(tmp_path: Path) -> None:
    digest = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b"  # secret
    path = tmp_path / "keys"
    path.write_text(f"# keys\nalice sha256:{digest}\n\nbob other-key\n")
    keys = read_keys(path, {"HYIMG_API_KEY": "third"})
    for given, name in (
        ("Bearer secret", "alice"),
        ("bearer other-key", "bob"),
        ("Bearer third", "default"),
        ("Bearer Secret", None),
        (f"Bearer {digest}", None),
        ("Basic secret", None),
        ("secret", None),
        ("", None),
        (None, None),
    ):
        assert keys.caller_of(given) == name
    assert Keys({}).caller_of(None) == "local"
    assert not Keys({})
    for text in ("hunter2", "a b c-hunter2", "a hunter2\na hunter3", ""):
        path.write_text(text)
        with pytest.raises(UsageError) as caught:
            read_keys(path, {})
        assert caught.value.code == "usage.keys"
        assert "hunter" not in str(caught.value)
