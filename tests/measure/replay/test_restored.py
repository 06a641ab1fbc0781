"""From a record to a manifest: found images, checked digests, settings, hostile records."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pngs import write_png

from hyimg_cli.errors import HyimgError, UsageError
from hyimg_cli.journal import keys
from hyimg_cli.loading import hub
from hyimg_cli.manifest.fields import PATH_FIELDS
from hyimg_cli.measure.replay.restored import Restored, Wishes, restore_job
from hyimg_cli.media.recorded import Described, read_described
from hyimg_cli.models import registry
from hyimg_cli.spec import digest

CPU = {"device": "cpu", "dtype": "float32", "kv_reuse": "reuse"}
JOB = {"custom_id": "cat", "prompt": "a red cat", "model": "tiny-image", "seed": 3}
Describe = Callable[..., Described]


@pytest.fixture
def described(tmp_path: Path) -> Describe:
    """A picture in a run folder whose record is a job with changes."""

    def describe(job: dict[str, Any] = JOB, **changed: Any) -> Described:
        record = {
            "format": 2,
            "version": "0.1.0",
            "job": job,
            "model_fingerprint": registry.fingerprint("tiny-image"),
            "source_sha256": [],
            "settings": CPU,
            "packages": {},
        } | changed
        path = tmp_path / "run" / "outputs" / "cat.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_png(path, np.zeros((8, 8, 3), dtype=np.uint8), {"hyimg": json.dumps(record)})
        return read_described(path)

    return describe


@pytest.fixture
def source(tmp_path: Path, write_picture: Callable[..., Path]) -> Path:
    (tmp_path / "in").mkdir()
    return write_picture("in/a.png")


def edit(source: Path) -> dict[str, Any]:
    """A record's job and digests of an edit of `source`."""
    return {"job": JOB | {"images": [source.name]}, "source_sha256": [digest.of_file(source)]}


def code_of(described: Described, wishes: Wishes | None = None) -> str:
    with pytest.raises(HyimgError) as caught:
        restore_job(described, wishes or Wishes())
    assert caught.value.exit_code == 2
    return caught.value.code


def fields(found: Restored) -> dict[str, Any]:
    (line,) = found.manifest.lines
    return line.fields


def test_the_job_is_the_recorded_one(described: Describe) -> None:
    found = restore_job(described(), Wishes())
    assert fields(found) == JOB | {"task": "t2i"}
    assert (found.custom_id, found.notes) == ("cat", ())
    assert found.manifest.title == "replay of cat.png"


@pytest.mark.parametrize("place", ["beside", "in its run", "given"])
def test_a_source_image_is_found(
    described: Describe, source: Path, tmp_path: Path, place: str
) -> None:
    file = described(**edit(source))
    wishes = Wishes()
    match place:
        case "beside":
            source = source.rename(file.path.with_name("a.png"))
        case "in its run":
            line = {"custom_id": "cat", "images": ["../in/a.png"]}
            lines = '{"custom_id": "other"}\n' + json.dumps(line) + "\n"
            (tmp_path / "run" / "manifest.resolved.jsonl").write_text(lines)
        case "given":
            wishes = Wishes(images_from=source.parent)
    (image,) = fields(restore_job(file, wishes))["images"]
    assert Path(image).is_absolute()
    assert Path(image).samefile(source)


def test_a_moved_source_image_is_missed_by_name(described: Describe, source: Path) -> None:
    file = described(**edit(source))
    assert code_of(file) == "replay.missing-image"
    source.rename(source.with_name("b.png"))
    assert code_of(file, Wishes(images_from=source.parent)) == "replay.missing-image"


def test_a_changed_source_image_is_refused_or_told(described: Describe, source: Path) -> None:
    file = described(**edit(source))
    source.write_bytes(source.read_bytes() + b"\n")
    assert code_of(file, Wishes(source.parent)) == "replay.changed-image"
    found = restore_job(file, Wishes(source.parent, allow_changed=True))
    assert found.notes == ("a.png is not the recorded source image",)


def test_the_recorded_one_of_two_of_a_name_is_taken(
    described: Describe, source: Path, tmp_path: Path
) -> None:
    file = described(**edit(source))
    file.path.with_name("a.png").write_bytes(b"another")
    line = json.dumps({"custom_id": "cat", "images": ["../in/a.png"]})
    (tmp_path / "run" / "manifest.resolved.jsonl").write_text(line)
    found = restore_job(file, Wishes())
    assert Path(fields(found)["images"][0]).samefile(source)
    assert found.notes == ()


