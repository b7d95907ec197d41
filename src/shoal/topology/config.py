"""The table `[layout]` of the run file: one key for each axis."""

from __future__ import annotations

from typing import Annotated

import msgspec

from shoal.config.check import Table, says
from shoal.topology.layout import Layout
from shoal.topology.refusal import MOST_RANKS

Size = Annotated[int, msgspec.Meta(ge=1, le=MOST_RANKS)]


class LayoutConfig(Table, frozen=True):
    """How the ranks are arranged, outermost axis first: replicate x pipeline x shard x context x tensor."""

    replicate: Annotated[Size | None, says("Copies of the model; default: as many as the processes make.")] = None
    pipeline: Annotated[Size, says("Stages of layers; `[pipeline]` says how microbatches go through them.")] = 1
    shard: Annotated[Size, says("Parts of the samples and of the model's state; `memory.zero` says of which.")] = 1
    context: Annotated[Size, says("Parts of every sequence; `[context]` says how attention sees the others.")] = 1
    tensor: Annotated[Size, says("Parts of every matrix.")] = 1
    tensor_grid: Annotated[
        Annotated[list[Size], msgspec.Meta(min_length=2, max_length=2)] | None,
        says(
            "Rows and columns, such as [2, 2], of a grid on which the ranks of `tensor` hold the matrices of attention "
            "and feed-forward in blocks of both sides (SUMMA, van de Geijn and Watts 1997); default: split along one "
            "side."
        ),
    ] = None
    expert: Annotated[
        Size, says("Parts of the experts; they lie on the ranks of shard x context x tensor, which it must divide.")
    ] = 1
    sequence_parallel: Annotated[
        bool, says("Under `tensor`, also split norms and residuals, along the sequence (arXiv:2205.05198).")
    ] = False

    auto: Annotated[
        bool,
        says(
            "The planner picks sizes of axes, microbatches, `pipeline.schedule`, `memory.zero` and `memory.recompute`, "
            "and keeps those that are given and are not the defaults (`pipeline = 1` is one; `replicate = 1` is not). "
            "A run that goes on keeps the layout that its directory holds."
        ),
    ] = False
    replan: Annotated[bool, says("Under `auto`, pick again although the run directory holds a layout.")] = False
    cluster: Annotated[
        str | None,
        says(
            "The cluster file that `auto`, `shoal plan` and `shoal simulate` plan for; default: this machine's cores."
        ),
    ] = None

    @property
    def sizes(self) -> dict[str, int | None]:
        """The six sizes by name; `replicate` None where it follows from the number of processes."""
        axes = ("replicate", "pipeline", "shard", "context", "tensor", "expert")
        return {axis: getattr(self, axis) for axis in axes}

    def layout(self, processes: int) -> Layout:
        """The layout of that many ranks. Raises `LayoutError` where they cannot be arranged so."""
        return Layout.for_processes(processes, **self.sizes)

    @property
    def replica_size(self) -> int:
        """Ranks of one replica."""
        return self.pipeline * self.shard * self.context * self.tensor

    @property
    def default_processes(self) -> int | None:
        """The product of the sizes; None where no axis is given."""
        product = Layout.from_dict({**self.sizes, "replicate": self.replicate or 1}).world_size  # type: ignore[dict-item]
        return product if product > 1 or self.replicate is not None else None
