"""Gossip: after each of its own steps a replica mixes its parameters with those of its neighbours in a graph.

D-PSGD (Lian et al., arXiv:1705.09056, algorithm 1 with lines 4 and 5 exchanged, as its section 3 allows):

    x_i <- sum over j of W[i][j] (x_j - u_j)          u the optimizer's update, W doubly stochastic

Push-sum SGP (Assran et al., arXiv:1811.10792, algorithm 1): columns of W need to sum to 1, rows do not, and a weight
tells how much each replica holds:

    x_i <- sum over j of W[i][j] (x_j - u_j),    w_i <- sum over j of W[i][j] w_j,    z_i = x_i / w_i

Gradients are taken at z. With `delay` the shares of a step are added that many steps later, and are on the wire behind
the computation between (its algorithm 2); weights then tell what is still on its way. `asynchronous` shares are added
whenever they come (`LateShares`). D-PSGD is the case in which all w stay 1.

Replicas never become equal. Every `meet_every` steps, and after the last, they meet: their average

    sum of x_i / sum of w_i

is the model that an evaluation and a checkpoint see. A meeting changes no replica's own parameters, which a checkpoint
holds too. The run ends with the average.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.comm.collective import Collective, Handle
from shoal.comm.mesh import Mesh
from shoal.errors import ConfigError
from shoal.maths.mixing import Matrix
from shoal.state import Section
from shoal.sync.config import GossipConfig
from shoal.sync.flat_copy import FlatCopy, OwnSection
from shoal.sync.meeting import Meeting, device_of, sum_over
from shoal.sync.push_sum import LateShares, MixingSchedule, PushSum, Share, message_bytes, pack, unpack
from shoal.sync.strategy import Agreed, OwnOptimizer, OwnSteps, Replica, Taken


class GossipSync(OwnSteps):
    """`Sync` of kind "gossip"."""

    def __init__(self, config: GossipConfig, mesh: Mesh) -> None:
        """Raises `ConfigError` for a graph that does not fit the number of replicas."""
        self._config, self._replicas = config, mesh.axis("replicate", lane="sync")
        try:
            self._matrices = config.matrices(mesh.layout.replicate)
        except ValueError as error:
            raise ConfigError(f'sync.kind = "gossip": {error}') from None
        if config.asynchronous and mesh.device.type != "cpu":
            raise ConfigError(
                f"sync.asynchronous = true on {mesh.device.type}: threads receive the shares, on processors so far; "
                'set run.device = "cpu", or leave it out'
            )
        self._lane = mesh.axis("replicate", lane="gossip") if config.asynchronous else None
        self._ledger = mesh.ledger

    def agreement(self, replica: Replica) -> GossipAgreement:
        late = None
        if self._lane is not None:
            schedule = MixingSchedule(self._matrices, self._config.meet_every, replica.steps)
            late = LateShares(
                self._lane, schedule, delay=self._config.delay, ledger=self._ledger, rounds=replica.rounds
            )
        return GossipAgreement(self._config, self._matrices, replica, self._replicas, late=late)


class GossipAgreement(OwnOptimizer):
    """`Agreement` by mixing over `replicas`, the ranks at this rank's place in each, with `matrices` in turn.

    `late`: what exchanges shares without waiting; None: a step waits for those of `delay` steps before.
    """

    def __init__(
        self,
        config: GossipConfig,
        matrices: Sequence[Matrix],
        replica: Replica,
        replicas: Collective,
        *,
        late: LateShares | None = None,
    ) -> None:
        self.equal, self._late = True, late
        self._config, self._matrices, self._replica, self._replicas = config, matrices, replica, replicas
        self._x = FlatCopy(replica.owned)
        self._node = PushSum(replicas.rank, self._x.buffers)
        self._weight = torch.ones((), dtype=torch.float64)
        self._rounds: deque[_Round] = deque()
        self._meeting, self._device = Meeting(replica, replicas), device_of(replica)
        self._begun = False
        self._own = OwnSection(replicas, self._x, scalars={"weight": self._weight})
        self.sections: Sequence[Section] = (self._own,)

    def before_step(self, weight: float = 1.0) -> None:
        """Replicas that have met go on from what they had."""
        if not self.equal:
            return
        self.equal = False
        if self._begun or self._own.loaded:
            self._node.weight = float(self._weight)
            self._x.write(self._estimate())
            self._replica.gather()
        else:
            self._x.read()
        self._begun = True

    def after_update(self, step: int, taken: Taken) -> Agreed | None:
        self._meeting.note(taken)
        self._take_update()
        meets = step % self._config.meet_every == 0 or step == self._replica.steps
        if self._late is not None:
            self._late.exchange(self._node, step)
        else:
            self._send(self._matrices[(step - 1) % len(self._matrices)])
            while len(self._rounds) > (0 if meets else self._config.delay):
                self._rounds.popleft().add_to(self._node)
        if not meets:
            self._x.write(self._estimate())
            self._replica.gather()
            return None
        self._weight.fill_(self._node.weight)
        self._show_average()
        self.equal = True
        return self._meeting.hold(self._device)

    def take_figures(self) -> Mapping[str, float]:
        """Of asynchronous shares, see `LateShares.figures`."""
        return {} if self._late is None else self._late.figures()

    def _estimate(self) -> Sequence[Tensor]:
        """z; D-PSGD's weights are 1 but for rounding, and it does not divide by them."""
        return self._node.z() if self._config.algorithm == "sgp" else self._node.x

    def _take_update(self) -> None:
        """x - u from z - u, which the optimizer has left in the parameters: (z - u) + (w - 1) z."""
        rest = [(self._node.weight - 1.0) * z for z in self._node.z()] if self._config.algorithm == "sgp" else None
        self._x.read()
        if rest is not None:
            for x, more in zip(self._node.x, rest, strict=True):
                x.add_(more)

    def _send(self, matrix: Matrix) -> None:
        """Starts to send this step's shares along the edges of the graph."""
        me = self._replicas.rank
        fractions = {to: row[me] for to, row in enumerate(matrix) if to != me and row[me] > 0}
        sources = [source for source, part in enumerate(matrix[me]) if source != me and part > 0]
        self._rounds.append(
            _Round(self._node.push(fractions), sources, self._node.x, self._replicas, device=self._device)
        )

    def _show_average(self) -> None:
        """The parameters become the replicas' average; `_x` stays as it is."""
        flat = [x.clone() for x in self._node.x]
        sum_over(self._replicas, flat)
        self._x.write([x / self._replicas.size for x in flat])  # the weights of all sum to their number
        self._replica.gather()