def test_without_digests_images_are_not_checked_and_that_is_told(
    described: Describe, source: Path
) -> None:
    found = restore_job(described(job=JOB | {"images": ["a.png"]}), Wishes(source.parent))
    assert found.notes == ("source images were not checked: their digests are not recorded",)


@pytest.mark.parametrize("name", ["../in/a.png", "/etc/passwd", "..", "", "a/b.png"])
def test_a_record_cannot_name_a_path(described: Describe, tmp_path: Path, name: str) -> None:
    job = JOB | {"images": [name]}
    assert code_of(described(job=job), Wishes(tmp_path)) in ("metadata.damaged", "manifest")


@pytest.mark.parametrize(
    "changed",
    [
        {"n": 3},
        {"seeds": [1, 2]},
        {"custom_id": "../x"},
        {"seed": float("nan")},
        {"seed": -1},
        {"prompt": ""},
        {"prompt": "\ud800"},
        {"no such field": 1},
        {"images": {"a": 1}},
    ],
)
def test_a_job_that_no_manifest_may_hold(described: Describe, changed: dict[str, Any]) -> None:
    assert code_of(described(job=JOB | changed)).partition(".")[0] in ("manifest", "metadata")


def test_more_digests_than_images_is_damage(described: Describe, source: Path) -> None:
    facts = edit(source)
    file = described(job=facts["job"], source_sha256=facts["source_sha256"] * 2)
    assert code_of(file, Wishes(source.parent)) == "metadata.damaged"


def test_a_picture_of_another_program_has_no_job(tmp_path: Path) -> None:
    write_png(tmp_path / "a.png", np.zeros((8, 8, 3), dtype=np.uint8), {"parameters": "a cat"})
    assert code_of(read_described(tmp_path / "a.png")) == "replay.foreign"


def test_another_model_is_refused_or_told(described: Describe) -> None:
    file = described(model_fingerprint="0" * 64)
    assert code_of(file) == "replay.other-model"
    assert code_of(file, Wishes(model="tiny-image")) == "replay.other-model"
    found = restore_job(file, Wishes(allow_changed=True))
    assert found.notes == ("the model tiny-image is not the one recorded",)


@pytest.mark.parametrize("model", ["my-model", "../my-model", "/my-model", "", "~/m", "./a/b"])
def test_a_folder_by_its_name_alone_is_asked_for(described: Describe, model: str) -> None:
    assert code_of(described(job=JOB | {"model": model})) in ("replay.model", "manifest")


