"""The one store of encoded inputs: memory, disk, warnings and scopes."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hyimg_cli.cache.disk import SOURCE_IMAGES
from hyimg_cli.pipelines.encoded_inputs import EncodedInputs, Encoding
from hyimg_cli.settings.run import CacheConfig
from hyimg_cli.spec import digest

KEYS = [digest.of_json(name) for name in ("first", "second")]


def encoding(key: str, calls: list[str] | None = None) -> Encoding[bytes]:
    def encode() -> bytes:
        if calls is not None:
            calls.append(key)
        return key.encode()

    return Encoding(key, encode, lambda value: value, lambda data: data)


def test_a_fault_of_the_disk_is_noted_for_the_input_that_met_it(tmp_path: Path) -> None:
    EncodedInputs[bytes](CacheConfig(tmp_path), SOURCE_IMAGES, len).find(encoding(KEYS[1]))
    (tmp_path / SOURCE_IMAGES / KEYS[1]).write_bytes(b"torn")
    inputs = EncodedInputs[bytes](CacheConfig(tmp_path), SOURCE_IMAGES, len)
    for key in KEYS:  # ahead of their jobs
        inputs.find(encoding(key))
    assert inputs.take_warnings(encoding(KEYS[0])) == ()
    (warning,) = inputs.take_warnings(encoding(KEYS[1]))
    assert "damaged" in warning
    assert inputs.take_warnings(encoding(KEYS[1])) == ()


@pytest.mark.parametrize("scope", ["", "a key", "another key"])
def test_an_input_of_one_scope_is_not_found_in_another(tmp_path: Path, scope: str) -> None:
    cache, calls = CacheConfig(tmp_path), list[str]()
    EncodedInputs[bytes](cache, SOURCE_IMAGES, len).find(encoding(KEYS[0]).within("a key"))
    again = EncodedInputs[bytes](cache, SOURCE_IMAGES, len)
    _, place = again.find(encoding(KEYS[0], calls).within(scope))
    assert (place, len(calls)) == (("disk_hits", 0) if scope == "a key" else ("misses", 1))
    assert again.find(encoding(KEYS[0], calls).within(scope))[1] == "memory_hits"


def test_no_thread_finds_what_is_still_being_made() -> None:
    """On a GPU the rows are not whole until the stream that makes them has been waited for."""
    inputs, order = EncodedInputs[bytes](CacheConfig(), SOURCE_IMAGES, len), list[str]()
    begun, may_end = threading.Event(), threading.Event()

    @contextmanager
    def making() -> Iterator[None]:
        begun.set()
        yield
        assert may_end.wait(60)
        order.append("made")

    def find() -> None:
        inputs.find(encoding(KEYS[0]))
        order.append("found")

    maker = threading.Thread(target=inputs.find, args=(encoding(KEYS[0]), making()))
    maker.start()
    assert begun.wait(60)
    seeker = threading.Thread(target=find)
    seeker.start()
    seeker.join(0.05)
    assert order == []
    may_end.set()
    for thread in (maker, seeker):
        thread.join(60)
    assert order == ["made", "found"]
    assert inputs.counts == {"memory_hits": 0, "disk_hits": 0, "misses": 1}
