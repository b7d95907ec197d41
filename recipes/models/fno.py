"""A Fourier neural operator (arXiv:2010.08895): from the initial state of Burgers' equation to a later one.

u_t + u u_x = v u_xx,    periodic, v = 0.02, solved here by a pseudo-spectral method with RK4
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

POINTS, VISCOSITY, TIME, STEPS = 64, 0.02, 1.0, 200


class Spectral(nn.Module):
    """Multiplies the lowest `modes` of `[batch, width, points]` by matrices, which are complex: `[..., 2]` reals."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(width, width, modes, 2) / width)

    def forward(self, x: Tensor) -> Tensor:
        low = torch.fft.rfft(x)[..., : self.modes]
        mixed = torch.einsum("bim,iom->bom", low, torch.view_as_complex(self.weight))
        return torch.fft.irfft(F.pad(mixed, (0, POINTS // 2 + 1 - self.modes)), n=POINTS)


class FNO(nn.Module):
    """States `[batch, points]` to later states `[batch, points]`."""

    def __init__(self, width: int, depth: int, modes: int) -> None:
        super().__init__()
        self.enter, self.leave = (
            nn.Conv1d(2, width, 1),
            nn.Sequential(nn.Conv1d(width, 64, 1), nn.GELU(), nn.Conv1d(64, 1, 1)),
        )
        self.spectral = nn.ModuleList(Spectral(width, modes) for _ in range(depth))
        self.local = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(depth))

    def forward(self, states: Tensor) -> Tensor:
        places = torch.linspace(0, 1, POINTS, device=states.device, dtype=states.dtype).expand_as(states)
        x = self.enter(torch.stack([states, places], 1))
        for spectral, local in zip(self.spectral, self.local, strict=True):
            x = F.gelu(spectral(x) + local(x))
        return self.leave(x)[:, 0]


class Burgers:
    """Random smooth states, and the same after `TIME`."""

    def __init__(self, samples: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        place, waves = torch.linspace(0, 2 * torch.pi, POINTS + 1)[:-1], torch.arange(1, 5)
        size = torch.randn(samples, 2, 4, generator=generator) / waves
        self.before = size[:, 0] @ (waves[:, None] * place).sin() + size[:, 1] @ (waves[:, None] * place).cos()
        self.after = solved(self.before.double()).float()

    def __len__(self) -> int:
        return len(self.before)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.before[index], self.after[index]


def solved(u: Tensor) -> Tensor:
    """The states `[samples, points]` after `TIME`; the products are free of aliases (the upper third is cut)."""
    waves = torch.arange(POINTS // 2 + 1, dtype=u.dtype)
    kept, each_s = waves < POINTS / 3, TIME / STEPS

    def rate(h: Tensor) -> Tensor:
        square = torch.fft.rfft(torch.fft.irfft(h, n=POINTS).square())
        return -0.5j * waves * square * kept - VISCOSITY * waves.square() * h

    h = torch.fft.rfft(u)
    for _ in range(STEPS):
        a = rate(h)
        b = rate(h + each_s / 2 * a)
        c = rate(h + each_s / 2 * b)
        d = rate(h + each_s * c)
        h = h + each_s / 6 * (a + 2 * b + 2 * c + d)
    return torch.fft.irfft(h, n=POINTS)


def build(width: int = 32, depth: int = 4, modes: int = 16) -> FNO:
    """The module of the run file."""
    return FNO(width, depth, modes)


def relative_error() -> Callable[[Tensor, Tensor], Tensor]:
    """|prediction - truth| / |truth| of each sample, `[batch]`."""
    return lambda outputs, targets: (outputs - targets).norm(dim=-1) / targets.norm(dim=-1)


def burgers() -> tuple[Burgers, Burgers]:
    """Training and held-out states."""
    return Burgers(1_000, 1), Burgers(200, 2)
