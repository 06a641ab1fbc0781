"""The base of blocks of our own: they declare parts, inputs and outputs by their names."""

from typing import Any

from diffusers.modular_pipelines.modular_pipeline import ModularPipelineBlocks
from diffusers.modular_pipelines.modular_pipeline_utils import (
    ComponentSpec,
    InputParam,
    OutputParam,
)


class NamedBlock(ModularPipelineBlocks):
    """A block that declares the names of its inputs and outputs."""

    parts: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    makes: tuple[str, ...] = ()

    @property
    def expected_components(self) -> list[ComponentSpec]:
        return [ComponentSpec(name, object) for name in self.parts]

    @property
    def inputs(self) -> list[InputParam]:
        return [InputParam(name) for name in self.reads]

    @property
    def intermediate_outputs(self) -> list[OutputParam]:
        return [OutputParam(name) for name in self.makes]

    def __call__(self, components: Any, state: Any) -> Any:
        block: Any = self.get_block_state(state)
        self.work(components, block)
        self.set_block_state(state, block)
        return components, state

    def work(self, components: Any, block: Any) -> None:
        raise NotImplementedError