@dataclass
class _Round:
    """The shares of one step, on their way. Of two that send to each other the lower rank sends first, so that devices
    that carry one message at a time between two ranks do not wait for each other.
    """

    shares: dict[int, Share]
    sources: Sequence[int]
    like: Sequence[Tensor]
    replicas: Collective
    device: torch.device

    def __post_init__(self) -> None:
        self._arriving: dict[int, Tensor] = {}
        self._handles: list[Handle] = []
        me = self.replicas.rank
        messages = {to: pack(share, self.device) for to, share in self.shares.items()}
        size = message_bytes(self.like)
        for peer in sorted({*messages, *self.sources}):
            for sends in (me < peer, me > peer):
                if sends and peer in messages:
                    self._handles.append(self.replicas.send(messages[peer], to=peer))
                if not sends and peer in self.sources:
                    arriving = torch.empty(size, dtype=torch.uint8, device=self.device)
                    self._handles.append(self.replicas.recv(arriving, source=peer))
                    self._arriving[peer] = arriving
        self._messages = messages  # a message may not be freed while it is on the wire

    def add_to(self, node: PushSum) -> None:
        """Waits for all of them, and adds what came, in the order of ranks."""
        for handle in self._handles:
            handle.wait()
        for source in sorted(self._arriving):
            node.receive(unpack(self._arriving[source], source, self.like))
