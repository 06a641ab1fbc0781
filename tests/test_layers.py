"""Imports go down only. The table is the one of the design: layer, rooms, what they never touch."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import hyimg_cli

PACKAGE = Path(hyimg_cli.__file__).parent
LAYERS = (
    ("addresses",),
    ("errors",),
    ("remote", "surroundings"),
    ("files", "mistyped"),
    ("spec",),
    ("settings", "media", "quality", "cache"),
    ("finishing",),
    ("manifest",),
    ("kv", "diffusion", "kernels", "loading", "parallel"),
    ("tiling",),
    ("models",),
    ("journal",),
    ("memory",),
    ("pipelines",),
    ("report",),
    ("engine",),
    ("scoring",),
    ("measure", "doctor", "serve", "export"),
    ("cli",),
)
LAYER_OF = {room: layer for layer, rooms in enumerate(LAYERS) for room in rooms}
TERMINAL = {"typer", "rich"}
NEVER = {
    "spec": TERMINAL | {"torch", "transformers", "diffusers", "numpy", "PIL", "safetensors"},
    "addresses": TERMINAL | {"torch", "transformers", "diffusers", "numpy", "PIL", "safetensors"},
    "errors": TERMINAL | {"torch", "transformers", "diffusers", "numpy", "PIL", "safetensors"},
    "remote": TERMINAL | {"torch", "transformers", "diffusers", "numpy", "PIL", "safetensors"},
    "surroundings": TERMINAL | {"torch", "transformers", "diffusers", "numpy", "PIL"},
    "files": TERMINAL | {"torch", "transformers", "diffusers", "numpy", "PIL", "safetensors"},
    "mistyped": TERMINAL | {"torch", "transformers", "diffusers", "numpy", "PIL", "safetensors"},
    "settings": TERMINAL | {"torch", "transformers", "diffusers", "numpy", "PIL", "safetensors"},
    "manifest": TERMINAL | {"torch", "transformers", "diffusers"},
    "finishing": TERMINAL | {"torch", "transformers", "diffusers"},
    "journal": TERMINAL | {"transformers", "diffusers"},
    "media": TERMINAL | {"torch", "transformers", "diffusers"},
    "cache": TERMINAL | {"torch", "transformers", "diffusers"},
    "kv": TERMINAL | {"PIL", "transformers", "diffusers"},
    "diffusion": TERMINAL | {"PIL"},
    "loading": TERMINAL | {"PIL"},
    "parallel": TERMINAL | {"PIL", "transformers", "diffusers"},
    "tiling": TERMINAL | {"PIL", "transformers", "diffusers"},
    "models": TERMINAL | {"PIL"},
    "memory": TERMINAL | {"PIL", "transformers", "diffusers"},
    "pipelines": TERMINAL,
    "engine": TERMINAL,
    "measure": TERMINAL | {"transformers", "diffusers", "PIL"},
    # CLIP is the library's.
    "quality": TERMINAL | {"diffusers", "PIL"},
    "report": TERMINAL | {"torch", "transformers", "diffusers"},
    "scoring": TERMINAL | {"torch", "transformers", "diffusers", "PIL"},
    "doctor": TERMINAL | {"transformers", "diffusers", "PIL"},
    "serve": TERMINAL | {"torch", "transformers", "diffusers"},
    "export": TERMINAL | {"torch", "transformers", "diffusers", "numpy", "PIL"},
    "cli": {"torch", "transformers", "diffusers", "numpy", "PIL", "safetensors"},
}
WITHOUT_TORCH = (
    "spec",
    "addresses",
    "errors",
    "remote",
    "surroundings",
    "files",
    "settings",
    "manifest",
    "finishing",
    "journal.disk",
    "journal.job_pictures",
    "journal.bucket",
    "journal.journal",
    "journal.merge",
    "journal.kept_latents",
    "journal.keys",
    "journal.past_run",
    "journal.picks",
    "journal.resume",
    "media",
    "quality",
    "measure.distances",
    "measure.pairs",
    "measure.replay",
    "export",
    "doctor.check",
    "doctor.environment",
    "doctor.models",
    "doctor.folders",
    "doctor.tools",
    "doctor.trial",
    "report",
    "cache",
    "scoring",
    "cli",
    "loading.checkpoint",
    "kv.segments",
    "kv.tree",
    "tiling.tiles",
    "memory.fit",
    "memory.footprint",
    "memory.available",
    "memory.refusals",
    "engine.forecast",
    "engine.recomposite",
    "engine.run",
    "engine.runner",
    "engine.eta",
    "engine.sources",
    "engine.replicas.joining",
    "engine.replicas.local",
    "engine.replicas.messages",
    "engine.replicas.pieces",
    "engine.replicas.run",
    "engine.replicas.worker",
    "parallel.launch",
    "pipelines.failures",
    "parallel.watch",
)
MODULES = sorted(PACKAGE.rglob("*.py"))


def dotted(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(name: str) -> str:
    """`hyimg_cli.manifest.line` is in `manifest`; the package itself and `__main__` are in none."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] != "__main__" else ""


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of everything a module imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: relative import"
            module = node.module or ""
            # `from hyimg_cli.models import registry` names a module, `… import Size` does not.
            yield from (
                (
                    node.lineno,
                    f"{module}.{alias.name}" if module.startswith("hyimg_cli") else module,
                )
                for alias in node.names
            )


