"""The one way to open a file that a user names: of a regular kind, within bounds, at once."""

import errno
import io
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from special import MAKE, NAMES, put, within

from hyimg_cli.files import (
    UnfitFile,
    bounded,
    bytes_of,
    opened,
    refuse_unfit,
    replace_file,
    storage_error,
    text_of,
)
from hyimg_cli.spec import digest


@pytest.fixture(autouse=True)
def _watchdog() -> Iterator[None]:
    with within(20):
        yield


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\r\ntwo\n")
    return path


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("by_link", [False, True])
def test_what_is_no_regular_file_is_named_and_not_opened(
    tmp_path: Path, kind: str, by_link: bool
) -> None:
    path = put(tmp_path / "a.png", kind)
    if by_link:
        path = tmp_path / "link.png"
        path.symlink_to("a.png")
    for read in (opened, lambda p: bytes_of(p, 9), lambda p: text_of(p, 9), digest.of_file):
        with pytest.raises(UnfitFile) as refused:
            read(path)
        assert str(refused.value) == f"this is {NAMES[kind]}, not a regular file"
        assert (refused.value.errno, refused.value.filename) == (errno.EINVAL, str(path))


def test_a_device_without_end_is_not_read() -> None:
    for read in (lambda p: bytes_of(p, 1 << 40), digest.of_file):
        with pytest.raises(UnfitFile, match="this is a device"):
            read(Path("/dev/zero"))


def test_a_pipe_is_refused_although_another_process_writes_into_it(tmp_path: Path) -> None:
    path = put(tmp_path / "a", "pipe")
    both_ends = os.open(path, os.O_RDWR)
    os.write(both_ends, b"{}")
    with pytest.raises(UnfitFile):
        bytes_of(path, 100, or_stream=True)
    os.close(both_ends)


