"""When blocks have settled, by what is measured of them, and what is measured of what they give."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shoal.comm.collective import Alone
from shoal.errors import UserCodeError
from shoal.models.build import initialise
from shoal.models.config import GPTConfig
from shoal.models.gpt import GPT
from shoal.sparsity.config import FreezeByProgress
from shoal.sparsity.plasticity import Activations, Plasticity, similarity_loss


def test_a_block_freezes_when_it_and_those_before_it_have_settled() -> None:
    progress = Plasticity(FreezeByProgress(below=0.5, patience=2, most=0.75, thaw=10.0), blocks=4)
    observed = [
        ([1.0, 1.0, 1.0, 1.0], 0),
        ([0.4, 0.4, 1.0, 1.0], 0),  # settled once
        ([0.6, 0.4, 1.0, 1.0], 0),  # the first has moved again; the second waits for it
        ([0.4, 0.4, 1.0, 1.0], 0),
        ([0.4, 0.4, 1.0, 1.0], 2),
        ([0.0, 0.0, 0.1, 0.1], 2),
        ([0.0, 0.0, 0.1, 0.1], 3),  # at most three quarters
        ([0.0, 0.0, 0.0, 0.1], 3),
    ]
    for plasticity, frozen in observed:
        progress.observe(plasticity, lr=1.0)
        assert progress.frozen == frozen
    progress.observe([0.0] * 4, lr=0.2)
    assert progress.frozen == 3
    progress.observe([0.0] * 4, lr=0.1)
    assert progress.frozen == 0, "the learning rate has fallen by ten"
    other = Plasticity(progress.config, blocks=4)
    other.load(progress.to_state())
    assert other == progress


@pytest.mark.parametrize("peak", [0.1, 0.3, 1e-3, 4e-3, 7e-4])
def test_a_rate_that_falls_by_the_factor_thaws(peak: float) -> None:
    """Although 0.1 x 0.1 x 10 is more than 0.1."""
    progress = Plasticity(FreezeByProgress(), blocks=3, frozen=2, lr=peak)
    progress.observe([1.0] * 3, lr=peak * 0.11)
    assert progress.frozen == 2
    progress.observe([1.0] * 3, lr=peak * 0.1)
    assert progress.frozen == 0


@pytest.mark.parametrize("criterion", ["movement", "gradient", "activations"])
@pytest.mark.parametrize("steps", [60, 400, 20_000])
def test_the_defaults_freeze_at_the_step_that_is_told(criterion: Any, steps: int) -> None:
    """Of a model that settles at once, in runs of any length: within a third of the steps."""
    config = FreezeByProgress(criterion=criterion)
    progress, number = Plasticity(config, blocks=4), 0 if criterion == "gradient" else 1
    while not progress.frozen:
        number += 1
        by_chance, falling, growing = 1.0 + number % 2, 0.1**number, 3.0**number
        settling = {"movement": [falling] * 4, "gradient": [1.0, 1.0, growing, 9.0], "activations": [by_chance] * 4}
        progress.observe(settling[criterion], lr=1.0)
    assert number * config.interval(steps) == config.first(steps) <= steps / 3


def test_blocks_freeze_when_their_gradients_change_least() -> None:
    """Those at the front of which the change is in the lower half, as AutoFreeze's algorithm 1 has it."""
    progress = Plasticity(FreezeByProgress(criterion="gradient", patience=1, most=0.75), blocks=4)
    observed = [
        ([4.0, 4.0, 4.0, 4.0], 0),  # there is nothing before
        ([3.0, 3.9, 3.9, 2.0], 0),  # the second and third change least; the first has moved
        ([2.9, 3.8, 3.0, 1.0], 2),  # changes of 3 %, 3 %, 23 %, 50 %
        ([0.0, 0.0, 2.0, 0.9], 2),  # 33 % and 10 %
        ([0.0, 0.0, 1.9, 0.5], 3),
    ]
    for norms, frozen in observed:
        progress.observe(norms, lr=1.0)
        assert progress.frozen == frozen
    other = Plasticity(progress.config, blocks=4)
    other.load(progress.to_state())
    assert other == progress
    progress.observe([1.0] * 4, lr=0.1)
    assert progress.frozen == 0


def test_blocks_freeze_when_the_slope_of_their_distance_is_small() -> None:
    """Beside numpy's least squares: the second block goes on changing for a while, and the third differs by chance."""
    config = FreezeByProgress(criterion="activations", window=4, below=0.2, patience=2, most=0.9)
    progress, seen, noise = Plasticity(config, blocks=4), [], np.random.default_rng(0)
    largest, settled, frozen = np.zeros(4), np.zeros(4, int), 0
    for step in range(16):
        seen.append([0.4**step, 1 - 0.05 * step if step < 9 else 0.6, 1 + 0.1 * noise.normal(), 2.0**step])
        progress.observe(seen[-1], lr=1.0)
        if len(seen) >= 4:
            fits = [np.polyfit(range(4), each, 1, cov=True) for each in np.array(seen[-4:]).T]
            slopes, errors = (
                np.array(each) for each in zip(*((abs(f[0]), c[0, 0] ** 0.5) for f, c in fits), strict=True)
            )
            largest = np.maximum(largest, slopes)
            settled = np.where(slopes <= np.maximum(0.2 * largest, errors), settled + 1, 0)
            while frozen < 3 and settled[frozen] >= 2:
                frozen += 1
        assert progress.frozen == frozen, f"at comparison {step}"
    assert frozen == 3
    other = Plasticity(config, blocks=4)
    other.load(progress.to_state())
    assert other == progress
    progress.observe(seen[-1], lr=0.1)
    assert progress.frozen == 0
    assert progress.recent == []


