"""Hard-concrete gates: `kind = "l0"` (Louizos et al., arXiv:1712.01312).

A masked weight w has a gate z that is exactly 0 or 1 with some probability. It is drawn in every step from a uniform
number u and a trained location a (log alpha), in a way that has a gradient:

    s = sigmoid((log u - log(1 - u) + a) / beta)      z = min(1, max(0, s (zeta - gamma) + gamma))       equation 10
    P(z is not 0) = sigmoid(a - beta log(-gamma / zeta))                                                 equation 12
    without noise, for an evaluation: s = sigmoid(a)                                                     equation 13

The forward computes with w z. Its gradient G gives that of the weight, G z, and that of the location, G w dz/da. To
this the penalty adds m P (1 - P) for each location, the derivative of the expected number of gates that are open. The
paper has a constant m, which says nothing about the density in the end; here m grows while the mean of P is above the
density that the schedule asks for, by the logarithm of their ratio, and falls while it is below; its unit is the size
of the other gradient.

All is done number by number, on whatever part of a layer a rank steps: u follows from seed, name, step and place, and
two sums over a replica's ranks are all that is sent. At the end of the schedule the largest locations are the mask,
and gates become part of their weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.comm.collective import Collective
from shoal.maths.counter import indices, key_of, uniform
from shoal.sparsity.config import L0
from shoal.state import Owned, is_counted

BETA, GAMMA, ZETA = 2 / 3, -0.1, 1.1
"""Section 4 of the paper."""
FIRST = 2.2
"""The first location of a gate: open 98 times of 100."""
GAIN = 1.0
"""What a step adds to m for a ratio of e. On digits 50 of the plain difference shut gates that were needed, and half of
it left three times as many open as wanted."""
DECAYS = (0.9, 0.999)
EPS = 1e-12


class Gates:
    """Gates of the parts `owned` of masked layers. `slots` hold the locations, their two moments for Adam, and the
    weights, by `id` of a part; the ranks of `replica` together have each part once.
    """

    def __init__(
        self,
        config: L0,
        owned: Sequence[Owned],
        slots: Sequence[dict[int, Tensor]],
        *,
        seed: int,
        replica: Collective,
        device: torch.device,
    ) -> None:
        self._config, self._owned, self._seed = config, owned, seed
        self._replica, self._device = replica, device
        self.locations, self._means, self._squares, self.weights = slots
        self.multiplier, self.expected = 0.0, 1.0

    @torch.no_grad()
    def close(self, step: int) -> None:
        """Before the forward of `step`: weights are kept aside, and parameters are weights times drawn gates."""
        for own in self._owned:
            key = id(own)
            if key not in self.locations:
                self.weights[key] = own.parameter.clone()
                self.locations[key] = torch.full_like(own.parameter, FIRST)
                self._means[key], self._squares[key] = torch.zeros_like(own.parameter), torch.zeros_like(own.parameter)
            own.parameter.copy_(self.weights[key] * self._drawn(own, step)[0])

    @torch.no_grad()
    def learn(self, step: int, *, density: float, since: int, scale: float = 1.0) -> None:
        """After the backward of `step`: locations take a step of Adam, the `since`-th towards the `density`; parameters
        are weights again, and their gradients those of the weights. Gradients are `scale` times what they should be.
        """
        gradients, sums = {}, torch.zeros(3, dtype=torch.float64, device=self._device)
        for own in self._owned:
            weight, (gate, slope) = self.weights[id(own)], self._drawn(own, step)
            gradients[id(own)] = own.gradient * weight * slope / scale
            if is_counted(own):
                squares, open_ = gradients[id(own)].double().square().sum(), self._open(own).double().sum()
                sums += torch.stack([squares, open_, open_.new_tensor(weight.numel())])
            if own.parameter.grad is not None:
                own.parameter.grad.mul_(gate)
            own.parameter.copy_(weight)
        self._replica.all_reduce(sums).wait()
        squares, opened, number = sums.tolist()
        self.expected = opened / max(1.0, number)
        self.multiplier = max(0.0, self.multiplier + GAIN * math.log(self.expected / density))
        size = math.sqrt(squares / max(1.0, number))
        for own in self._owned:
            chance = self._open(own)
            self._step(id(own), gradients[id(own)] + size * self.multiplier * chance * (1 - chance), since)

    @torch.no_grad()
    def settle(self) -> None:
        """After the update: new weights are kept aside, and parameters are weights times gates without noise."""
        for own in self._owned:
            self.weights[id(own)] = own.parameter.clone()
            own.parameter.mul_(self.without_noise(own))

    @torch.no_grad()
    def reopen(self) -> None:
        """Instead of an update: parameters are weights times gates without noise, as they were."""
        for own in self._owned:
            own.parameter.copy_(self.weights[id(own)] * self.without_noise(own))

    def without_noise(self, own: Owned) -> Tensor:
        """The gates that an evaluation computes with."""
        return _stretched(torch.sigmoid(self.locations[id(own)])).clamp(0, 1)

    @torch.no_grad()
    def join(self) -> None:
        """Gates become part of the weights that masks keep, and are forgotten."""
        for own in self._owned:
            own.parameter.mul_(self.without_noise(own))
        for slot in (self.locations, self._means, self._squares, self.weights):
            slot.clear()

    def _step(self, key: int, gradient: Tensor, since: int) -> None:
        """Adam, arXiv:1412.6980, algorithm 1."""
        mean, square = self._means[key], self._squares[key]
        mean.lerp_(gradient, 1 - DECAYS[0])
        square.lerp_(gradient.square(), 1 - DECAYS[1])
        first, second = mean / (1 - DECAYS[0] ** since), square / (1 - DECAYS[1] ** since)
        self.locations[key].sub_(first / (second.sqrt() + EPS), alpha=self._config.gate_lr)

    def _open(self, own: Owned) -> Tensor:
        """The probability that a gate is not 0."""
        return torch.sigmoid(self.locations[id(own)] - BETA * math.log(-GAMMA / ZETA))

    def _drawn(self, own: Owned, step: int) -> tuple[Tensor, Tensor]:
        """The gates of a step, and their derivatives by the locations."""
        noise = torch.empty_like(own.parameter).flatten()
        key, shape = key_of(self._seed, "gates", own.name, step), own.holding.global_shape
        for region in own.regions:
            places = indices(shape, region.box.offset, region.box.shape, device=noise.device)
            drawn = uniform(key, places, dtype=torch.float64).flatten()
            noise[region.start : region.start + region.box.numel] = (drawn.log() - (-drawn).log1p()).to(noise.dtype)
        soft = torch.sigmoid((noise.view_as(own.parameter) + self.locations[id(own)]) / BETA)
        wide = _stretched(soft)
        slope = (ZETA - GAMMA) * soft * (1 - soft) / BETA * ((wide > 0) & (wide < 1))
        return wide.clamp(0, 1), slope


def _stretched(soft: Tensor) -> Tensor:
    return soft * (ZETA - GAMMA) + GAMMA
