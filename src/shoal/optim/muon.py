"""Muon (Jordan et al., kellerjordan.github.io/posts/muon, 2024; Liu et al., arXiv:2502.16982), as PyTorch has it:

    m <- mu m + (1 - mu) g,     n = mu m + (1 - mu) g  (Nesterov's form) or m
    x <- (1 - lr w) x - lr s orthogonalised(n)

of matrices; s is 0.2 sqrt(max(rows, columns)) or sqrt(max(1, rows / columns)). More dimensions than two are columns;
of stacked experts each is a matrix. Everything else is AdamW's.

The momentum lies where the parameter does, and is saved and divided with it. What is orthogonalised is whole on its
owner (`shoal.optim.owners`): each matrix on one rank, and the updates come back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from shoal.maths.orthogonal import orthogonalised, orthogonalising_flops
from shoal.optim.declared import Dims, Granularity, Slot, counter
from shoal.optim.fused import FusedAdamW, FusedOptimizer, Work
from shoal.optim.muon_config import Muon
from shoal.optim.owners import Owners
from shoal.optim.parts import Parts


def build(config: Muon, groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    """The optimizer of the run file."""
    return OwnedMuon(
        groups,
        lr=lr,
        momentum=config.momentum,
        nesterov=config.nesterov,
        iterations=config.iterations,
        polish=config.polish,
        precision=config.precision,
        adjust=config.adjust,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
    )


class OwnedMuon(FusedAdamW):
    """Muon for the groups that say `whole`, AdamW for the others.

    Args:
        params: Dictionaries with `params` and their options; `whole` says that they are orthogonalised. Of plain
            parameters those of two dimensions are.
        lr: The learning rate.
        momentum: The share of the momentum that is kept.
        weight_decay: The decay of weights, apart from the gradient.
        nesterov: Whether the step looks ahead by the momentum.
        iterations: Of Newton and Schulz.
        polish: Iterations after them that bring singular values nearer to 1.
        precision: "parameter": they are computed in the dtype of the parameter; or "bfloat16".
        adjust: "match_rms_adamw" or "original": s above.
        betas: The decay rates of AdamW's moments.
        eps: Added to AdamW's denominator.
    """

    works_on: Granularity = "matrices"
    slots = (Slot("momentum_buffer"), Slot("exp_avg"), Slot("exp_avg_sq"), counter("step"))
    _owners: Owners | None = None

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 3e-4,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        *,
        nesterov: bool = True,
        iterations: int = 5,
        polish: int = 0,
        precision: str = "parameter",
        adjust: str = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        FusedOptimizer.__init__(
            self, _groups(params), lr=lr, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov,
            iterations=iterations, polish=polish, precision=precision, adjust=adjust, betas=betas, eps=eps,
            stacked=False,
        )  # fmt: skip

    def connect(self, parts: Parts) -> None:
        """Matrices become whole on their owners."""
        whole = {id(p) for group in self.param_groups if group["whole"] for p in group["params"]}
        own = {owned.name for owned in parts.owned if id(owned.parameter) in whole}
        self._owners = Owners(parts, self._cost, wanted=lambda name, shape: name in own)

    def update_all(self, work: list[Work]) -> None:
        """Moves momenta, then matrices by what their owners make of them; the others as AdamW does."""
        for one in work:
            if not one.group["whole"]:
                self.update(one.group, one.parameters, one.gradients)
        whole = [(one.group, p, g) for one in work if one.group["whole"] for p, g in zip(*one[1:], strict=True)]
        directions = [self._direction(group, p, g) for group, p, g in whole]
        for (group, p, _), update in zip(whole, self._orthogonal(whole, directions), strict=True):
            p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update.view(p.shape), alpha=-group["lr"])

    def _direction(self, group: dict[str, Any], parameter: Parameter, gradient: Tensor) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer

    def _orthogonal(
        self, whole: list[tuple[dict[str, Any], Parameter, Tensor]], directions: list[Tensor]
    ) -> list[Tensor]:
        """The update of each part of a matrix, flat or in its shape."""
        if self._owners is None:
            return [_update(group, direction) for (group, *_), direction in zip(whole, directions, strict=True)]
        names = [self._owners.names[id(p)] for _, p, _ in whole]
        groups = dict(zip(names, (group for group, *_ in whole), strict=True))
        gathered = self._owners.gather(dict(zip(names, directions, strict=True)))
        updates = {name: _update(groups[name], tensor) for name, tensor in gathered.items()}
        parts = self._owners.scatter(updates)
        return [parts[name] for name in names]

    def _cost(self, shape: Dims) -> float:
        group = self.param_groups[0]
        return orthogonalising_flops(shape[0], math.prod(shape[1:]), iterations=group["iterations"] + group["polish"])


def _update(group: dict[str, Any], direction: Tensor) -> Tensor:
    """s times the orthogonal factor of a matrix."""
    shape = direction.shape
    matrices = direction if group["stacked"] else direction.reshape(shape[0], -1)
    dtype = torch.bfloat16 if group["precision"] == "bfloat16" else None
    found = orthogonalised(matrices, iterations=group["iterations"], polish=group["polish"], dtype=dtype)
    rows, columns = matrices.shape[-2:]
    by_rms = group["adjust"] == "match_rms_adamw"
    scale = 0.2 * math.sqrt(max(rows, columns)) if by_rms else math.sqrt(max(1.0, rows / columns))
    return found.mul_(scale).view(shape)


def _groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Groups that say `whole`; of plain parameters, matrices and the rest."""
    params = list(params)
    if params and not isinstance(params[0], dict):
        matrices = [p for p in params if p.ndim == 2]
        others = [p for p in params if p.ndim != 2]
        params = [{"params": matrices, "whole": True}, {"params": others}]
    return [{"whole": False, **group} for group in params]
