"""Editors draw only: a question to one is refused by its name, before anything is loaded."""

from typing import Any

from models.diffusers_image.classic import Checkpoint


def test_an_editor_answers_nothing(
    run_cli: Any, write_manifest: Any, checkpoint: Checkpoint, sources: list[str]
) -> None:
    folder = checkpoint("klein")
    line = {"custom_id": "q", "task": "i2t", "images": [sources[0]], "prompt": "what is it?"}
    manifest = write_manifest(line | {"model": str(folder)})
    for words in (("check", manifest), ("generate", manifest, "-o", "out")):
        ran = run_cli(*words)
        assert ran.code == 2, ran.err
        assert "error[manifest.task]" in ran.out + ran.err
        assert folder.name in ran.out + ran.err
