"""Adafactor (Shazeer and Stern, arXiv:1804.04235), as PyTorch has it: a second moment kept as a row and a column.

    R <- b R + (1 - b) rowmean(g^2),     C <- b C + (1 - b) colmean(g^2),     b = 1 - t^beta2_decay
    V = R C / mean(R),     u = g / sqrt(V),     u <- u / max(1, rms(u) / d)
    x <- (1 - lr w) x - min(lr, 1 / sqrt(t)) max(eps2, rms(x)) u

of matrices, the last two dimensions of what has more; a vector keeps V itself. A parameter's state is on its owner
(`shoal.optim.whole`), which makes u; rms(x) is that of the whole parameter, summed over its parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from shoal.optim.adaptive_config import Adafactor
from shoal.optim.parts import Parts, PartSums
from shoal.optim.whole import WholeOptimizer


def build(config: Adafactor, groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    """The optimizer of the run file."""
    return OwnedAdafactor(
        groups, lr=lr, beta2_decay=config.beta2_decay, eps=(config.eps1, config.eps2), threshold=config.threshold
    )


class OwnedAdafactor(WholeOptimizer):
    """Adafactor.

    Args:
        params: Parameters, or dictionaries with `params` and their options.
        lr: The largest rate.
        beta2_decay: The power of t in the decay of the second moment.
        eps: The least root of the second moment (None: of the dtype), and the least rms(x).
        threshold: d above.
        weight_decay: The decay of weights, apart from the gradient.
    """

    slots = Adafactor().slots
    _sums: PartSums | None = None

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        threshold: float = 1.0,
        weight_decay: float = 0.0,
    ) -> None:
        params = list(params)
        groups = params if params and isinstance(params[0], dict) else [{"params": params}]
        super().__init__(
            [{"whole": True, **group} for group in groups], lr=lr, beta2_decay=beta2_decay, eps=eps,
            threshold=threshold, weight_decay=weight_decay,
        )  # fmt: skip

    def connect(self, parts: Parts) -> None:
        """Parameters become whole on their owners, and so do their norms."""
        super().connect(parts)
        self._sums = PartSums(parts)

    def scales(self, parameters: list[Parameter]) -> list[float]:
        """max(eps2, rms(x)) of each."""
        least = self.defaults["eps"][1]
        own = [torch.stack([p.detach().double().square().sum(), p.new_tensor(p.numel()).double()]) for p in parameters]
        rows = torch.stack(own) if own else torch.zeros(0, 2, dtype=torch.float64)
        totals = rows if self._sums is None else self._sums(parameters, rows)
        return [max(least, math.sqrt(square / numel)) for square, numel in totals.tolist()]

    def updated(self, group: dict[str, Any], direction: Tensor, state: dict[str, Any]) -> Tensor:
        """u times min(1, 1 / (lr sqrt(t)))."""
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=direction.device)
            state |= {name: direction.new_zeros(shape) for name, shape in _moments(direction).items()}
        state["step"] += 1
        step = float(state["step"])
        kept, least = 1 - step ** group["beta2_decay"], group["eps"][0] or torch.finfo(direction.dtype).eps
        square = direction.square()
        if direction.ndim > 1:
            row = state["row_var"].lerp_(square.mean(-1, keepdim=True), 1 - kept)
            column = state["col_var"].lerp_(square.mean(-2, keepdim=True), 1 - kept)
            square = (row @ column).div_(row.mean(-2, keepdim=True).clamp_(min=least))
        else:
            square = state["variance"].lerp_(square, 1 - kept)
        update = direction * square.clamp(min=least * least).rsqrt_()
        rms = float(torch.linalg.vector_norm(update)) / math.sqrt(update.numel())
        rate = min(1.0, 1 / (group["lr"] * math.sqrt(step))) if group["lr"] else 0.0
        return update.mul_(rate / max(1.0, rms / group["threshold"]))


def _moments(x: Tensor) -> dict[str, tuple[int, ...]]:
    if x.ndim < 2:
        return {"variance": tuple(x.shape)}
    return {"row_var": (*x.shape[:-1], 1), "col_var": (*x.shape[:-2], 1, x.shape[-1])}
