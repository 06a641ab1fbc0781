"""The models of a comparison: each is loaded once, for every session that asks for it.

Both variants, the runs that are looked through and the controls have sessions of their own; most
differ in how a model is used, not in which. At the real size loading takes minutes, and two copies
fit nowhere.
"""

from collections.abc import Callable

from hyimg_cli.models import registry
from hyimg_cli.models.protocols import MixedModel
from hyimg_cli.pipelines.image.pipeline import LoadModel
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

    def wrapped(self, wrap: Callable[[MixedModel], MixedModel]) -> LoadModel:
        """How one session comes by them: each behind `wrap`."""

        def load(choice: ModelChoice, *, is_batch_invariant: bool) -> MixedModel:
            return wrap(self.load(choice, is_batch_invariant=is_batch_invariant))

        return load
