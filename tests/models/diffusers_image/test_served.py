"""Editors in a server's engine: one at a time, online first, and with latents that are kept."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import thorough_but
from models.diffusers_image.classic import Checkpoint, line, pixels_of, results
from served_batch import PATIENCE_S, ServedBatch, serving

from hyimg_cli.errors import Interrupted
from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.settings.run import CacheConfig, ModelChoice, OutputConfig


@pytest.mark.parametrize("kind", thorough_but(["klein"], ["qwen-image-edit", "klein"]))
def test_served_edits_are_those_of_generate_and_go_on_from_their_latents(
    run_cli: Any, write_manifest: Any, tmp_path: Path, checkpoint: Checkpoint, sources: list[str],
    kind: str,
) -> None:  # fmt: skip
    model, often = str(checkpoint(kind)), ("--checkpoint-every", "1")
    lines = [line(f"j{n}", "red", f"s{n % 2}.png", seed=n) for n in range(3)]
    manifest = write_manifest(*lines)
    assert run_cli("generate", manifest, "--model", model, "-o", "alone", *often).code == 0
    output, kept = OutputConfig(tmp_path, checkpoint_every=1), Path(sources[0]).read_bytes()
    with serving(tmp_path, model=ModelChoice(model), output=output) as service:
        first, second = (ServedBatch(service, manifest, tmp_path / name) for name in "ab")
        assert first.ended().error is second.ended().error is None
        # A source that was replaced since it was read is read anew: its digest is of this run.
        Path(sources[0]).write_bytes(Path(sources[1]).read_bytes())
        replaced = ServedBatch(service, manifest, tmp_path / "d").ended()
        assert (replaced.error, replaced.summary.failed) == (None, 0)
        Path(sources[0]).write_bytes(kept)
        stopped = ServedBatch(service, manifest, tmp_path / "c")
        assert stopped.has_line.wait(PATIENCE_S)
        service.stop(0.0)
        assert isinstance(stopped.ended().error, Interrupted)
    assert 1 <= len(results(tmp_path / "c")) < 3
    assert run_cli("generate", manifest, "--model", model, "-o", "c", *often).code == 0
    alone = pixels_of(tmp_path / "alone")
    for name in "abc":
        made = pixels_of(tmp_path / name)
        assert all(np.array_equal(made[one], alone[one]) for one in ("j0", "j1", "j2"))


@pytest.mark.parametrize("kind", ["klein-kv"])
def test_what_one_key_had_encoded_is_not_there_for_another(
    write_manifest: Any, tmp_path: Path, checkpoint: Checkpoint, sources: list[str], kind: str
) -> None:
    """Neither embeddings, in memory or on disk, nor keys and values of the sources."""
    manifest = write_manifest(line("j", "red", "s0.png", seed=1))
    served: dict[str, Any] = {"model": ModelChoice(str(checkpoint(kind)))}
    served |= {"output": OutputConfig(tmp_path), "cache": CacheConfig(tmp_path / "cache")}
    runs = dict[str, list[Any]]()
    for name, *scopes in (("first", "a", "b", "a2"), ("again", "a", "c")):
        with serving(tmp_path, **served) as service:
            for scope in scopes:
                out = tmp_path / name / scope
                batch = ServedBatch(service, manifest, out, scope=scope[0])
                assert batch.ended().error is None
                (made,) = RunFolder(out).results().values()
                own = made["kv_reuse"]["branches"][0]
                runs[f"{name} {scope}"] = [made["cache"]["encoder_runs"], own["shared"] > 0]
    # The server's own stand-in has had one of each.
    one, two, three = ({"text_encoder": n, "vae_encoder": n} for n in (1, 2, 3))
    assert runs["first a"] == [two, False]
    assert runs["first b"] == [three, False], "nothing of a's was there"
    assert runs["first a2"] == [three, True], "its own was, K/V too"
    assert runs["again a"] == [{}, False], "on disk"
    assert runs["again c"] == [one, False], "a's file is not c's"
