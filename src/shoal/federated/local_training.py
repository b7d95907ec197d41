"""Local steps: SGD with a strategy's corrections, of one client or of many at once.

    g = grad f_i(y) + pull (y - x) + shift_i + decay y          f_i: the weighted mean loss of the client's batch
    v = momentum v + g,   y = y - lr v                          Nesterov: y = y - lr (g + momentum v)

Clients of one model version differ in their data alone, so their gradients come from one `torch.func.vmap` over
[clients, numel]; that is what makes simulations of thousands of clients fast. A real client is a cohort of one.

In each epoch a client takes its samples in the order of random keys, one for each sample, and a round goes on where the
one before it ended. The batches of several clients lie side by side: every tensor of a `CohortBatch` begins with the
dims [clients, samples].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from shoal.data.batches import read_batch
from shoal.data.config import Denominator
from shoal.data.sample import Batch, Source, Tree, map_tree
from shoal.engine.loss import Loss, weighted_losses
from shoal.errors import ShoalError, UserCodeError
from shoal.federated.config import FederatedConfig
from shoal.federated.vector import VectorLayout
from shoal.maths.counter import bits, key_of, uniform
from shoal.optim.config import SGD


@dataclass(frozen=True)
class CohortBatch:
    """One local step of several clients. `weights` are 0 where a client has fewer samples, or no step left."""

    inputs: Tree
    targets: Tree
    weights: Tensor
    active: Tensor


class ClientData:
    """The samples `ids` (int64) of a source, as one client's. Its order follows from `seed`.

    `each_by_chance`: a step takes each sample by itself, with chance batch / samples, as DP-SGD asks; a step may then
    have more samples than `batch`, or none.
    """

    def __init__(self, ids: np.ndarray, *, seed: int, shuffle: bool = True, each_by_chance: bool = False) -> None:
        self.ids, self.seed, self.shuffle, self.each_by_chance = ids, seed, shuffle, each_by_chance
        self._kept: tuple[int, int, np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def steps(self, config: FederatedConfig, batch: int) -> int:
        """Local steps of a round."""
        return steps_of(config, len(self), batch)

    def samples_of_step(self, config: FederatedConfig, batch: int, *, turn: int, step: int) -> np.ndarray:
        """Sample ids of local step `step` of the client's round `turn`, both from 0; at most `batch` of them.

        Rounds of steps follow on each other through the client's epochs; a round of epochs has a short last step.
        """
        if self.each_by_chance:
            places = torch.arange(len(self), dtype=torch.int64)
            drawn = uniform(key_of(self.seed, "batch", turn, step), places, dtype=torch.float64)
            return self.ids[(drawn < batch / len(self)).numpy()]
        if self._kept is None or self._kept[:2] != self.span(config, batch, turn):
            order_rounds([self], config, batch, turns=[turn])
        assert self._kept is not None
        return self._kept[2][step * batch : (step + 1) * batch]

    def span(self, config: FederatedConfig, batch: int, turn: int) -> tuple[int, int]:
        """The client's positions of a round: from the first up to the last, over all its epochs."""
        whole = config.local_epochs * len(self) if config.local_steps is None else config.local_steps * batch
        return turn * whole, (turn + 1) * whole

    def keep(self, first: int, last: int, ids: np.ndarray) -> None:
        """The sample ids at these positions, until others are kept."""
        self._kept = first, last, ids

    @cached_property
    def order_key(self) -> int:
        """The key of the random order."""
        return key_of(self.seed, "order")


