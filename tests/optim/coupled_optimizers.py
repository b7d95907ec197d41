"""Optimizers as people write them, whose step of a parameter takes a number from all gradients, and their like that
look at one parameter at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def _gradients(optimizer: Optimizer) -> list[Tensor]:
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


class ByAllNorms(Optimizer):
    """Momentum along the gradient, divided by the norm of all gradients."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        norm = sum(float(g.square().sum()) for g in _gradients(self)) ** 0.5 + 1e-12
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    velocity = self.state[p].setdefault("velocity", torch.zeros_like(p))
                    velocity.mul_(0.9).add_(p.grad / norm)
                    p.sub_(group["lr"] * velocity)


class Distance(Optimizer):
    """Estimates the distance to the solution, as D-Adaptation and Prodigy do: it begins at 1e-6 and grows."""

    def __init__(self, params: Any, lr: float = 1.0, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "d": 1e-6, "k": 0, "gathered": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        first, lengths, along = self.param_groups[0], 0.0, 0.0
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                s = state.setdefault("s", torch.zeros_like(p)).add_(first["d"] * p.grad)
                start = state.setdefault("p0", p.detach().clone())
                along += first["d"] * float((p.grad * (start - p)).sum())
                lengths += float(s.abs().sum())
                p.sub_(group["lr"] * first["d"] * (p.grad.sign() + group["weight_decay"] * p))
        gathered = first["gathered"] + along
        d = max(first["d"], gathered / lengths if lengths else 0.0, first["d"] * 1.01)
        for group in self.param_groups:
            group["d"], group["k"], group["gathered"] = d, group["k"] + 1, gathered


class ClipsInside(Optimizer):
    """Adam of gradients that it clips to a norm of 1 itself."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        norm = float(torch.stack([g.norm() for g in _gradients(self)]).norm())
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    g = p.grad * min(1.0, 1.0 / norm)
                    m = self.state[p].setdefault("m", torch.zeros_like(p)).mul_(0.9).add_(g, alpha=0.1)
                    v = self.state[p].setdefault("v", torch.zeros_like(p)).mul_(0.99).addcmul_(g, g, value=0.01)
                    p.sub_(group["lr"] * m / (v.sqrt() + 1e-8))


class DecaysByMean(Optimizer):
    """SGD whose weight decay is divided by the mean size of all gradients."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        mean = sum(float(g.abs().mean()) for g in _gradients(self)) / max(1, len(_gradients(self)))
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * (p.grad + 1e-3 / mean * p))


class AlongAll(Optimizer):
    """As SAM's first step: an optimizer inside steps gradients that are scaled by the norm of all."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"rho": 0.05})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        gradients = _gradients(self)
        norm = float(torch.stack([g.norm() for g in gradients]).norm())
        for g in gradients:
            g.mul_(self.param_groups[0]["rho"] / norm)
        self.base.step()


class OwnNorm(Optimizer):
    """As LARS: the rate of a parameter by the norms of itself and of its gradient; a group counts its steps."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.norm() / p.grad.norm().clamp_min(1e-12) * p.grad)


class Inside(Optimizer):
    """Another optimizer inside, and nothing else."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.base = torch.optim.Adam(self.param_groups, lr=0.1)
        self.param_groups = self.base.param_groups

    def step(self, closure: Any = None) -> Any:
        self.base.step()


class Stacks(Optimizer):
    """Each gradient divided by its own norm, and all norms of a group in one tensor: there must be one."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            gradients = [p.grad for p in group["params"]]
            norms = torch.stack([torch.zeros(()) if g is None else g.norm() for g in gradients]).clamp_min(1e-12)
            for p, norm in zip(group["params"], norms, strict=True):
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad / norm)


COUPLED = [ByAllNorms, Distance, ClipsInside, DecaysByMean, AlongAll]
SEPARABLE = [OwnNorm, Inside, Stacks]
