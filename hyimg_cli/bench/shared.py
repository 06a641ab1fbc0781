"""The models of a comparison: each is loaded once, for every session that asks for it.

Both variants, the runs that are looked through and the controls have sessions of their own; most
differ in how a model is used, not in which. At the real size loading takes minutes, and two copies
fit nowhere.
"""

from collections.abc import Callable

from hyimg_cli.models import registry
from hyimg_cli.models.protocols import MixedModel
from hyimg_cli.spec.run import ModelChoice


class SharedModels:
    """Loaded models, by what was asked for; one session works at a time."""

    def __init__(self) -> None:
        self._loaded: dict[tuple[ModelChoice, bool], MixedModel] = {}

    def load(self, choice: ModelChoice, *, is_batch_invariant: bool) -> MixedModel:
        """As `registry.load`; the second time it is there."""
        asked = choice, is_batch_invariant
        if asked not in self._loaded:
            self._loaded[asked] = registry.load(choice, is_batch_invariant=is_batch_invariant)
        return self._loaded[asked]

    def wrapped(self, wrap: Callable[[MixedModel], MixedModel]) -> "Wrapped":
        """The same models, each behind `wrap`."""
        return Wrapped(self, wrap)


class Wrapped:
    """Loads for one session: shared models, with something of its own in front."""

    def __init__(self, models: SharedModels, wrap: Callable[[MixedModel], MixedModel]) -> None:
        self._models = models
        self._wrap = wrap

    def __call__(self, choice: ModelChoice, *, is_batch_invariant: bool) -> MixedModel:
        return self._wrap(self._models.load(choice, is_batch_invariant=is_batch_invariant))