# LingBot-World is a Wan with a camera: its layout, VAE, text encoder and picture are Wan's.
BUILDS_ON = dict.fromkeys(("lingbot_world", "diffusers_image"), "diffusers_video")


def family_of(name: str) -> str:
    """The folder of a model family (`hunyuan_image3`), or nothing for a module beside them."""
    parts = name.split(".")
    inside = len(parts) > 2 and parts[1] == "models" and (PACKAGE / "models" / parts[2]).is_dir()
    return parts[2] if inside else ""


class Import(NamedTuple):
    """What a module imports, by full names, and where."""

    module: str
    name: str
    where: str


@pytest.fixture(scope="module")
def imports() -> list[Import]:
    return [
        Import(dotted(path), name, f"{path.relative_to(PACKAGE)}:{line} {name}")
        for path in MODULES
        for line, name in imported(path)
    ]


def test_every_room_is_in_the_table() -> None:
    assert {room_of(dotted(path)) for path in MODULES} - {""} <= LAYER_OF.keys()


def test_imports_go_down_only(imports: list[Import]) -> None:
    def goes_up(one: Import) -> bool:
        here, there = room_of(one.module), room_of(one.name)
        ours = one.name.startswith("hyimg_cli.") and here in LAYER_OF and there in LAYER_OF
        return ours and there != here and LAYER_OF[there] >= LAYER_OF[here]

    assert not [one.where for one in imports if goes_up(one)]


def test_only_its_own_command_imports_the_server(imports: list[Import]) -> None:
    users = {one.module for one in imports if room_of(one.name) == "serve"}
    assert {user for user in users if room_of(user) != "serve"} <= {"hyimg_cli.cli.serve"}
    packages = {"starlette", "uvicorn", "prometheus_client", "python_multipart"}
    assert {room_of(one.module) for one in imports if one.name.split(".")[0] in packages} <= {
        "serve"
    }


def test_rooms_leave_foreign_things_alone(imports: list[Import]) -> None:
    assert not [
        one.where for one in imports if one.name.split(".")[0] in NEVER.get(room_of(one.module), ())
    ]


def test_model_families_are_closed_to_each_other(imports: list[Import]) -> None:
    def is_closed(one: Import) -> bool:
        family = family_of(one.module)
        return not family or family_of(one.name) in ("", "common", family, BUILDS_ON.get(family))

    assert not [one.where for one in imports if not is_closed(one)]


def test_no_room_is_a_grab_bag() -> None:
    # The page of ideas names `models/common`: what several families' decoders share.
    rooms = {path.parent.relative_to(PACKAGE).as_posix() for path in MODULES} - {"models/common"}
    names = {path.stem for path in MODULES} | {room.split("/")[-1] for room in rooms}
    assert not names & {"utils", "util", "helpers", "common", "misc"}


def test_the_torch_free_rooms_import_no_torch() -> None:
    names = [
        dotted(path)
        for path in MODULES
        if dotted(path) == "hyimg_cli"
        or dotted(path).removeprefix("hyimg_cli.").startswith(WITHOUT_TORCH)
    ]
    code = (
        "import sys, importlib\n"
        f"for name in {[*names, 'hyimg_cli.models.registry']!r}: importlib.import_module(name)\n"
        "heavy = {'torch', 'transformers', 'diffusers', 'torchvision'} & set(sys.modules)\n"
        "sys.exit(', '.join(sorted(heavy)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
