"""What a simulated step is made of, as plain numbers: seconds of every stage and action, and the cost of messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Message:
    """Seconds that a message occupies its ports, and seconds until it arrives after that."""

    busy_s: float
    latency_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage's seconds for one microbatch, and the sums of its gradients: one message for each of its units.

    `inside_s` is the part of all three that is communication inside the stage which nothing hides.
    """

    forward_s: float
    input_s: float
    weight_s: float
    sums: tuple[Message, ...] = ()
    inside_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Work:
    """A step. `blocks_sender`, `blocks_receiver`: they do not compute during a transfer. `behind`: sums of gradients
    wait for the whole backward of their rank. `after`: collectives of every rank between its sums and its optimizer."""

    stages: tuple[Stage, ...]
    transfer: Message
    blocks_sender: bool = False
    blocks_receiver: bool = False
    behind: bool = False
    slowdown: float = 0.0
    after: Message = Message(busy_s=0.0)
    optimizer_s: float = 0.0

    def on_perfect_network(self) -> Work:
        """The same with messages that take no time; collectives inside stages stay."""
        nothing = Message(busy_s=0.0)
        stages = tuple(replace(stage, sums=tuple(nothing for _ in stage.sums)) for stage in self.stages)
        return replace(self, stages=stages, transfer=nothing, after=nothing)


def uniform(stages: int, *, forward_s: float, input_s: float, weight_s: float, transfer_s: float = 0.0) -> Work:
    """Equal stages and nothing else: what closed forms and papers speak of. Transfers occupy nothing."""
    stage = Stage(forward_s=forward_s, input_s=input_s, weight_s=weight_s)
    return Work(stages=(stage,) * stages, transfer=Message(busy_s=0.0, latency_s=transfer_s))


def rank_seconds(work: Work, stages: Sequence[int], microbatches: int) -> float:
    """Seconds that a rank with these stages computes in a step, the optimizer left out."""
    each = (work.stages[stage] for stage in stages)
    return microbatches * sum(stage.forward_s + stage.input_s + stage.weight_s for stage in each)