def test_a_models_folder_is_told_by_its_run_and_named_by_the_user(
    described: Describe, tmp_path: Path
) -> None:
    """Whoever sends the file may send its run's folder too."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "my-model").symlink_to(registry.resolve_model("tiny-image"))
    file = described(job=JOB | {"model": "my-model"})
    line = {"custom_id": "cat", "model": "../models/my-model"}
    (tmp_path / "run" / "manifest.resolved.jsonl").write_text(json.dumps(line))
    with pytest.raises(UsageError) as refused:
        restore_job(file, Wishes())
    assert refused.value.code == "replay.model"
    folder = tmp_path / "models" / "my-model"
    assert refused.value.hint == f"give the folder with --model; its run used {folder}"
    assert fields(restore_job(file, Wishes(model=str(folder))))["model"] == str(folder)


@pytest.mark.parametrize(
    ("recorded", "given", "used"),
    [
        ("a.gguf+org/parts", "b/a.gguf", "b/a.gguf+CACHE"),
        ("a.gguf+org/parts", "b/a.gguf+mine", "b/a.gguf+mine"),
        ("a.gguf+parts", "b/a.gguf", "b/a.gguf"),
        ("a.gguf+org/parts", "folder", "folder"),
    ],
)
def test_a_given_file_gets_its_recorded_components_from_the_hubs_cache(
    described: Describe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    recorded: str, given: str, used: str,
) -> None:  # fmt: skip
    cached, file = {"org/parts": tmp_path}, described(job=JOB | {"model": recorded})
    monkeypatch.setattr(hub, "cached", lambda name, revision: cached.get(name))
    asked = list[str]()
    monkeypatch.setattr(registry, "fingerprint", lambda model, *_: asked.append(model))
    restore_job(file, Wishes(model=given, allow_changed=True))
    assert asked == [used.replace("CACHE", str(tmp_path))]


def test_recorded_settings_are_set_again(described: Describe) -> None:
    plain = restore_job(described(), Wishes()).settings
    assert plain == {
        "dtype": "float32",
        "device": "cpu",
        "kv_reuse": True,
        "vae_use_tiling": False,
        "vae_dtype": "auto",
        "quantization": "none",
        "attention_backend": "native",
        "compile_blocks": False,
        "decode_graphs": "off",
        "deterministic": False,
        "batch_invariant": True,
        "tensor_parallel_size": 1,
    }
    recorded = {"device": "cuda", "dtype": "bfloat16", "kv_reuse": "recompute", "vae": "tiled"}
    recorded |= {"experts": "fp8", "text": "graphs", "batch": "variant", "layers": "4 ranks"}
    file = described(settings=recorded)
    again = restore_job(file, Wishes(device="cpu"))
    assert not again.notes
    assert again.settings == {
        "dtype": "bfloat16",
        "kv_reuse": False,
        "vae_use_tiling": True,
        "vae_dtype": "auto",
        "quantization": "fp8",
        "attention_backend": "native",
        "compile_blocks": False,
        "decode_graphs": "off",
        "deterministic": False,
        "batch_invariant": False,
        "tensor_parallel_size": 4,
    }


def test_a_value_that_is_not_known_is_named(described: Describe) -> None:
    recorded = {"device": "cpu", "experts": "ternary"}
    again = restore_job(described(settings=recorded), Wishes())
    assert again.notes == ("made with quantization ternary, which this version does not have",)


@pytest.mark.parametrize(
    ("recorded", "device", "has_triton", "expected"),
    [
        ({"text": "graphs"}, "cuda", True, "on"),
        ({"text": "graphs"}, "cuda:1", True, "on"),
        # Where none can be, the file is made without; the verdict tells.
        ({"text": "graphs"}, "cuda", False, "off"),
        ({"text": "graphs"}, "cpu", True, "off"),
        ({"text": "graphs"}, "balanced", True, "off"),
        ({"text": "graphs", "layers": "4 ranks"}, "cuda", True, "off"),
        # Written before there were any, or without: not by default either.
        ({}, "cuda", True, "off"),
        ({"text": "otherwise"}, "cuda", True, "off"),
    ],
)
def test_graphs_are_as_recorded_where_they_can_be(
    described: Describe,
    monkeypatch: pytest.MonkeyPatch,
    recorded: dict[str, str],
    device: str,
    has_triton: bool,
    expected: str,
) -> None:
    monkeypatch.setattr(keys, "triton_lacks", lambda: "" if has_triton else "it is missing")
    file = described(settings={"device": "cuda", "dtype": "bfloat16"} | recorded)
    assert restore_job(file, Wishes(device=device)).settings["decode_graphs"] == expected


def test_what_is_not_known_is_not_set(described: Describe) -> None:
    strange = {"dtype": "int3", "experts": "q2", "layers": "-2 ranks"}
    found = restore_job(described(settings=strange), Wishes()).settings
    assert (found["dtype"], found["quantization"]) == (None, "none")
    assert found["tensor_parallel_size"] == 1
    assert restore_job(described(settings={}), Wishes()).settings == {}


def test_given_text_keeps_the_bot_task_that_its_system_prompt_hangs_on(
    described: Describe,
) -> None:
    job = JOB | {"cot_text": "<think>x</think>", "use_system_prompt": "dynamic"}
    found = restore_job(described(job=job, bot_task="think_recaption"), Wishes())
    assert found.settings["bot_task"] == "think_recaption"
    assert "bot_task" not in restore_job(described(bot_task="think"), Wishes()).settings


FILM = JOB | {"task": "i2v", "model": "tiny-video"}
# By field: the job's, the settings that know its files, and the files by their place in the run.
OTHERS: dict[str, tuple[dict[str, Any], dict[str, str], dict[str, str]]] = {
    "region": (JOB | {"keep_outside": True}, {"region": "{0}"}, {"region": "in/masks/m.png"}),
    "camera": (FILM, {"camera": "{0},{1}"}, {"camera": "in/walk/poses.npy"}),
    "lora": (
        FILM,
        {"lora": "beside 1;high={0}@-0.5;low=none@0"},
        {"lora": "high=in/loras/x.safetensors@-0.5;low=none@0"},
    ),
}


@pytest.fixture
def other(described: Describe, source: Path, tmp_path: Path) -> Callable[[str], Described]:
    """A file whose job reads such a file besides its picture, in a run that knows both."""

    def describe(field: str) -> Described:
        job, settings, paths = OTHERS[field]
        kind = PATH_FIELDS[field]
        value = kind.read(paths[field])
        (name,) = kind.names(value)
        path = tmp_path / name
        path.parent.mkdir()
        files = [path, path.with_name("intrinsics.npy")]
        for file in files:
            file.write_bytes(file.name.encode())
        digests = map(digest.of_file, files)
        known = {name: text.format(*digests) for name, text in settings.items()}
        public = kind.to_json(kind.with_names(value, [path.name]))
        line = {"custom_id": "cat", "images": ["../in/a.png"]}
        line |= {field: kind.to_json(kind.with_names(value, [f"../{name}"]))}
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "manifest.resolved.jsonl").write_text(json.dumps(line))
        fingerprint = registry.fingerprint(job["model"])
        facts = {"job": job | {"images": ["a.png"], field: public}, "settings": CPU | known}
        return described(
            **facts, model_fingerprint=fingerprint, source_sha256=[digest.of_file(source)]
        )

    return describe


def found_in(field: str, found: Restored) -> Path:
    kind = PATH_FIELDS[field]
    (name,) = kind.names(fields(found)[field])
    return Path(name)


def test_every_field_that_names_files_is_found_again() -> None:
    # `components` is a part of a record's model.
    assert {"images", "model", "components", *OTHERS} == PATH_FIELDS.keys()


@pytest.mark.parametrize(
    "job",
    [
        JOB | {"keep_outside": True, "images": ["a.png"], "region": "../in/m.png"},
        FILM | {"images": ["a.png"], "camera": "/in/poses.npy"},
        FILM | {"images": ["a.png"], "lora": "../in/x.safetensors"},
    ],
)
def test_a_record_cannot_name_a_path_in_any_field(
    described: Describe, source: Path, job: dict[str, Any]
) -> None:
    file = described(job, model_fingerprint=registry.fingerprint(job["model"]))
    assert code_of(file, Wishes(source.parent)) == "metadata.damaged"


@pytest.mark.parametrize("field", OTHERS)
@pytest.mark.parametrize("place", ["in its run", "beside", "with its picture", "given"])
def test_a_file_of_any_field_is_found(
    field: str, place: str, other: Callable[[str], Described], tmp_path: Path
) -> None:
    file, wishes = other(field), Wishes()
    there = found_in(field, restore_job(file, wishes))
    match place:
        case "beside":
            folder = file.path.parent
        case "with its picture":
            folder = tmp_path / "in"
        case "given":
            folder = tmp_path / "given"
            folder.mkdir()
            wishes = Wishes(images_from=folder)
        case _:
            folder = there.parent
    if folder != there.parent:
        there.with_name("intrinsics.npy").rename(folder / "intrinsics.npy")
        there = there.rename(folder / there.name)
    found = restore_job(file, wishes)
    assert found_in(field, found).samefile(there)
    assert found.notes == ()
    if field == "lora":
        assert [one.weight for one in fields(found)["lora"]] == [-0.5, 0.0]


@pytest.mark.parametrize("field", OTHERS)
def test_a_file_of_any_field_that_is_gone_or_another_is_told(
    field: str, other: Callable[[str], Described]
) -> None:
    file = other(field)
    there = found_in(field, restore_job(file, Wishes()))
    there.write_bytes(b"another")
    assert code_of(file) == "replay.changed-file"
    found = restore_job(file, Wishes(allow_changed=True))
    assert len(found.notes) == 1
    assert found.notes[0].startswith(f"{there.name} is not the recorded ")
    there.unlink()
    assert code_of(file, Wishes(allow_changed=True)) == "replay.missing-file"


def test_a_lora_of_the_hub_is_that_of_its_cache_and_nothing_is_fetched(
    described: Describe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = tmp_path / "cached.safetensors"
    cached.write_bytes(b"x")
    monkeypatch.setattr(hub, "cached_file", {"owner/name/x.safetensors": cached}.get)
    job = FILM | {"task": "t2v", "lora": "owner/name/x.safetensors@2"}
    known = {"settings": CPU | {"lora": f"beside 1;on={digest.of_file(cached)}@2"}}
    fingerprint = {"model_fingerprint": registry.fingerprint("tiny-video")}
    found = restore_job(described(job, **known, **fingerprint), Wishes())
    assert found_in("lora", found) == cached
    elsewhere = described(job | {"lora": "owner/name/y.safetensors@2"}, **known, **fingerprint)
    assert code_of(elsewhere) == "replay.missing-file"


def test_a_hub_file_that_is_not_in_the_cache_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hub.cached_file("no-owner-of-this/no-name/x.safetensors") is None
    assert hub.cached_file("no owner/no name/x.safetensors") is None
