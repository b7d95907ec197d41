"""What replicas tell each other when they meet, beside parameters: who was told to stop, tokens, the mean loss.

Persistent buffers of the model, such as running statistics, are averaged there too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.comm.collective import Collective
from shoal.state import numbers_on
from shoal.sync.strategy import Agreed, Replica, Taken


@dataclass
class Meeting:
    """What this replica has to tell of its steps since the last meeting. `replicas` are the ranks at its place in each
    replica.
    """

    replica: Replica
    replicas: Collective
    stop: bool = False
    tokens: int = 0
    losses: float = 0.0
    steps: int = 0
    loss: float = 0.0
    """The mean over all replicas of the losses between the last two meetings."""

    def note(self, taken: Taken) -> None:
        """A step was taken."""
        self.stop, self.tokens = self.stop or taken.stop, self.tokens + taken.tokens
        self.losses, self.steps = self.losses + taken.loss, self.steps + 1

    def hold(self, device: torch.device) -> Agreed:
        """Averages the buffers, and exchanges what was noted since the last meeting. All replicas call it together."""
        for buffer in self.replica.buffers:
            mean = buffer.double()
            sum_over(self.replicas, [mean])
            buffer.copy_(mean / self.replicas.size)
        told = [float(self.stop), float(self.tokens), self.losses / max(1, self.steps)]
        shared = numbers_on(device, told)
        self.replicas.all_reduce(shared).wait()
        stop, tokens, loss = shared.tolist()
        self.stop, self.tokens, self.losses, self.steps = False, 0, 0.0, 0
        self.loss = loss / self.replicas.size
        return Agreed(stop > 0, int(tokens))


def sum_over(replicas: Collective, tensors: Sequence[Tensor]) -> None:
    """Each tensor becomes its sum over the replicas, in place."""
    for handle in [replicas.all_reduce(tensor) for tensor in tensors]:
        handle.wait()


def device_of(replica: Replica) -> torch.device:
    """Where the replica computes."""
    return next((one.parameter.device for one in replica.owned), torch.device("cpu"))
