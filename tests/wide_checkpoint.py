"""A checkpoint with so many experts that holding them shows, and a watch on a process's memory."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hyimg_cli.models.hunyuan_image3.config import architecture
from hyimg_cli.models.hunyuan_image3.weights import expected_shapes


def wide_checkpoint(folder: Path, config: dict[str, Any]) -> Path:
    """Random weights of a configuration in several shards."""
    folder.mkdir()
    weight_map: dict[str, str] = {}
    by_file: dict[str, dict[str, torch.Tensor]] = {}
    for number, (name, shape) in enumerate(expected_shapes(architecture(config)).items()):
        weight_map[name] = f"model-{number % 4}.safetensors"
        shard = by_file.setdefault(weight_map[name], {})
        shard[name] = torch.full(shape, 0.01, dtype=torch.bfloat16)
    for file, tensors in by_file.items():
        save_file(tensors, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


class Anonymous:
    """Growth of this process's memory that is no file's, at its largest, in bytes."""

    def __enter__(self) -> "Anonymous":
        if not Path("/proc/self/status").exists():
            pytest.skip("needs /proc to tell a file's pages from others")
        self._before = self._most = _anonymous_bytes()
        self._is_over = False
        self._watch = threading.Thread(target=self._look)
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._watch.join()
        self._most = max(self._most, _anonymous_bytes())

    @property
    def grown(self) -> int:
        return self._most - self._before

    def _look(self) -> None:
        while not self._is_over:
            self._most = max(self._most, _anonymous_bytes())
            time.sleep(0.001)


def _anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