def test_a_loss_of_similarities_is_that_of_the_paper() -> None:
    """Pair by pair. Outputs that are turned or grow by a factor are as similar to each other as they were."""
    one, other = torch.randn(2, 5, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    total = 0.0
    for a in range(5):
        rows = [torch.tensor([float((x[a] * x[b]).sum()) for b in range(5)]) for x in (one, other)]
        total += float((rows[0] / rows[0].norm() - rows[1] / rows[1].norm()).square().sum())
    assert float(similarity_loss(one, other)) == pytest.approx(total / 25, rel=1e-5)
    turn = torch.linalg.qr(torch.randn(12, 12, dtype=torch.float64))[0]
    assert float(similarity_loss(one, 3 * (one.flatten(1) @ turn))) < 1e-20


def test_activations_are_compared_with_a_reference_of_8_bits() -> None:
    """As a copy of the model, whose weights are rounded by hand, gives them; a reference goes through a checkpoint."""
    model = GPT(GPTConfig(vocabulary=61, layers=3, width=16, heads=2)).double()
    initialise(model, seed=1, device="cpu", dtype=torch.float64)
    parameters, names = dict(model.named_parameters()), [f"blocks.{number}" for number in range(3)]
    activations = Activations(model, parameters, names, Alone())
    activations.renew()
    copy = deepcopy(model).eval()
    for parameter in copy.parameters():
        if parameter.ndim > 1:
            scale = parameter.data.abs().amax(1, keepdim=True) / 127
            parameter.data = (parameter.data / scale).round() * scale
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.01)
    tokens = torch.randint(0, 61, (4, 8), generator=torch.Generator().manual_seed(0))

    def blocks(of: nn.Module) -> list[Tensor]:
        given: list[Any] = []
        for name in names:
            of.get_submodule(name).register_forward_hook(lambda _, args, out: given.append(out))
        with torch.no_grad():
            of(tokens)
        return given

    saved = {name: cast(Tensor, held).clone() for name, held in activations.tensors().items()}
    other = Activations(model, parameters, names, Alone())
    for name, target in other.targets({name: held.dtype for name, held in saved.items()}).items():
        cast(Tensor, target).copy_(saved[name])
    assert sum(held.nbytes for held in saved.values()) < 0.3 * sum(p.nbytes for p in parameters.values())
    found = []
    for each in (activations, other):
        each.look(now=True)
        model.train()
        model(tokens)
        found.append(each.losses())
        assert model.training
    wanted = [float(similarity_loss(*pair)) for pair in zip(blocks(model.eval()), blocks(copy), strict=True)]
    assert found[0] == found[1] == pytest.approx(wanted, rel=1e-9)
    assert min(wanted) > 0


def test_activations_of_one_sample_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    activations = Activations(model, dict(model.named_parameters()), ["0", "1"], Alone())
    activations.renew()
    activations.look(now=True)
    model(torch.zeros(1, 2))
    with pytest.raises(UserCodeError, match=r"block 0 of Sequential gives \[1, 2\], and at least two samples"):
        activations.losses()


class Masked(nn.Module):
    """A block with the mask of a causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.mask = nn.Buffer(torch.full((4, 4), -torch.inf).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear((x @ x.transpose(1, 2) + self.mask).softmax(-1) @ x)


def test_a_mask_of_infinities_is_whole_in_the_reference() -> None:
    model = nn.Sequential(Masked(), Masked())
    activations = Activations(model, dict(model.named_parameters()), ["0", "1"], Alone())
    activations.renew()
    activations.look(True)
    model(torch.randn(5, 4, 8))
    assert all(0 <= loss < 1e-3 for loss in activations.losses())
    with pytest.raises(UserCodeError, match="without a call of Sequential itself"):
        activations.losses()


@pytest.mark.parametrize("criterion", ["movement", "gradient", "activations"])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_not_finite_has_not_settled(criterion: Any, number: float) -> None:
    """Nor gets into the state; the block before it is frozen, as without it, and it is said once."""
    config = FreezeByProgress(criterion=criterion, window=3, patience=1, below=0.7, most=0.9)
    progress = Plasticity(config, blocks=3)
    for measured in (1.0, 9.0, 1.0, 1.0, 1.0, 1.0, 1.0):
        progress.observe([measured, number, 2 * measured], lr=1.0)
        assert all(torch.tensor(each).isfinite().all() for each in list(progress.to_state().values())[1:])
    assert progress.frozen == 1
    assert len(progress.lines) == 1
    assert f'criterion = "{criterion}": what is measured of block 1 is not finite' in progress.lines[0]


def test_another_criterion_measures_anew() -> None:
    """What is frozen stays frozen."""
    before = Plasticity(FreezeByProgress(criterion="movement"), 3, 1, 0.5, [9.0] * 3, [2, 1, 1], [1.0] * 3, [[1.0] * 3])
    after = Plasticity(FreezeByProgress(criterion="gradient"), blocks=3)
    after.load(before.to_state())
    assert after == Plasticity(after.config, 3, 1, 0.5)
    assert len(after.lines) == 1
    assert 'criterion was "movement" before and is "gradient" now' in after.lines[0]
