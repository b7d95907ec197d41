"""The convolutional net."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shoal.models.batch_norm import StepStatistics
from shoal.models.build import build, initialise
from shoal.models.config import ConvNetConfig


def net(**keys: Any) -> nn.Module:
    with torch.device("meta"):
        model = build(ConvNetConfig(**keys))
    initialise(model, seed=0, device="cpu")
    return model


@pytest.mark.parametrize("size", [8, 28, 32])
@pytest.mark.parametrize("norm", ["group", "batch"])
def test_images_of_any_size_become_logits(size: int, norm: str) -> None:
    """One net takes 8x8, 28x28 and 32x32 images of its channels and gives one logit a class."""
    images = torch.randn(16, 3, size, size, generator=torch.Generator().manual_seed(0))
    assert net(channels=3, classes=7, width=8, norm=norm)(images).shape == (16, 7)


def test_with_group_norm_samples_do_not_see_each_other() -> None:
    """The logits of an image are the same alone as in a batch, in training too."""
    images = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    model = net(width=8)
    torch.testing.assert_close(model(images)[2:3], model(images[2:3]))


def test_with_batch_statistics_every_norm_gathers_them() -> None:
    """All five norms of the net keep the protocol of step statistics; with group norm none does."""
    assert sum(isinstance(module, StepStatistics) for module in net(norm="batch").modules()) == 5
    assert not any(isinstance(module, StepStatistics) for module in net().modules())


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_digits_are_told_apart_after_a_few_epochs(norm: str) -> None:
    """Six epochs of a narrow net on scikit-learn's digits give at least 95 % on held-out ones."""
    datasets = pytest.importorskip("sklearn.datasets")
    digits = datasets.load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    classes = torch.tensor(digits.target)
    model = net(width=8, norm=norm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, end_factor=0.02, total_iters=6 * 22)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(images), generator=generator)
    taught, held_out = order[:1408], order[1408:]
    for _ in range(6):
        for batch in taught[torch.randperm(1408, generator=generator)].split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), classes[batch]).backward()
            optimizer.step()
            decay.step()
            for layer in model.modules():
                if isinstance(layer, StepStatistics):
                    layer.commit_sums(layer.step_sums())
    with torch.no_grad():
        accuracy = (model.eval()(images[held_out]).argmax(1) == classes[held_out]).double().mean()
    assert accuracy.item() >= 0.95  # five seeds gave 0.967 to 0.992
