"""One picture alone, again and in a batch: which of them are equal to the bit on this machine."""

import json
import tempfile
from pathlib import Path

from hyimg_cli.doctor.check import Check
from hyimg_cli.doctor.models import model_name
from hyimg_cli.doctor.trial import bare, draw_pictures
from hyimg_cli.engine import runner
from hyimg_cli.journal.keys import precision
from hyimg_cli.manifest.manifest import manifest_of
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.spec.plan import Plan

# Texts and prompts of other lengths: the first one's rows have other company in each forward.
_PROMPTS = ("a red circle", "a blue square above a green circle", "a dog", "two yellow stars")
_JOB = {"num_inference_steps": 4, "max_new_tokens": 16}


def determinism(config: RunConfig) -> Check:
    """Which runs of one job, by the chosen model, end with the same pixels.

    Failed where two differ that are claimed to be equal: all of them on a CPU, on a GPU those that
    had the same company under `--deterministic`.
    """
    from hyimg_cli.engine.session import Session

    with tempfile.TemporaryDirectory() as name:
        config = bare(config, Path(name))
        one, all_ = (_plan(config, count) for count in (1, len(_PROMPTS)))
        digests = []
        with Session(config) as session:
            for number, plan in enumerate((one, one, all_, all_)):
                digests.append(draw_pictures(session, plan, Path(name, str(number))))
                session.forget()
    alone, again, batch, batch_again = digests
    (first,) = alone
    together = f"in a batch of {len(_PROMPTS)}"
    found = {
        "alone, again": alone == again,
        together: alone[first] == batch[first],
        f"{together}, again": batch == batch_again,
    }
    told = "; ".join(f"{what}: {'equal' if it else 'other bits'}" for what, it in found.items())
    kind, dtype = precision(config.model)
    said = f"{model_name(config.model.model)} on {kind} in {dtype}, {told}"
    if all(found.values()):
        return Check("ok", said)
    is_same_company = alone == again and batch == batch_again
    if kind == "cpu" and config.batch.is_invariant:
        return Check("failed", said, "please report it: on a CPU they should be equal")
    if is_same_company:
        return Check("ok", f"{said} (a row's bits may depend on its company here)")
    if config.model.deterministic:
        return Check("failed", said, "please report it: --deterministic claims them")
    return Check("warning", said, "--deterministic leaves out what may differ")


def _plan(config: RunConfig, count: int) -> Plan:
    shared = _JOB | {"model": config.model.model}
    lines = (shared | {"prompt": prompt, "seed": n} for n, prompt in enumerate(_PROMPTS[:count]))
    return runner.make_plan(manifest_of("\n".join(map(json.dumps, lines)).encode(), "determinism"))
