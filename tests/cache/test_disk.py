"""The disk store against a dictionary, against damage, a full disk, and other processes."""

import errno
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from special import MAKE, put, within

from hyimg_cli.cache import disk
from hyimg_cli.cache.disk import SOURCE_IMAGES as KIND
from hyimg_cli.cache.disk import DiskStore, refuse_cache_file
from hyimg_cli.errors import StorageError


def key(name: object) -> str:
    return hashlib.sha256(str(name).encode()).hexdigest()


def content(number: int) -> bytes:
    return bytes([number]) * (100 * number)


@given(
    st.lists(st.tuples(st.sampled_from("rw"), st.integers(0, 7)), max_size=40), st.integers(0, 9)
)
@settings(max_examples=60, deadline=None)
def test_gives_what_a_dictionary_gives(calls: list[tuple[str, int]], hundreds: int) -> None:
    """Every read agrees with a dictionary that drops what was used longest ago."""
    budget = 200 * hundreds
    with tempfile.TemporaryDirectory() as folder:
        store = DiskStore(Path(folder), budget)
        held: OrderedDict[int, int] = OrderedDict()
        for call, number in calls:
            if call == "r":
                expected = content(number) if number in held else None
                assert store.read(KIND, key(number)) == expected
                if number in held:
                    held.move_to_end(number)
                continue
            store.write(KIND, key(number), content(number))
            size = _stored_size(number)
            if size <= budget:
                held[number] = size
                held.move_to_end(number)
            while sum(held.values()) > budget:
                held.popitem(last=False)
            assert [entry.key for entry in store.entries()] == [key(n) for n in held]
            assert store.size_bytes == sum(held.values()) <= budget
        assert store.take_notes() == ()


def _stored_size(number: int) -> int:
    data = content(number)
    return len(f"hyimg-store 1 {key('')} {len(data)}\n") + len(data)


def test_another_process_finds_what_one_has_written(tmp_path: Path) -> None:
    DiskStore(tmp_path, 1000).write(KIND, key("a"), b"bytes")
    again = DiskStore(tmp_path, 1000)
    assert again.has(KIND, key("a"))
    assert again.read(KIND, key("a")) == b"bytes"


@pytest.mark.parametrize("damage", ["cut", "empty", "header", "flipped", "longer", "renamed"])
def test_a_damaged_entry_is_a_miss_noted_and_removed(tmp_path: Path, damage: str) -> None:
    store = DiskStore(tmp_path, 10**6)
    store.write(KIND, key("a"), b"bytes" * 100)
    path = tmp_path / KIND / key("a")
    whole = path.read_bytes()
    if damage == "renamed":
        path = path.rename(path.with_name(key("b")))
    path.write_bytes(
        {
            "cut": whole[:-7],
            "empty": b"",
            "header": b"x" + whole,
            "flipped": whole[:-1] + b"?",
            "longer": whole + b"more",
            "renamed": whole,
        }[damage]
    )
    assert store.has(KIND, path.name) == (damage in ("flipped", "renamed"))
    assert store.read(KIND, path.name) is None
    (note,) = store.take_notes()
    assert "damaged" in note
    assert not path.exists()
    assert store.take_notes() == ()
    store.write(KIND, key("a"), b"new")
    assert store.read(KIND, key("a")) == b"new"


@pytest.mark.parametrize("kind", MAKE)
def test_what_is_no_regular_file_is_a_damaged_entry(tmp_path: Path, kind: str) -> None:
    store = DiskStore(tmp_path, 10**6)
    path = put(tmp_path / KIND / key("a"), kind)
    with within(20):
        assert (store.has(KIND, key("a")), store.read(KIND, key("a"))) == (False, None)
    (note,) = store.take_notes()
    assert "damaged" in note
    assert not path.exists()


def test_a_length_that_is_not_there_is_not_read(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 10**6)
    path = tmp_path / KIND / key("a")
    path.parent.mkdir()
    path.write_bytes(b"hyimg-store 1 %s %d\n" % (b"0" * 64, 10**17))
    assert store.read(KIND, key("a")) is None
    assert len(store.take_notes()) == 1


@pytest.mark.parametrize(
    ("call", "number"), [("fsync", errno.ENOSPC), ("replace", errno.EACCES), ("open", errno.EROFS)]
)
def test_a_disk_that_refuses_is_one_note_and_is_still_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    store = DiskStore(tmp_path, 1000)
    store.write(KIND, key("old"), b"bytes")

    def refuse(*_arguments: Any) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        if call == "open":
            patch.setattr(disk, "open", refuse, raising=False)
        else:
            patch.setattr(os, call, refuse)
        store.write(KIND, key("a"), b"bytes")
    store.write(KIND, key("b"), b"bytes")
    assert store.take_notes() == (
        f"the disk cache is read-only for the rest of this run: {os.strerror(number)}",
    )
    assert store.read(KIND, key("old")) == b"bytes"
    assert [file.name for file in (tmp_path / KIND).iterdir()] == [key("old")]


