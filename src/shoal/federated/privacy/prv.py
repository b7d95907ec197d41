"""The tighter accountant: the distribution of the privacy loss itself, composed by Fourier transforms (PRV).

With P = (1 - q) N(0, z^2) + q N(1, z^2) and Q = N(0, z^2), one step loses, where a member was there and is taken away,

    Y = L(x),  x ~ P,   L(x) = log((1 - q) + q exp((2 x - 1) / (2 z^2)))

and where it was not there and is added -L(x), x ~ Q. Losses of k steps add up: their distribution is the k-fold
convolution of that of Y, here on a mesh of width h, by one transform, a power, and one transform back. Then

    delta(epsilon) = E of (1 - exp(epsilon - Y))+

is exact but for the mesh and its ends. With h = error / sqrt(k / 2 log(12 / delta_error)) the epsilon of
delta - delta_error, plus `error`, is an upper bound (Gopi, Lee, Wutschitz, arXiv:2106.02848, theorem 5.5). The larger
of both directions counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from shoal.federated.privacy.rdp import epsilon as rdp_epsilon

ERROR = 0.01
"""Of epsilon."""
DELTA_ERROR = 1e-3
"""The part of delta that the mesh may cost."""


def epsilon(*, noise: float, chance: float, steps: int, delta: float, error: float = ERROR) -> float:
    """An upper bound of what `steps` steps of noise multiplier `noise` and sampling `chance` spend, at `delta`."""
    if steps == 0 or chance == 0:
        return 0.0
    delta_error = DELTA_ERROR * delta
    far = max(
        rdp_epsilon(noise=noise, chance=chance, steps=steps, delta=delta_error / 4),
        rdp_epsilon(noise=noise, chance=chance, steps=1, delta=delta_error / (8 * steps)),
    )
    width = error / math.sqrt(steps / 2 * math.log(12 / delta_error))
    half = math.ceil((far + 3) / width)
    mesh = (torch.arange(2 * half, dtype=torch.float64) - half) * width
    found = 0.0
    for masses in (_removed(mesh, width, noise, chance), _added(mesh, width, noise, chance)):
        composed = _composed(masses.numpy(), steps)
        found = max(found, _epsilon_of(mesh.numpy(), composed, delta - delta_error))
    return found + error


def _removed(mesh: Tensor, width: float, noise: float, chance: float) -> Tensor:
    """The mass of L(x), x ~ P, around every point of the mesh."""

    def above(x: Tensor) -> Tensor:
        return (1 - chance) * torch.special.ndtr(-x / noise) + chance * torch.special.ndtr((1 - x) / noise)

    def below(x: Tensor) -> Tensor:
        return (1 - chance) * torch.special.ndtr(x / noise) + chance * torch.special.ndtr((x - 1) / noise)

    edges = _inverse(_edges(mesh, width), noise, chance)
    return _masses(edges, above, below)


def _added(mesh: Tensor, width: float, noise: float, chance: float) -> Tensor:
    """The mass of -L(x), x ~ Q, around every point of the mesh."""
    edges = -_inverse(-_edges(mesh, width), noise, chance)  # -L(x) <= t where -x <= this
    return _masses(edges, lambda x: torch.special.ndtr(-x / noise), lambda x: torch.special.ndtr(x / noise))


def _edges(mesh: Tensor, width: float) -> Tensor:
    return torch.cat([mesh - width / 2, mesh[-1:] + width / 2])


def _inverse(loss: Tensor, noise: float, chance: float) -> Tensor:
    """x with L(x) = loss; minus infinity where no x loses so little."""
    inside = torch.expm1(loss) + chance
    known = noise**2 * (inside.clamp(min=1e-300).log() - math.log(chance)) + 0.5
    return torch.where(inside > 0, known, -torch.inf)


def _masses(edges: Tensor, above: Callable[[Tensor], Tensor], below: Callable[[Tensor], Tensor]) -> Tensor:
    """What lies between neighbouring edges, from the tail that is nearer, so that small masses keep their digits."""
    by_tail, by_head = above(edges[:-1]) - above(edges[1:]), below(edges[1:]) - below(edges[:-1])
    return torch.where(edges[:-1] > 0, by_tail, by_head).nan_to_num()


def _composed(masses: np.ndarray, steps: int) -> np.ndarray:
    """The masses of the sum of `steps` losses, on the same mesh."""
    spectrum = np.fft.rfft(np.fft.ifftshift(masses))
    return np.fft.fftshift(np.fft.irfft(spectrum**steps, len(masses)))


def _epsilon_of(mesh: np.ndarray, masses: np.ndarray, delta: float) -> float:
    """The smallest epsilon from 0 whose delta is at most this."""
    low, high = 0.0, float(mesh[-1])
    mesh, masses = mesh[mesh > 0], masses[mesh > 0]
    for _ in range(40):
        middle = (low + high) / 2
        first = int(np.searchsorted(mesh, middle, side="right"))
        spent = float((masses[first:] * -np.expm1(middle - mesh[first:])).sum())
        low, high = (low, middle) if spent <= delta else (middle, high)
    return high
