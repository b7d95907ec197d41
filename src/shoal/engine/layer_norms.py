"""The gradient's 2-norm layer by layer, in the steps in which it is asked for.

    |g_l| = |g| sqrt(s_l / sum_k s_k) with s_l = sum over p in l of n_p / c_p * sum over ranks |g_p|^2

Each rank adds up the squares of what its optimizer owns. Several ranks may own the same numbers (replicas, tied
weights): c_p counts what all of them own of a parameter, n_p what there is, so that each number counts once. |g| is the
norm that the step has taken anyway, without the loss scale. It costs one pass over the gradients and one all-reduce of
two numbers a parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from shoal.comm.collective import Collective
from shoal.gradients.gradients import Gradients

PREFIX = "grad/norm/"


class LayerNorms:
    """Measures every `every` steps, over the ranks of `group`, which take each step together.

    `sizes`: the elements of every parameter of the unsplit model by name, the same on all ranks.
    """

    def __init__(
        self, gradients: Gradients, group: Collective, sizes: Mapping[str, int], *, every: int, device: torch.device
    ) -> None:
        self._gradients, self._group, self._device, self._every = gradients, group, device, every
        self._sizes = torch.tensor(list(sizes.values()), dtype=torch.float64)
        self._index = {name: index for index, name in enumerate(sizes)}
        self._layers = [layer_of(name) for name in sizes]
        self._figures: dict[str, float] = {}

    def due(self, step: int) -> Callable[[float], None] | None:
        """What is to be called with the norm of the whole gradient, once it is agreed; None in other steps."""
        return self._measure if step % self._every == 0 else None

    def take_figures(self) -> dict[str, float]:
        """`grad/norm/<layer>` of the step just taken, on the first rank of the group; {} where it was not due."""
        found, self._figures = self._figures, {}
        return found

    def _measure(self, norm: float) -> None:
        squares = self._squares()
        totals = torch.zeros(len(self._layers), dtype=torch.float64)
        known = squares[1] > 0
        totals[known] = squares[0, known] * self._sizes[known] / squares[1, known]
        by_layer: dict[str, float] = {}
        for layer, square, is_known in zip(self._layers, totals.tolist(), known.tolist(), strict=True):
            if is_known:  # not a part that a server updates
                by_layer[layer] = by_layer.get(layer, 0.0) + square
        whole = math.fsum(by_layer.values())
        if self._group.rank == 0:
            self._figures = {
                PREFIX + layer: norm * math.sqrt(square / whole) if whole > 0 else norm
                for layer, square in by_layer.items()
            }

    def _squares(self) -> Tensor:
        """`[2, parameters]`: squared norms, and elements, of what all ranks own of each parameter."""
        own = torch.zeros(2, len(self._layers), dtype=torch.float64)
        indices, norms = [], []
        for owned in self._gradients.owned:
            gradient, index = owned.parameter.grad, self._index[owned.name]
            own[1, index] += owned.parameter.numel()
            if gradient is not None:
                values = gradient.coalesce().values() if gradient.is_sparse else gradient
                indices.append(index)
                norms.append(torch.linalg.vector_norm(values, dtype=_wide(values)))
        if norms:
            read = torch.stack([norm.double() for norm in norms]).cpu().square()
            own[0].index_add_(0, torch.tensor(indices), read)
        total = own.to(self._device)
        if self._group.size > 1:
            self._group.all_reduce(total).wait()
        return total.cpu()


def layer_of(parameter: str) -> str:
    """The layer of a parameter: its name up to the first number, `blocks.3` of `blocks.3.attention.query.weight`; where
    there is none, without its last part."""
    parts: Sequence[str] = parameter.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return ".".join(parts[:-1]) or parameter


def _wide(values: Tensor) -> torch.dtype:
    """The type in which a norm is added up: float32 at least; of complex numbers, their own."""
    if values.is_complex():
        return values.dtype
    return torch.promote_types(values.dtype, torch.float32)
