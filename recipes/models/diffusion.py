"""A denoising diffusion model (arXiv:2006.11239) of handwritten digits: a small U-Net predicts the noise.

x_t = cos(t pi / 2) x + sin(t pi / 2) noise,    loss = |U(x_t, t) - noise|^2
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Step(nn.Module):
    """A residual convolution that is told the time `[batch, width]`."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.norm, self.time, self.skip = (
            nn.GroupNorm(8, outputs),
            nn.Linear(32, outputs),
            nn.Conv2d(inputs, outputs, 1),
        )

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = F.silu(self.norm(self.first(x) + self.time(time)[..., None, None]))
        return self.skip(x) + self.second(y)


class UNet(nn.Module):
    """Images `[batch, 1, 8, 8]` to the squared error `[batch]` of the noise predicted at a time drawn for each sample.

    Outside of training times and noise are fixed, so that evaluations can be compared.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter, self.down = Step(1, width), Step(width, 2 * width)
        self.middle, self.up, self.out = Step(2 * width, 2 * width), Step(3 * width, width), nn.Conv2d(width, 1, 1)
        self.register_buffer("frequencies", torch.pi * torch.arange(1.0, 17.0))

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            t, noise = torch.rand(len(images), device=images.device, dtype=images.dtype), torch.randn_like(images)
        else:
            t = torch.linspace(0.02, 0.98, len(images), device=images.device, dtype=images.dtype)
            noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0)).to(images)
        angle = t[:, None, None, None] * torch.pi / 2
        found = self.noise_in(angle.cos() * images + angle.sin() * noise, t)
        return (found - noise).square().flatten(1).mean(1)

    def noise_in(self, x: Tensor, t: Tensor) -> Tensor:
        """The noise `[batch, 1, 8, 8]` predicted in `x` at the times `[batch]`."""
        phases = t[:, None] * self.frequencies
        time = torch.cat([phases.sin(), phases.cos()], 1)
        wide = self.enter(x, time)
        deep = self.middle(self.down(F.avg_pool2d(wide, 2), time), time)
        joined = torch.cat([F.interpolate(deep, scale_factor=2.0), wide], 1)
        return self.out(self.up(joined, time))


class Images:
    """scikit-learn's digits, from -1 to 1; every fifth is held out."""

    def __init__(self, held_out: bool) -> None:
        from sklearn.datasets import load_digits

        images = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 8 - 1
        kept = (torch.arange(len(images)) % 5 == 0) == held_out
        self.images = images[kept]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], torch.zeros(())


def build(width: int = 32) -> UNet:
    """The module of the run file."""
    return UNet(width)


def as_returned() -> Callable[[Tensor, Tensor], Tensor]:
    """The model's outputs are the losses."""
    return lambda outputs, targets: outputs


def images() -> tuple[Images, Images]:
    """Training and held-out images."""
    return Images(held_out=False), Images(held_out=True)
