"""What a step did, and what it took."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.comm.ledger import Entry
from shoal.engine.noise import NoiseReading
from shoal.engine.tally import Tally
from shoal.sync.strategy import Agreed


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step, without overlap: they add up to it.

    `sync_exposed_s` is what the caller stood still for the wire, wherever that was; `optimizer_s` holds norm and clip.
    """

    forward_backward_s: float
    sync_exposed_s: float
    optimizer_s: float


@dataclass(frozen=True)
class StepResult:
    """What a step did. `norm` and `loss` are those of the whole global batch; `scale` is the loss scale it used.

    `agreed` is what all replicas know since; None if they did not agree in this step. `noise` is None where it was not
    due, or the step not finite. `wire` is what this rank sent, by operation. `skipped`: other replicas made the step
    without this one, which computed nothing.
    """

    loss: float
    norm: float
    scale: float
    committed: bool
    tally: Tally
    times: StepTimes
    bytes_sent: int
    agreed: Agreed | None = None
    noise: NoiseReading | None = None
    wire: Mapping[str, Entry] = field(default_factory=dict)
    skipped: bool = False
