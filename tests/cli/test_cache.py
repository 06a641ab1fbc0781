"""`hyimg cache`: entries and bytes by kind and in total, and clearing them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hyimg_cli.cache.disk import (
    CHECKED_CHECKPOINTS,
    CHECKED_SOURCES,
    PROMPT_EMBEDDINGS,
    QUANTIZED_WEIGHTS,
    RATES,
    SOURCE_FILES,
    SOURCE_IMAGES,
    START_PICTURES,
    DiskStore,
)
from hyimg_cli.cli import options
from hyimg_cli.settings.run import CacheConfig

Run = Callable[..., Any]


def test_completion_is_installed_for_all_commands_at_once(run_cli: Run) -> None:
    assert "completion" not in run_cli("cache", "--help").out


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A cache with two entries of one kind."""
    store = DiskStore(tmp_path / "kept", 10**6)
    store.write(SOURCE_IMAGES, "a" * 64, b"12345")
    store.write(SOURCE_IMAGES, "b" * 64, b"67890")
    return tmp_path / "kept"


def test_list_and_size_count_what_is_there(run_cli: Run, folder: Path) -> None:
    size = DiskStore(folder, 1).size_bytes
    listed = run_cli("cache", "list", "--cache-dir", folder, "--json")
    assert (listed.code, listed.json_lines) == (
        0, [{"kind": CHECKED_CHECKPOINTS, "entries": 0, "bytes": 0},
            {"kind": CHECKED_SOURCES, "entries": 0, "bytes": 0},
            {"kind": PROMPT_EMBEDDINGS, "entries": 0, "bytes": 0},
            {"kind": QUANTIZED_WEIGHTS, "entries": 0, "bytes": 0},
            {"kind": RATES, "entries": 0, "bytes": 0},
            {"kind": SOURCE_FILES, "entries": 0, "bytes": 0},
            {"kind": SOURCE_IMAGES, "entries": 2, "bytes": size},
            {"kind": START_PICTURES, "entries": 0, "bytes": 0}],
    )  # fmt: skip
    (sized,) = run_cli("cache", "size", "--cache-dir", folder, "--json").json_lines
    assert sized == {"folder": str(folder), "entries": 2, "bytes": size}
    text = run_cli("cache", "list", "--cache-dir", folder).out
    assert text.splitlines() == [
        f"{CHECKED_CHECKPOINTS}  0 entries  0 bytes",
        f"{CHECKED_SOURCES}  0 entries  0 bytes",
        f"{PROMPT_EMBEDDINGS}  0 entries  0 bytes", f"{QUANTIZED_WEIGHTS}  0 entries  0 bytes",
        f"{RATES}  0 entries  0 bytes",
        f"{SOURCE_FILES}  0 entries  0 bytes", f"{SOURCE_IMAGES}  2 entries  {size} bytes",
        f"{START_PICTURES}  0 entries  0 bytes",
    ]  # fmt: skip


@pytest.mark.parametrize("kind", [(), ("--kind", SOURCE_IMAGES)])
def test_clear_removes_and_says_how_much(
    run_cli: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, kind: tuple[str, ...]
) -> None:
    monkeypatch.setenv("HYIMG_CACHE_DIR", str(folder))
    (cleared,) = run_cli("cache", "clear", *kind, "--json").json_lines
    assert (cleared["removed"], cleared["entries"]) == (kind[-1] if kind else "all", 2)
    assert DiskStore(folder, 1).entries() == []
    assert run_cli("cache", "clear").code == 0


def test_an_unknown_kind_is_refused(run_cli: Run, folder: Path) -> None:
    ran = run_cli("cache", "clear", "--kind", "everything", "--cache-dir", folder)
    assert ran.code == 2
    assert SOURCE_IMAGES in ran.err
    assert len(DiskStore(folder, 1).entries()) == 2


def test_a_folder_that_is_a_file_exits_3(run_cli: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    ran = run_cli("cache", "list", "--cache-dir", tmp_path / "file")
    assert (ran.code, ran.out) == (3, "")
    assert "--cache-dir" in ran.err


def test_a_cache_that_is_not_there_is_empty_and_stays_away(run_cli: Run, tmp_path: Path) -> None:
    (sized,) = run_cli("cache", "size", "--cache-dir", "nowhere", "--json").json_lines
    assert (sized["entries"], sized["bytes"]) == (0, 0)
    assert not list(tmp_path.iterdir())


def _chosen(flags: dict[str, Any]) -> CacheConfig:
    return options.run_config(options.settings_of(flags), Path()).cache


def test_the_folder_is_asked_for_or_the_users_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HYIMG_CACHE_DIR", "/from/environment")
    assert _chosen({"cache_dir": Path("/from/flag")}).folder == Path("/from/flag")
    assert _chosen({}) == CacheConfig(Path("/from/environment"), budget_mb=10240)
    monkeypatch.delenv("HYIMG_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    for given, expected in (("/xdg", Path("/xdg/hyimg")), ("xdg", tmp_path / ".cache/hyimg")):
        monkeypatch.setenv("XDG_CACHE_HOME", given)
        assert _chosen({}).folder == expected
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert _chosen({}).folder == tmp_path / ".cache" / "hyimg"
    assert _chosen({"disk_cache": False}).folder is None
    assert _chosen({"disk_cache_mb": 3}).budget_bytes == 3_000_000


def test_a_recipe_may_set_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HYIMG_CACHE_DIR")
    recipe = tmp_path / "run.toml"
    recipe.write_text('[cache]\ncache_dir = "kept"\ndisk_cache_mb = 7\n')
    assert _chosen({"recipe": recipe}) == CacheConfig(Path("kept"), budget_mb=7)


def test_alone_it_says_what_is_missing(run_cli: Run) -> None:
    ran = run_cli("cache")
    assert (ran.code, ran.err.splitlines()[0]) == (2, "error[usage]: Missing command.")
