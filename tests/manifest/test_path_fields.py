"""Every field that names files: all are resolved, moved and reported in the same way."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unicodedata import normalize

import pytest
from PIL import Image
from tiny_video import WAN_CARD

from hyimg_cli.manifest.fields import PATH_FIELDS
from hyimg_cli.manifest.manifest import read_manifest
from hyimg_cli.manifest.resolve import resolve_jobs
from hyimg_cli.manifest.resolved import lines_beside, lines_moved, public_line
from hyimg_cli.settings.config import settle
from hyimg_cli.settings.paths import LORAS, SOURCES
from hyimg_cli.settings.values import BadValue
from hyimg_cli.spec.card import ModelCard, StartRule, VideoDefaults
from hyimg_cli.spec.job import Job, Size
from hyimg_cli.spec.options import Lora

VIDEO = replace(
    WAN_CARD,
    defaults=VideoDefaults(
        size=Size(64, 64),
        num_frames=9,
        fps=8,
        num_inference_steps=4,
        guidance_scale=5.0,
        flow_shift=5.0,
    ),
    start=StartRule(1, 2, "stretch"),
    follows=WAN_CARD.follows | {"camera"},
)
EDIT = {"prompt": "brighter", "images": ["in/a.png", "in/far/b.png"]}
FILM = {"prompt": "it moves", "task": "i2v", "images": ["in/a.png"]}
# A line that says each field, and what of its value a file itself may say.
LINES: dict[str, tuple[dict[str, Any], Any]] = {
    "images": (EDIT, ["a.png", "b.png"]),
    "model": (EDIT | {"model": "./mine"}, "mine"),
    # Written as one name.
    "components": (EDIT | {"model": "mine/x.gguf", "components": "./parts"}, "x.gguf+parts"),
    "region": (
        EDIT | {"keep_outside": True, "region": "transparent:in/masks/m.png"},
        "transparent:m.png",
    ),
    "camera": (FILM | {"camera": "walk"}, "poses.npy"),
    "lora": (
        FILM | {"lora": "loras/far/er/x.safetensors@-0.5;owner/name/sub/y.safetensors"},
        "x.safetensors@-0.5;owner/name/sub/y.safetensors",
    ),
}
# What stands in the place of a path.
NAMES = [
    ("model", EDIT | {"model": "owner/name"}, "owner/name"),
    ("model", EDIT | {"model": "a/b/c.gguf", "components": "owner/name"}, "a/b/c.gguf+owner/name"),
    ("region", EDIT | {"keep_outside": True, "region": [0, 0, 9, 9]}, "0,0,9,9"),
    ("camera", FILM | {"camera": "w-9"}, "w-9"),
    ("lora", FILM | {"lora": "owner/name/z.safetensors@2"}, "owner/name/z.safetensors@2"),
]
# The field of a resolved line that has a field's value, if it is another one.
WRITTEN_IN = {"components": "model"}
Resolve = Callable[..., Job]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With every file that a line names; the working folder is another one."""
    home = tmp_path / "home"
    for folder in ("in/far", "in/masks", "mine", "parts", "walk", "loras/far/er"):
        (home / folder).mkdir(parents=True)
    for name in ("in/a.png", "in/far/b.png", "in/masks/m.png"):
        Image.new("RGB", (64, 64), "red").save(home / name)
    (home / "walk" / "poses.npy").write_bytes(b"poses")
    for name in ("loras/far/er/x.safetensors", "mine/x.gguf"):
        (home / name).write_bytes(b"x")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return home


@pytest.fixture
def resolve(card_of: Callable[[str], ModelCard]) -> Resolve:
    """The job of a line in a folder, under flags."""

    def resolved(line: dict[str, Any], folder: Path, **flags: Any) -> Job:
        folder.mkdir(parents=True, exist_ok=True)
        manifest = folder / "jobs.jsonl"
        manifest.write_text(json.dumps({"custom_id": "a"} | line) + "\n")
        settings = settle(flags, {}, {})
        jobs, faults = resolve_jobs(read_manifest(manifest), settings, card_of, lambda _: VIDEO)
        assert not faults
        (job,) = jobs
        return job

    return resolved


