"""How one step is executed: everything about a run that changes its time or its memory and not its result."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

from shoal.cost.transformer import Recompute
from shoal.schedules.table import Schedule
from shoal.topology.layout import Layout

Zero = Literal[0, 1, 2, 3]
V_SHAPED = frozenset(("ZBVZeroBubble", "DualPipeV"))
"""Schedules in which rank i holds the stages i and 2p - 1 - i."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A layout and what fills it. `microbatch` counts samples of one forward on one data-parallel rank.

    `virtual_stages` are the stages that one pipeline rank holds; `zero` shards over the layout's `shard` axis.
    `recompute_share` is the share of the layers to which `recompute` applies. `cut` are the layers of each stage; left
    empty, stages are as even as whole layers allow. `loss_chunks`: of so many parts of the tokens logits are there,
    one after the other, and again in the backward.
    """

    layout: Layout
    microbatch: int
    microbatches: int
    schedule: Schedule = "1F1B"
    virtual_stages: int = 1
    zero: Zero = 0
    recompute: Recompute = "none"
    recompute_share: float = 1.0
    loss_chunks: int = 1
    sequence_parallel: bool = False
    cut: tuple[int, ...] = ()

    @functools.cached_property
    def world_size(self) -> int:
        """Ranks in all."""
        layout = self.layout
        return layout.replicate * layout.pipeline * layout.shard * layout.context * layout.tensor

    @property
    def state_ranks(self) -> int:
        """Ranks over which ZeRO divides dense parameters: shard x context."""
        return self.layout.shard * self.layout.context

    @property
    def data_parallel(self) -> int:
        """Ranks that see different samples."""
        return self.layout.replicate * self.layout.shard

    @property
    def global_samples(self) -> int:
        """Samples of one step."""
        return self.microbatch * self.microbatches * self.data_parallel

    def stage_layers(self, layers: int) -> float:
        """Layers of the pipeline rank that has most."""
        if self.cut:
            return float(max(self.rank_layers(layers, rank) for rank in range(self.layout.pipeline)))
        stages = self.layout.pipeline * self.virtual_stages
        return float(-(-layers // stages) * self.virtual_stages) if stages > 1 else float(layers)

    def rank_layers(self, layers: int, rank: int) -> float:
        """Layers of one pipeline rank: of its stages in a loop, or in a V where the schedule folds."""
        if not self.cut:
            return self.stage_layers(layers)
        ranks = self.layout.pipeline
        if self.schedule in V_SHAPED:
            return float(self.cut[rank] + self.cut[2 * ranks - 1 - rank])
        return float(sum(self.cut[rank::ranks]))

    def describe(self) -> str:
        """One line for people."""
        axes = {name: size for name, size in self.layout.to_dict().items() if size > 1}
        words = [f"{name}={size}" for name, size in axes.items()] or ["one device"]
        words.append(f"micro={self.microbatch}x{self.microbatches}")
        if self.layout.pipeline > 1:
            words.append(self.schedule + (f"(v={self.virtual_stages})" if self.virtual_stages > 1 else ""))
        words += [f"zero={self.zero}"] if self.zero else []
        if self.recompute != "none":
            part = f" of {self.recompute_share:.0%} of the layers" if self.recompute_share < 1 else ""
            words.append(f"recompute={self.recompute}{part}")
        words += ["sequence-parallel"] if self.sequence_parallel else []
        words += [f"loss-chunks={self.loss_chunks}"] if self.loss_chunks > 1 else []
        return " ".join(words)
