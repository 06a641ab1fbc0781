"""Imports go down only. The table is the one of the design: layer, rooms, what they never touch."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hyimg_cli

PACKAGE = Path(hyimg_cli.__file__).parent
LAYERS = (
    ("errors",),
    ("remote",),
    ("files",),
    ("spec",),
    ("settings", "media", "quality", "cache"),
    ("manifest", "finishing"),
    ("kv", "diffusion", "kernels", "loading", "parallel"),
    ("tiling",),
    ("models",),
    ("journal",),
    ("memory",),
    ("pipelines",),
    ("engine", "report"),
    ("measure", "doctor"),
    ("cli",),
)
LAYER_OF = {room: layer for layer, rooms in enumerate(LAYERS) for room in rooms}
TERMINAL = {"typer", "rich"}
NEVER = {
    "spec": TERMINAL | {"torch", "transformers", "diffusers", "numpy", "PIL", "safetensors"},
    "errors": TERMINAL | {"torch", "transformers", "diffusers", "numpy", "PIL", "safetensors"},
    "remote": TERMINAL | {"torch", "transformers", "diffusers", "numpy", "PIL", "safetensors"},
    "files": TERMINAL | {"torch", "transformers", "diffusers", "numpy", "PIL", "safetensors"},
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
    "quality": TERMINAL | {"transformers", "diffusers", "PIL"},
    "report": TERMINAL | {"torch", "transformers", "diffusers"},
    "doctor": TERMINAL | {"transformers", "diffusers", "PIL"},
    "cli": {"torch", "transformers", "diffusers", "numpy", "PIL", "safetensors"},
}
WITHOUT_TORCH = (
    "spec",
    "errors",
    "remote",
    "files",
    "settings",
    "manifest",
    "finishing",
    "journal.differences",
    "journal.disk",
    "journal.edited",
    "journal.bucket",
    "journal.journal",
    "journal.merge",
    "journal.keys",
    "journal.past_run",
    "media",
    "quality",
    "measure.distances",
    "measure.eval",
    "measure.pairs",
    "measure.replay",
    "measure.verdict",
    "doctor.check",
    "doctor.environment",
    "doctor.kernels",
    "doctor.models",
    "doctor.places",
    "doctor.tools",
    "doctor.trial",
    "report",
    "cache",
    "cli",
    "loading.checkpoint",
    "kv.segments",
    "kv.tree",
    "tiling.tiles",
    "memory.fit",
    "memory.footprint",
    "memory.gpu_settings",
    "memory.present",
    "memory.tensor_ranks",
    "engine.again",
    "engine.choice",
    "engine.forecast",
    "engine.runner",
    "engine.timing",
    "engine.sources",
    "engine.replicas.job_queue",
    "engine.replicas.local",
    "engine.replicas.messages",
    "engine.replicas.outcomes",
    "engine.replicas.pieces",
    "engine.replicas.process",
    "engine.replicas.run",
    "engine.replicas.scratch",
    "engine.replicas.worker",
    "parallel.child",
    "parallel.launch",
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
BUILDS_ON = {"lingbot_world": "diffusers_video"}


def family_of(name: str) -> str:
    """The folder of a model family (`hunyuan_image3`), or nothing for a module beside them."""
    parts = name.split(".")
    inside = len(parts) > 2 and parts[1] == "models" and (PACKAGE / "models" / parts[2]).is_dir()
    return parts[2] if inside else ""


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_imports_go_down_only(path: Path) -> None:
    here = room_of(dotted(path))
    if not here:
        return
    assert here in LAYER_OF, f"room {here!r} is not in the table"
    wrong = [
        f"line {line}: {name}"
        for line, name in imported(path)
        if name.startswith("hyimg_cli.")
        and (there := room_of(name)) in LAYER_OF
        and there != here
        and LAYER_OF[there] >= LAYER_OF[here]
    ]
    assert not wrong


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_rooms_leave_foreign_things_alone(path: Path) -> None:
    never = NEVER.get(room_of(dotted(path)), set())
    wrong = [f"line {line}: {name}" for line, name in imported(path) if name.split(".")[0] in never]
    assert not wrong


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_model_families_are_closed_to_each_other(path: Path) -> None:
    family = family_of(dotted(path))
    wrong = [
        f"line {line}: {name}"
        for line, name in imported(path)
        if family and family_of(name) not in ("", family, BUILDS_ON.get(family))
    ]
    assert not wrong


def test_no_room_is_a_grab_bag() -> None:
    names = {path.stem for path in MODULES} | {path.parent.name for path in MODULES}
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