def files_of(field: str, job: Job, folder: Path) -> list[Path]:
    """The paths of a field of a job, led from `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (line,) = lines_beside([job], folder)
    field = WRITTEN_IN.get(field, field)
    kind = PATH_FIELDS[field]
    return [folder / name for name in kind.names(kind.read(line[field])) if kind.is_path(name)]


def test_every_field_that_names_files_is_tried() -> None:
    assert LINES.keys() == PATH_FIELDS.keys()


@pytest.mark.parametrize("field", LINES)
def test_a_line_written_for_another_folder_names_the_same_files(
    field: str, home: Path, resolve: Resolve, tmp_path: Path
) -> None:
    """As a run writes it, then as `merge` does, and read again at each of these places."""
    job = resolve(LINES[field][0], home)
    run, merged = tmp_path / "runs" / "one", tmp_path / "far" / "er" / "all"
    files = files_of(field, job, home)
    assert files
    assert all(file.exists() for file in files)
    (line,) = lines_beside([job], run)
    (moved,) = lines_moved([line], run, merged)
    for folder, written in ((run, line), (merged, moved)):
        again = resolve(written, folder)
        found = files_of(field, again, folder)
        assert len(found) == len(files)
        assert all(one.samefile(other) for one, other in zip(found, files, strict=True))
        assert str(tmp_path) not in json.dumps(written)


@pytest.mark.parametrize("field", LINES)
def test_paths_lead_from_the_manifest_where_that_is_the_working_folder(
    field: str, home: Path, resolve: Resolve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing tells `loras/far/er/x.safetensors` from a file of the hub, `./mine` from a name."""
    monkeypatch.chdir(home)
    job = resolve(LINES[field][0], Path())
    assert all(file.exists() for file in files_of(field, job, tmp_path / "run"))


def test_a_flags_paths_lead_from_the_working_folder(
    home: Path, resolve: Resolve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    manifests, out = tmp_path / "manifests", tmp_path / "run"
    images = {"images": [str(home / "in/a.png")]}
    film = resolve(FILM | images, manifests, lora="loras/far/er/x.safetensors")
    edit = resolve(EDIT | images, manifests, region="in/masks/m.png", keep_outside=True)
    found = [*files_of("lora", film, out), *files_of("region", edit, out)]
    assert [path.name for path in found] == ["x.safetensors", "m.png"]
    assert all(path.exists() for path in found)


@pytest.mark.parametrize("field", LINES)
def test_a_file_names_no_folder(field: str, home: Path, resolve: Resolve) -> None:
    line, public = LINES[field]
    told = public_line(resolve(line, home))
    assert told[WRITTEN_IN.get(field, field)] == public
    assert not {"home", "in", "masks", "walk", "loras", "far"} & set(
        json.dumps(told).replace('"', "/").split("/")
    )


@pytest.mark.parametrize("forms", [("NFC", "NFD"), ("NFD", "NFC")])
def test_accents_are_found_as_the_disk_encodes_them(tmp_path: Path, forms: tuple[str, str]) -> None:
    written, kept = (normalize(form, "for\u00eat/\u00e9t\u00e9.png") for form in forms)
    path = tmp_path / kept
    path.parent.mkdir()
    path.touch()
    for name, value in (("images", (written,)), ("region", written)):
        found = PATH_FIELDS[name].resolve_paths(value, tmp_path)
        assert found in (str(path), (str(path),))
    assert SOURCES.resolve_name(f"{written}x", tmp_path) == str(tmp_path / f"{written}x")


@pytest.mark.parametrize(("field", "line", "value"), NAMES)
def test_what_is_no_path_stays(
    field: str, line: dict[str, Any], value: str, home: Path, resolve: Resolve, tmp_path: Path
) -> None:
    job = resolve(line, home)
    (written,) = lines_beside([job], tmp_path / "run")
    (moved,) = lines_moved([written], tmp_path / "run", tmp_path / "far" / "all")
    assert [one[field] for one in (written, moved, public_line(job))] == [value] * 3


@pytest.mark.parametrize("field", PATH_FIELDS)
def test_a_line_of_anybody_is_refused_where_its_value_is_none_of_the_field(field: str) -> None:
    with pytest.raises(BadValue):
        list(lines_moved([{"custom_id": "a", field: 5}], Path("a"), Path("b")))


def test_a_folder_that_is_called_like_a_home_is_one_behind_a_dot(
    home: Path, resolve: Resolve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "~").mkdir()
    (home / "in" / "a.png").rename(home / "~" / "a.png")
    monkeypatch.chdir(home)
    job = resolve({"prompt": "x", "images": "./~/a.png"}, Path())
    assert Path(job.images[0]).exists()
    assert all(file.exists() for file in files_of("images", job, tmp_path / "run"))


@pytest.mark.timeout(60)
def test_a_long_list_of_loras_with_a_fault_at_its_end_is_refused_at_once() -> None:
    many = "high=a.safetensors;" * 40
    with pytest.raises(BadValue, match=r"is not FILE\.safetensors"):
        LORAS.read(f"{many}b.ckpt")
    assert LORAS.read(many) == (Lora("a.safetensors", 1.0, "high"),) * 40


def test_blanks_around_a_lora_are_none_of_its_name() -> None:
    found = LORAS.read(" low= a b.safetensors@-0.5 ;; none ; high=none; high=low=c.safetensors\n")
    assert found == (
        Lora("a b.safetensors", -0.5, "low"),
        Lora("", 0.0, ""),
        Lora("", 0.0, "high"),
        Lora("low=c.safetensors", 1.0, "high"),
    )
