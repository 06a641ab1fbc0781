"""What makes a picture model's weights fit, named by its flags; no torch."""

from collections.abc import Callable
from dataclasses import dataclass

from hyimg_cli.spec.run import Quantization

# In the order of what they change.
_FORMS: tuple[Quantization, ...] = ("none", "fp8", "nf4")


@dataclass(frozen=True)
class Attempt:
    """How weights were to be held, and what room there was for them.

    `nbytes` gives their bytes by quantization where this process has its part; `gpus`: how many
    there are, 0 on a CPU. `is_spread`: over several already.
    """

    quantization: Quantization
    dtype: str
    nbytes: Callable[[Quantization], int]
    free: int
    gpus: int
    is_spread: bool


def flags_that_fit(attempt: Attempt) -> str:
    """Which flags would make the weights fit, the one that changes least first."""
    smaller = _FORMS[_FORMS.index(attempt.quantization) + 1 :]
    sizes = [(form, attempt.nbytes(form)) for form in smaller]
    fitting = next(((form, size) for form, size in sizes if size <= attempt.free), None)
    hints = []
    if fitting is not None:
        hints.append(f"--quantization {fitting[0]} takes {fitting[1] / 1e9:.1f} GB, which fits")
    elif sizes:
        form, size = sizes[-1]
        hints.append(f"even --quantization {form} takes {size / 1e9:.1f} GB")
    if attempt.gpus == 0 and attempt.dtype == "float32":
        hints.append("--dtype bfloat16 halves the weights")
    if attempt.gpus > 0:
        hints.append(_more_gpus(attempt))
    return "; ".join(hints) or "free memory, or use a machine with more"


def _more_gpus(attempt: Attempt) -> str:
    if attempt.is_spread:
        return "more GPUs hold less each"
    if attempt.gpus > 1:
        spread = f"--tensor-parallel-size {attempt.gpus} or --device balanced"
        return f"{spread} spreads them over the {attempt.gpus} GPUs here"
    return "with more GPUs --tensor-parallel-size or --device balanced spreads them"