def order_rounds(clients: Sequence[ClientData], config: FederatedConfig, batch: int, *, turns: Sequence[int]) -> None:
    """Orders the samples of a round of each client, which takes them in the order of a random key of each position of
    an epoch; the epochs of all clients with as many samples are drawn and sorted at once."""
    by_size: dict[int, list[tuple[ClientData, int]]] = {}
    for client, turn in zip(clients, turns, strict=True):
        by_size.setdefault(len(client), []).append((client, turn))
    for size, some in by_size.items():
        spans = [client.span(config, batch, turn) for client, turn in some]
        epochs = [(first // size, -(-last // size)) for first, last in spans]
        rows = np.concatenate([np.arange(*pair) for pair in epochs])  # the epochs of one client after another's
        counts = [after - before for before, after in epochs]
        owners = np.repeat(np.arange(len(some)), counts)
        ids = np.stack([client.ids for client, _ in some])
        if all(client.shuffle for client, _ in some):
            keys = torch.tensor([client.order_key for client, _ in some])[torch.from_numpy(owners)]
            drawn = bits(keys[:, None], torch.from_numpy(rows[:, None] * size + np.arange(size)))
            taken = np.take_along_axis(ids[owners], drawn.numpy().argsort(1), 1)
        else:
            taken = ids[owners]
        edges = np.cumsum([0, *counts[:-1]])
        for (client, _), (first, last), edge in zip(some, spans, edges.tolist(), strict=True):
            start = edge * size + first % size
            client.keep(first, last, taken.reshape(-1)[start : start + last - first])


def steps_of(config: FederatedConfig, samples: int, batch: int) -> int:
    """Local steps of a round of a client with so many samples."""
    return config.local_steps or -(-config.local_epochs * samples // batch)


def cohort_batch(
    source: Source, rows: Sequence[np.ndarray], *, batch: int, denominator: Denominator, active: Sequence[bool]
) -> CohortBatch:
    """The samples `rows` of each client side by side; a row with fewer than `batch` is filled up with weight 0."""
    lengths = [len(row) for row in rows]
    stand_in = next((int(row[0]) for row in rows if len(row)), 0)
    filled = [row if len(row) == batch else _filled(row, batch, stand_in) for row in rows]
    read = read_batch(source, np.concatenate(filled), np.arange(batch * len(rows)), denominator=denominator).batch
    inputs, targets, weights = side_by_side(read, len(rows))
    for row, length in enumerate(lengths):
        if length < batch:
            weights[row, length:] = 0
    return CohortBatch(inputs, targets, weights, torch.tensor(active))


def _filled(row: np.ndarray, batch: int, stand_in: int) -> np.ndarray:
    """A row of `batch` sample ids; those that are made up weigh nothing."""
    return np.concatenate([row, np.full(batch - len(row), row[0] if len(row) else stand_in)])


def side_by_side(batch: Batch, clients: int) -> tuple[Tree, Tree, Tensor]:
    """Inputs, targets and weights [clients, samples, ...] of a batch [clients x samples, ...]."""

    def cut(leaf: Tensor) -> Tensor:
        return leaf.reshape(clients, -1, *leaf.shape[1:])

    return map_tree(cut, batch.inputs), map_tree(cut, batch.targets), cut(batch.weights).clone()


PerSampleGradient = Callable[[Callable[..., Any], Tensor, Tree, Tree, Tensor], tuple[Tensor, Tensor]]
"""(loss, model [numel], inputs, targets, weights) to (gradient [numel], loss): how DP-SGD takes the place of `grad`."""


class Trained(NamedTuple):
    """What local training came to: `deltas` [clients, numel], mean `losses` [clients], `steps` [clients]."""

    deltas: Tensor
    losses: Tensor
    steps: list[int]


@dataclass(frozen=True)
class LocalTrainer:
    """Trains copies of `module`, whose own parameters are not used. `decays` [numel] is 1 where weight decay applies.

    `private`: a gradient that hides samples, in place of the plain one.
    """

    module: nn.Module
    loss: Loss
    layout: VectorLayout
    sgd: SGD
    decays: Tensor
    private: PerSampleGradient | None = None

    def loss_of(self, vector: Tensor, inputs: Tree, targets: Tree, weights: Tensor) -> Tensor:
        """The weighted mean loss of a batch under the model `vector` [numel]; 0 for a batch that weighs nothing."""
        outputs = self.outputs_of(vector, inputs)
        return weighted_losses(self.loss(outputs, targets), weights).sum() / weights.sum().clamp(min=1e-12)

    def outputs_of(self, vector: Tensor, inputs: Tree) -> Any:
        """What the module makes of `inputs` with the parameters in `vector`."""
        args, keywords = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
        args = args if isinstance(args, tuple) else (args,)
        return functional_call(self.module, self.layout.views(vector), args, keywords)

    def train(
        self,
        model: Tensor,
        batches: Iterable[CohortBatch],
        *,
        lr: float,
        pull: float = 0.0,
        shifts: Sequence[Tensor | None] = (None,),
        anchor: Tensor | None = None,
        seed: int = 0,
    ) -> Trained:
        """Trains one copy of `model` [numel], or the copies [clients, numel], one for each of `shifts`. `pull` is
        towards `anchor` [numel], or to where a copy began.

        Raises `UserCodeError` where the module cannot train many copies at once.
        """
        x = model.expand(len(shifts), -1) if model.ndim == 1 else model
        y, velocity = x.clone(), torch.zeros_like(x)
        shift = None if all(s is None for s in shifts) else _stacked(shifts, x)
        losses, steps = torch.zeros(len(x), dtype=torch.float64), torch.zeros(len(x), dtype=torch.int64)
        self.module.train()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for batch in batches:
                gradient, loss = self._gradients(y, batch)
                gradient = self._corrected(gradient, x if anchor is None else anchor, y, pull, shift)
                moved = self._step(y, velocity, gradient, lr, first=steps == 0)
                y = torch.where(batch.active[:, None], moved, y)
                losses += torch.where(batch.active, loss.double(), 0.0)
                steps += batch.active
        return Trained(y - x, losses / steps.clamp(min=1), steps.tolist())

    def _gradients(self, y: Tensor, batch: CohortBatch) -> tuple[Tensor, Tensor]:
        one = grad_and_value(self.loss_of)
        if len(y) == 1:
            inputs, targets = (map_tree(lambda leaf: leaf[0], tree) for tree in (batch.inputs, batch.targets))
            if self.private is not None:
                gradient, loss = self.private(self.loss_of, y[0], inputs, targets, batch.weights[0])
            else:
                gradient, loss = one(y[0], inputs, targets, batch.weights[0])
            return gradient[None], loss[None]
        try:
            return vmap(one, randomness="different")(y, batch.inputs, batch.targets, batch.weights)
        except ShoalError:
            raise
        except RuntimeError as error:
            raise UserCodeError(
                f"the model cannot train several copies at once by torch.func.vmap ({str(error).splitlines()[0]}): set "
                "devices.together = 1, and clients train one after another"
            ) from error

    def _corrected(self, gradient: Tensor, x: Tensor, y: Tensor, pull: float, shift: Tensor | None) -> Tensor:
        if pull:
            gradient = gradient + pull * (y - x)
        if shift is not None:
            gradient = gradient + shift
        if self.sgd.clip_norm is not None:
            norms = gradient.norm(dim=1, keepdim=True)
            gradient = gradient * (self.sgd.clip_norm / (norms + 1e-6)).clamp(max=1.0)
        return gradient + self.sgd.weight_decay * self.decays * y if self.sgd.weight_decay else gradient

    def _step(self, y: Tensor, velocity: Tensor, gradient: Tensor, lr: float, *, first: Tensor) -> Tensor:
        if not self.sgd.momentum:
            return y - lr * gradient
        velocity.copy_(torch.where(first[:, None], gradient, self.sgd.momentum * velocity + gradient))
        return y - lr * (gradient + self.sgd.momentum * velocity if self.sgd.nesterov else velocity)


class Replica(Protocol):
    """The ranks that are one client, as rank 0 sees them: it has the client's vectors, each of them trains a part."""

    def train(
        self,
        model: Tensor,
        steps: Sequence[np.ndarray],
        *,
        lr: float,
        first: int,
        pull: float = 0.0,
        shift: Tensor | None = None,
        anchor: Tensor | None = None,
    ) -> Trained:
        """The local steps of one client from `model` [numel]; see `LocalTrainer.train`. `steps` has the sample ids of
        each, `first` is the number of the first among all that the client has taken, from 1."""
        ...

    def measured(self, model: Tensor, ids: np.ndarray) -> dict[str, float]:
        """`loss/eval` of `model` [numel] on the samples `ids`."""
        ...


def _stacked(shifts: Sequence[Tensor | None], x: Tensor) -> Tensor:
    return torch.stack([torch.zeros_like(x[0]) if shift is None else shift.to(x.dtype) for shift in shifts])
