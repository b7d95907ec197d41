"""What is trained, and what of it a step's communication moves: all that prices ask of a model."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.cost.flops import Recompute
from shoal.cost.transformer import Transformer


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and the step that trains it."""

    model: Transformer
    global_samples: int
    sequence: int

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.global_samples * self.sequence


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The fullest pipeline rank of a plan, the first.

    `numbers` are its parameters before ZeRO shards them, `tied_numbers` those of an embedding that the last stage uses
    too. `boundary_bytes` are one activation of a microbatch towards the next stage.
    """

    layers: float
    numbers: float
    tied_numbers: float
    boundary_bytes: float


@dataclass(frozen=True, kw_only=True)
class Abilities:
    """What of a search a model can do: axes that can split it, what it can compute again, sliced sequences."""

    axes: frozenset[str] = frozenset(("replicate", "shard", "pipeline", "context", "tensor", "expert"))
    recompute: frozenset[Recompute] = frozenset(("none", "selective", "full"))
    sequence_parallel: bool = True