def test_a_name_that_becomes_a_pipe_behind_the_look_is_refused(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name is looked at, then opened: what counts is what was opened."""
    regular, before = os.stat(file), set(os.listdir("/dev/fd"))
    put(file, "pipe")
    monkeypatch.setattr(os, "stat", lambda *_, **__: regular)
    with pytest.raises(UnfitFile, match="a named pipe"):
        opened(file)
    assert set(os.listdir("/dev/fd")) == before, "the descriptor is left open"


def test_the_usual_errors_stay_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "nowhere").symlink_to("gone")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    for name, number in [("gone", errno.ENOENT), ("nowhere", errno.ENOENT), (".", errno.EISDIR),
                         ("loop", errno.ELOOP), ("file/x", errno.ENOTDIR)]:  # fmt: skip
        with pytest.raises(OSError, match=os.strerror(number)) as refused:
            opened(tmp_path / name)
        assert refused.value.errno == number, name
        assert not isinstance(refused.value, UnfitFile)


def test_reads_what_a_plain_open_reads(file: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("a.txt")
    assert bytes_of(tmp_path / "link", 100) == file.read_bytes()
    assert text_of(file, 100) == file.read_text(encoding="utf-8") == "one\ntwo\n"
    assert digest.of_file(file) == digest.of_bytes(file.read_bytes())
    with opened(file) as stream:
        assert (stream.read(3), stream.seek(1), stream.read()) == (b"one", 1, b"ne\r\ntwo\n")
        assert stream.name == str(file)
        assert not os.get_inheritable(stream.fileno())
    (tmp_path / "bom").write_bytes(b"\xef\xbb\xbfa")
    assert text_of(tmp_path / "bom", 9, encoding="utf-8-sig") == "a"
    (tmp_path / "empty").touch()
    assert bytes_of(tmp_path / "empty", 0) == b""


def test_as_many_bytes_as_are_allowed_and_no_more(file: Path) -> None:
    size = file.stat().st_size
    assert len(bytes_of(file, size)) == size
    assert digest.of_file(file, size)
    for read in (opened, bytes_of, text_of, digest.of_file):
        with pytest.raises(UnfitFile) as refused:
            read(file, size - 1)
        assert str(refused.value) == "the file is too large (9 bytes, limit 8)"
        assert refused.value.errno == errno.EFBIG


def test_a_huge_file_costs_nothing(tmp_path: Path) -> None:
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(1 << 40)
    for read in (bytes_of, digest.of_file):
        with pytest.raises(UnfitFile, match="1,099,511,627,776 bytes"):
            read(tmp_path / "huge", 1000)


class _Growing(io.BytesIO):
    """Never at its end."""

    def read(self, size: int | None = -1) -> bytes:
        assert size is not None
        assert size >= 0, "without a bound it never ends"
        return b"x" * size


class _Terminal(io.BytesIO):
    """Tells of its end once, by giving less than was asked for; it would then wait for more."""

    is_over = False

    def read(self, size: int | None = -1) -> bytes:
        assert size is not None
        assert not self.is_over, "it was over already"
        data = super().read(size)
        self.is_over = len(data) < size
        return data


def test_a_file_that_grows_is_read_within_the_bound() -> None:
    with pytest.raises(UnfitFile, match="limit 5,000 bytes"):
        bounded(_Growing(), 5000, "a.log")
    for size in (5000, 3 << 20):
        data = b"y" * size
        assert bounded(_Terminal(data), size, "a.log") == data
        assert bounded(_Terminal(data), size + 1, "a.log", expected=size) == data


def test_a_digest_is_of_what_was_there_when_the_file_was_opened(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = digest.of_bytes(file.read_bytes())

    def grown(path: Path, most: int | None = None) -> Any:
        stream = opened(path, most)
        status = os.fstat(stream.fileno())
        monkeypatch.setattr(os, "fstat", lambda _: status)
        with open(path, "ab") as writer:
            writer.write(b"three\n")
        return stream

    monkeypatch.setattr(digest, "opened", grown)
    assert digest.of_file(file) == expected


def test_a_stream_that_the_process_was_given_may_be_read_where_that_is_asked_for() -> None:
    """As of a shell's `<(…)`; one that is slow is waited for, to its end."""
    reading, writing = os.pipe()
    for place in (f"/dev/fd/{reading}", f"/proc/self/fd/{reading}"):
        with pytest.raises(UnfitFile, match="a named pipe"):
            bytes_of(Path(place), 100)

    def write() -> None:
        for piece in (b"one", b" two"):
            os.write(writing, piece)
            time.sleep(0.05)
        os.close(writing)

    writer = threading.Thread(target=write)
    writer.start()
    assert bytes_of(Path(f"/dev/fd/{reading}"), 100, or_stream=True) == b"one two"
    writer.join()
    os.close(reading)


def test_a_stream_whose_writer_is_gone_is_at_its_end(tmp_path: Path) -> None:
    path = put(tmp_path / "a", "pipe")
    reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    os.close(os.open(path, os.O_WRONLY))
    assert bytes_of(Path(f"/dev/fd/{reading}"), 100, or_stream=True) == b""
    os.close(reading)


def test_a_stream_is_bounded_too() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"x" * 101)
    os.close(writing)
    with pytest.raises(UnfitFile, match="limit 100 bytes"):
        bytes_of(Path(f"/dev/fd/{reading}"), 100, or_stream=True)
    os.close(reading)


def test_a_status_can_be_judged_alone(file: Path, tmp_path: Path) -> None:
    refuse_unfit(file, os.stat(file))
    with pytest.raises(UnfitFile):
        refuse_unfit(file, os.stat(file), 1)
    with pytest.raises(IsADirectoryError):
        refuse_unfit(tmp_path, os.stat(tmp_path))


def test_in_an_output_folder_it_is_told_which_file_it_is(tmp_path: Path) -> None:
    with pytest.raises(UnfitFile) as refused:
        opened(put(tmp_path / "results.jsonl", "pipe"))
    error = storage_error(refused.value, tmp_path)
    assert error.where == str(tmp_path / "results.jsonl")
    assert (error.what, error.code) == (str(refused.value), "storage.not-a-file")


@settings(max_examples=5, deadline=None)
@given(names=st.lists(st.sampled_from("ab"), min_size=160, max_size=160))
def test_threads_that_write_one_name_each_leave_a_whole_file(
    tmp_path_factory: pytest.TempPathFactory, names: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("threads")

    def write(number: int, name: str) -> None:
        replace_file(folder / name, [bytes([number])] * 20, is_lasting=False)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(len(names)), names))  # raises what a write raised
    assert {path.name for path in folder.iterdir()} == set(names)
    for path in folder.iterdir():
        data = path.read_bytes()
        assert data == data[:1] * 20
        assert names[data[0]] == path.name
