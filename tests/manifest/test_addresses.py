"""A source at an address that this machine cannot open fails its own job, with the place."""

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from hyimg_cli.engine.sources import faults, probe_sources
from hyimg_cli.errors import HyimgError, SourceImageError
from hyimg_cli.journal.keys import UNREADABLE, source_digest
from hyimg_cli.manifest.manifest import read_manifest
from hyimg_cli.media.images import size_of
from hyimg_cli.settings.run import CacheConfig
from hyimg_cli.spec.job import ImageJob

ADDRESSES = {
    "foo://x/y.png": "usage.address",
    "zip://a.png::b.zip": "usage.address",
    "s3://[x/y.png": "usage.address",
    "s3://user:secret@x/y.png": "usage.password",
    "smb://host/y.png": "machine.no-package",
}


@pytest.mark.parametrize(("address", "code"), ADDRESSES.items())
def test_a_source_that_cannot_be_opened_is_a_fault_of_its_job(
    address: str, code: str, make_job: Callable[..., ImageJob], tmp_path: Path
) -> None:
    Image.new("RGB", (16, 16), "red").save(tmp_path / "a.png")
    kept = make_job("kept", task="it2i", images=(str(tmp_path / "a.png"),))
    lost = make_job("lost", task="it2i", images=(address,), source_line="jobs.jsonl:2")
    for fetches in (False, True):
        found = probe_sources([kept, lost], CacheConfig(tmp_path / "cache"), fetches=fetches)
        assert found.error_of(kept) is None
        (fault,) = faults(found, [kept, lost])
        assert (fault.code, fault.where[:13]) == (code, "jobs.jsonl:2:")
        assert "LIBRARY" not in fault.hint
        assert "secret" not in str(fault)
    assert source_digest(address) == UNREADABLE  # the failed job has a key
    with pytest.raises(SourceImageError):
        size_of(address)


@pytest.mark.parametrize(("address", "code"), ADDRESSES.items())
def test_a_manifest_at_such_an_address_is_an_error_of_the_command(address: str, code: str) -> None:
    with pytest.raises(HyimgError) as caught:
        read_manifest(Path(address), io.StringIO())
    assert caught.value.code == code
    assert caught.value.where
