"""A model as one flat vector: which parameter lies where. Strategies, masks and frames see vectors alone."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.errors import ConfigError, UserCodeError


@dataclass(frozen=True)
class VectorLayout:
    """The trained parameters of a module in its own order, float32 or float64, one behind the other."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def sizes(self) -> list[int]:
        """Numbers in each parameter."""
        return [math.prod(shape) for shape in self.shapes]

    @property
    def numel(self) -> int:
        """Numbers in all of them."""
        return sum(self.sizes)

    @property
    def fingerprint(self) -> str:
        """Equal where names and shapes are: both ends of a connection compare it."""
        return hashlib.blake2b(repr((self.names, self.shapes)).encode(), digest_size=16).hexdigest()

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """The parameters in `vector` [numel], by name."""
        parts = vector.split(self.sizes)
        return {name: part.view(shape) for name, part, shape in zip(self.names, parts, self.shapes, strict=True)}

    def mask(self, patterns: Sequence[str], *, key: str) -> Tensor:
        """Where parameters lie whose names fit a pattern, bool [numel]. Raises `ConfigError` for one that fits none."""
        fits = [any(fnmatchcase(name, pattern) for pattern in patterns) for name in self.names]
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in self.names):
                raise ConfigError(f"{key}: no parameter is called {pattern!r}; there are {', '.join(self.names[:6])}")
        return torch.cat([torch.full((size,), fit) for size, fit in zip(self.sizes, fits, strict=True)])


def layout_of(module: nn.Module) -> VectorLayout:
    """The layout of what `module` trains. Raises `UserCodeError` for batch statistics that clients could not share."""
    for name, part in module.named_modules():
        if isinstance(part, _BatchNorm) and part.running_mean is not None:
            raise UserCodeError(
                f"module {name} ({type(part).__name__}) keeps running statistics, which updates do not carry: use "
                "GroupNorm or LayerNorm, or track_running_stats=False"
            )
    trained = [(name, tuple(p.shape)) for name, p in module.named_parameters() if p.requires_grad]
    return VectorLayout(tuple(name for name, _ in trained), tuple(shape for _, shape in trained))


def vector_of(module: nn.Module, layout: VectorLayout) -> Tensor:
    """A copy of the parameters [numel]."""
    parameters = dict(module.named_parameters())
    return torch.cat([parameters[name].detach().reshape(-1) for name in layout.names])


@torch.no_grad()
def write_vector(module: nn.Module, layout: VectorLayout, vector: Tensor) -> None:
    """Gives the module the numbers of `vector`."""
    parameters = dict(module.named_parameters())
    for name, part in layout.views(vector).items():
        parameters[name].copy_(part)
