"""Local steps: SGD with a strategy's corrections, of one client or of many at once.

    g = grad f_i(y) + pull (y - x) + shift_i + decay y          f_i: the weighted mean loss of the client's batch
    v = momentum v + g,   y = y - lr v                          Nesterov: y = y - lr (g + momentum v)

Clients of one model version differ in their data alone, so their gradients come from one `torch.func.vmap` over
[clients, numel]; that is what makes simulations of thousands of clients fast. A real client is a cohort of one.

The batches of several clients lie side by side: every tensor of a `CohortBatch` begins with the dims [clients,
samples].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
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
from shoal.federated.vector import VectorLayout
from shoal.optim.config import SGD


@dataclass(frozen=True)
class CohortBatch:
    """One local step of several clients. `weights` are 0 where a client has fewer samples, or no step left."""

    inputs: Tree
    targets: Tree
    weights: Tensor
    active: Tensor


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