def test_a_folder_that_cannot_be_is_one_note(tmp_path: Path) -> None:
    """A file stands in its place: the same for everyone, root too."""
    (tmp_path / "file").write_text("not a folder")
    store = DiskStore(tmp_path / "file", 1000)
    assert store.read(KIND, key("a")) is None
    assert not store.has(KIND, key("a"))
    store.write(KIND, key("a"), b"bytes")
    store.write(KIND, key("b"), b"bytes")
    assert len(store.take_notes()) == 1
    with pytest.raises(StorageError, match="disk cache"):
        store.entries()


@pytest.mark.parametrize(("has_folder", "budget"), [(True, 0), (False, 1000)])
def test_switched_off_it_finds_and_keeps_nothing(
    tmp_path: Path, has_folder: bool, budget: int
) -> None:
    DiskStore(tmp_path, 1000).write(KIND, key("a"), b"bytes")
    store = DiskStore(tmp_path if has_folder else None, budget)
    store.write(KIND, key("b"), b"bytes")
    assert store.read(KIND, key("a")) is None
    assert not store.has(KIND, key("a"))
    assert (store.takes_more, store.entries(), store.take_notes()) == (False, [], ())


@pytest.mark.parametrize("name", ["", "A" * 64, "a" * 63, "../" + "a" * 61, "a" * 64 + "\n"])
def test_a_key_is_a_hex_digest(tmp_path: Path, name: str) -> None:
    store = DiskStore(tmp_path, 1000)
    for call in (store.read, store.has, lambda *a: store.write(*a, b"")):
        with pytest.raises(ValueError, match="cannot name"):
            call(KIND, name)
    with pytest.raises(ValueError, match="cannot name"):
        store.read("../up", key("a"))


def test_clear_takes_one_kind_or_all_and_nothing_else(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 1000)
    for kind in (KIND, "other"):
        store.write(kind, key("a"), b"bytes")
    foreign = tmp_path / KIND / "notes.txt"
    foreign.write_text("mine")
    assert [(entry.kind, entry.key) for entry in store.clear("other")] == [("other", key("a"))]
    assert [entry.kind for entry in store.entries()] == [KIND]
    assert len(store.clear()) == 1
    assert (store.size_bytes, foreign.read_text()) == (0, "mine")


def test_what_killed_processes_left_is_removed_in_time(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 1000)
    store.write(KIND, key("a"), b"bytes")
    young, old = (tmp_path / KIND / f".{key(n)}.7.ab.tmp" for n in "yo")
    young.write_bytes(b"half")
    old.write_bytes(b"half")
    an_hour_ago = time.time() - 3700
    os.utime(old, (an_hour_ago, an_hour_ago))
    store.write(KIND, key("b"), b"bytes")
    assert (young.exists(), old.exists()) == (True, False)
    assert len(store.entries()) == 2


CROWD = """
import hashlib, random, sys
from pathlib import Path
from hyimg_cli.cache.disk import DiskStore, refuse_cache_file

store = DiskStore(Path(sys.argv[1]), 3000)
draw = random.Random(int(sys.argv[2]))
hits = 0
for _ in range(250):
    number = draw.randrange(12)
    key = hashlib.sha256(str(number).encode()).hexdigest()
    expected = bytes([number]) * 600
    found = store.read("source-images", key)
    assert found in (None, expected), "half a file was read"
    hits += found is not None
    if found is None:
        store.write("source-images", key, expected)
assert store.take_notes() == (), "something was damaged or refused"
print(hits)
"""


def test_processes_share_a_folder_that_is_too_small_for_them(tmp_path: Path) -> None:
    """Four write, read and evict at once: no error, no half file, and in the end in budget."""
    words = [sys.executable, "-c", CROWD, str(tmp_path)]
    pipe: Any = subprocess.PIPE
    crowd = [
        subprocess.Popen([*words, str(seed)], stdout=pipe, stderr=pipe, text=True)
        for seed in range(4)
    ]
    for process in crowd:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert int(out) > 0
    assert 0 < DiskStore(tmp_path, 3000).size_bytes <= 3000
    assert not [file for file in (tmp_path / KIND).iterdir() if file.name.startswith(".")]


def test_a_folder_that_can_be_none_is_refused_and_a_missing_one_is_not(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for folder in (file, file / "deeper"):
        with pytest.raises(StorageError, match="the folder of the disk cache is a file") as raised:
            refuse_cache_file(folder)
        assert (raised.value.code, raised.value.where) == ("storage.cache", str(file))
    refuse_cache_file(None)
    refuse_cache_file(tmp_path / "missing" / "deeper")
    assert not (tmp_path / "missing").exists()
