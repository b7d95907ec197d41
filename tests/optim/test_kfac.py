"""K-FAC beside its equations in float64: factors by loops over samples, and inverses of whole Fisher blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.comm.collective import Alone
from shoal.errors import UserCodeError
from shoal.optim.fused import GroupTensors
from shoal.optim.kfac import OwnedKFAC
from shoal.optim.layer_statistics import Factors, LayerStatistics, watch_alone

SAME = 1e-9
"""Eigenvectors of small eigenvalues amplify last bits of float64."""
BLOCK_INVERSE = 1e-6
SAMPLES, LR, DAMPING = 6, 0.1, 1e-2


class Net(nn.Module):
    """Two linear layers, the second without a bias."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2, bias=False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def connected(model: nn.Module, **options: Any) -> OwnedKFAC:
    """On one process, over all parameters of `model`."""
    optimizer = OwnedKFAC(model.parameters(), **options)
    watch_alone(optimizer, model)
    return optimizer


def measured(
    module: nn.Module, inputs: Tensor, loss_of: Callable[[Tensor], Tensor], weights: Tensor, **keys: Any
) -> Factors:
    """The factors of one layer; `loss_of` has the loss of each sample, or position, that weighs."""
    statistics = LayerStatistics({"w": module}, Alone(), **{"weight_sharing": "expand", "largest": 100, **keys})
    statistics.begin()
    statistics.microbatch(weights)
    scale = 0.5
    (loss_of(module(inputs)) * weights).sum().mul(scale).backward()
    return statistics.agree(scale=scale, terms=float(weights.sum()))["w"]


def squared(output: Tensor) -> Tensor:
    """A loss for each sample."""
    return output.square().flatten(1).sum(1)


def outer(rows: list[Tensor]) -> Tensor:
    return sum(torch.outer(row, row) for row in rows)  # pyright: ignore[reportReturnType]


def close(found: Tensor | None, wanted: Tensor) -> bool:
    assert found is not None
    return bool((found - wanted).abs().max() <= 1e-12 * wanted.abs().max())


def test_a_linear_layer_has_the_moments_of_its_samples() -> None:
    """One by one; the sample that weighs nothing is not among them."""
    layer, x = nn.Linear(3, 4).double(), drawn(SAMPLES, 3)
    weights = torch.ones(SAMPLES, dtype=torch.float64)
    weights[2] = 0
    factors = measured(layer, x, squared, weights)
    real = [n for n in range(SAMPLES) if n != 2]
    gradients = [2 * layer(x[n]).detach() for n in real]
    assert close(factors.inputs, outer([x[n] for n in real]) / len(real))
    assert close(factors.outputs, outer(gradients) / len(real))


@pytest.mark.parametrize("form", ["expand", "reduce"])
def test_positions_count_one_by_one_or_together(form: str) -> None:
    """With padding in one of the samples."""
    layer, x = nn.Linear(3, 4).double(), drawn(SAMPLES, 5, 3)
    weights = torch.ones(SAMPLES, 5, dtype=torch.float64)
    weights[1, 3:] = 0
    factors = measured(layer, x, lambda y: y.square().sum(-1), weights, weight_sharing=form)
    terms = float(weights.sum())
    gradients = 2 * layer(x).detach()
    kept = [[t for t in range(5) if weights[n, t] > 0] for n in range(SAMPLES)]
    if form == "expand":
        places = [(n, t) for n in range(SAMPLES) for t in kept[n]]
        inputs, outputs = outer([x[p] for p in places]) / len(places), outer([gradients[p] for p in places]) / terms
    else:
        inputs = outer([x[n, kept[n]].mean(0) for n in range(SAMPLES)]) / SAMPLES
        outputs = outer([gradients[n, kept[n]].sum(0) for n in range(SAMPLES)]) / terms
    assert close(factors.inputs, inputs)
    assert close(factors.outputs, outputs)


def test_drawn_targets_give_the_fisher_matrix_itself() -> None:
    """Of classes with probabilities p the gradients of -log p(y) have the moments diag(p) - p p^T; the gradient of the
    loss is left alone, and the same targets are drawn in whatever microbatches samples come.
    """
    layer, samples = nn.Linear(3, 4).double(), 8000
    x, weights = drawn(1, 3).expand(samples, 3), torch.ones(samples, dtype=torch.float64)
    targets, positions, found = torch.zeros(samples, dtype=torch.int64), torch.arange(samples), []
    for parts in (1, 4):
        statistics = LayerStatistics({"w": layer}, Alone(), weight_sharing="expand", largest=100, drawn_by=5)
        statistics.begin()
        layer.zero_grad()
        for part in torch.arange(samples).chunk(parts):
            statistics.microbatch(weights[part])
            out = layer(x[part])
            statistics.look(out, targets[part], weights[part], positions[part])
            F.cross_entropy(out, targets[part], reduction="sum").backward()
        found.append(statistics.agree(scale=0.5, terms=samples)["w"])
    p = layer(x[:1]).detach().softmax(-1)[0]
    assert close(found[0].outputs, found[1].outputs if found[1].outputs is not None else p)
    assert close(found[0].inputs, outer([x[0]]))
    assert found[0].outputs is not None
    assert float((found[0].outputs - (p.diag() - torch.outer(p, p))).abs().max()) < 0.01
    wanted = torch.outer(p - F.one_hot(targets[0], 4), x[0]) * samples
    assert layer.weight.grad is not None
    assert close(layer.weight.grad, wanted)


def test_targets_are_drawn_for_logits_of_classes_in_a_run() -> None:
    """A regression has none; and a loop of one's own shows no outputs."""
    layer, x, weights = nn.Linear(3, 1).double(), drawn(SAMPLES, 3), torch.ones(SAMPLES)
    statistics = LayerStatistics({"w": layer}, Alone(), weight_sharing="expand", largest=100, drawn_by=5)
    statistics.begin()
    statistics.microbatch(weights)
    out = layer(x)
    with pytest.raises(UserCodeError, match=r"the model gives \[6, 1\] for targets of \[6, 1\]"):
        statistics.look(out, torch.zeros(SAMPLES, 1), weights, torch.arange(SAMPLES))
    statistics.begin()
    layer(x).sum().backward()
    with pytest.raises(UserCodeError, match="this loop is a script of your own"):
        statistics.agree(scale=1.0, terms=SAMPLES)


def test_a_convolution_has_those_of_its_patches() -> None:
    """With a stride, padding and dilation."""
    layer = nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=1, dilation=(1, 2)).double()
    x, weights = drawn(SAMPLES, 2, 6, 5), torch.ones(SAMPLES, dtype=torch.float64)
    factors = measured(layer, x, squared, weights)
    output = layer(x).detach()
    padded, patches, gradients = F.pad(x, (1, 1, 1, 1)), [], []
    for n in range(SAMPLES):
        for i in range(output.shape[2]):
            for j in range(output.shape[3]):
                patches.append(padded[n, :, 2 * i : 2 * i + 3, j : j + 3 : 2].flatten())
                gradients.append(2 * output[n, :, i, j])
    assert close(factors.inputs, outer(patches) / len(patches))
    assert close(factors.outputs, outer(gradients) / SAMPLES)


def test_an_embedding_has_the_frequencies_of_tokens() -> None:
    """A diagonal, without the padding."""
    layer, ids = nn.Embedding(5, 3).double(), torch.tensor([[0, 1, 1], [4, 1, 0]])
    weights = torch.tensor([[1.0, 1, 1], [1, 1, 0]], dtype=torch.float64)
    factors = measured(layer, ids, lambda y: y.square().sum(-1), weights)
    gradients = 2 * layer(ids).detach()
    assert close(factors.inputs, torch.tensor([1.0, 3, 0, 0, 1], dtype=torch.float64) / 5)
    assert close(factors.outputs, outer([gradients[p] for p in [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]]) / 5)


def step(model: nn.Module, optimizer: OwnedKFAC, number: int) -> None:
    """One of training, on the mean over samples of their losses."""
    x = drawn(SAMPLES, 3, seed=number)
    optimizer.zero_grad()
    optimizer.begin(number)
    optimizer.microbatch(torch.ones(SAMPLES))
    squared(model(x)).mean().backward()
    optimizer.agree(scale=1 / SAMPLES, terms=SAMPLES)
    optimizer.step()


def by_samples(model: Net, number: int) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """By weight: its gradient, A and G, sample by sample."""
    found: dict[str, list[Tensor]] = {"first": [], "second": []}
    inputs: dict[str, list[Tensor]] = {"first": [], "second": []}
    for row in drawn(SAMPLES, 3, seed=number):
        hidden = model.first(row)
        output = model.second(torch.tanh(hidden))
        gradients = torch.autograd.grad(output.square().sum(), [hidden, output])
        for name, gradient, own in zip(found, gradients, [row, torch.tanh(hidden).detach()], strict=True):
            found[name].append(gradient)
            inputs[name].append(own)
    return {
        f"{name}.weight": (
            sum(torch.outer(g, a) for g, a in zip(found[name], inputs[name], strict=True)) / SAMPLES,
            outer(inputs[name]) / SAMPLES,
            outer(found[name]) / SAMPLES,
        )
        for name in found
    }  # pyright: ignore[reportReturnType]


def by_damped_factors(gradient: Tensor, a: Tensor, g: Tensor) -> Tensor:
    """Each factor inverted with its part of the damping: Martens and Grosse, 6.3."""
    pi = ((a.trace() / len(a)) / (g.trace() / len(g))).sqrt()
    left = torch.linalg.inv(g + DAMPING**0.5 / pi * torch.eye(len(g), dtype=torch.float64))
    return left @ gradient @ torch.linalg.inv(a + DAMPING**0.5 * pi * torch.eye(len(a), dtype=torch.float64))


def by_the_block(gradient: Tensor, a: Tensor, g: Tensor) -> Tensor:
    """The whole matrix, inverted."""
    block = torch.kron(g, a) + DAMPING * torch.eye(gradient.numel(), dtype=torch.float64)
    return torch.linalg.solve(block, gradient.flatten()).view_as(gradient)


def test_the_preconditioner_is_the_inverse_of_the_block() -> None:
    """On two layers: of the matrix G x A + damping I itself, which is written out."""
    model, before = Net(), Net()
    optimizer = connected(model, lr=LR, momentum=0.0, kl_clip=None, damping=DAMPING, weight_decay=0.0)
    step(model, optimizer, 1)
    for name, (gradient, a, g) in by_samples(before, 1).items():
        wanted = by_the_block(gradient, a, g)
        found = (before.get_parameter(name) - model.get_parameter(name)).detach() / LR
        assert float((found - wanted).norm() / wanted.norm()) < BLOCK_INVERSE


@pytest.mark.parametrize(("inverse", "inverted"), [("eigenvalues", by_the_block), ("cholesky", by_damped_factors)])
def test_updates_are_those_of_the_equations(inverse: str, inverted: Callable[..., Tensor]) -> None:
    """Over twenty steps: means of factors, every third decomposed, clipping, momentum, decay, and AdamW's bias."""
    model, plain = Net(), Net()
    keys = {"every": 3, "factor_beta": 0.8, "momentum": 0.9, "kl_clip": 1e-2, "weight_decay": 0.1, "inverse": inverse}
    optimizer = connected(model, lr=LR, damping=DAMPING, **keys)
    adamw = torch.optim.AdamW([plain.first.bias], lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
    means: dict[str, list[Tensor]] = {}
    kept: dict[str, Tensor] = {}
    for number in range(1, 21):
        step(model, optimizer, number)
        own, turned = by_samples(plain, number), {}
        plain.zero_grad()
        squared(plain(drawn(SAMPLES, 3, seed=number))).mean().backward()
        for name, (gradient, a, g) in own.items():
            if number % 3 == 1:
                old = means.get(name, [a, g])
                means[name] = [0.8 * o + 0.2 * new for o, new in zip(old, (a, g), strict=True)]
            turned[name] = inverted(gradient, *means[name])
        change = LR**2 * sum(float((turned[name] * own[name][0]).sum()) for name in own)
        factor = min(1.0, (1e-2 / change) ** 0.5)
        adamw.step()
        for name in own:
            kept[name] = 0.9 * kept.get(name, 0) + factor * turned[name]
            weight = plain.get_parameter(name).data
            weight.mul_(1 - LR * 0.1).sub_(LR * kept[name])
    for name, parameter in model.named_parameters():
        wanted = plain.get_parameter(name)
        assert float((parameter - wanted).detach().norm() / wanted.detach().norm()) < SAME, name


def test_a_diagonal_and_a_single_side_are_inverted() -> None:
    """By Cholesky: of an embedding the frequencies of tokens, and the whole damping where one side is too long."""
    model, ids = nn.Embedding(5, 3).double(), torch.tensor([0, 1, 1, 4])
    tokens = torch.tensor([1.0, 2, 0, 0, 1], dtype=torch.float64) / 4
    before = model.weight.detach().clone()
    for largest in (100, 2):
        model.weight.data.copy_(before)
        optimizer = connected(
            model, lr=LR, momentum=0.0, kl_clip=None, damping=DAMPING, weight_decay=0.0, inverse="cholesky",
            largest_side=largest,
        )  # fmt: skip
        optimizer.begin(1)
        optimizer.microbatch(torch.ones(4))
        squared(model(ids)).mean().backward()
        optimizer.agree(scale=1 / 4, terms=4)
        optimizer.step()
        gradient, rows = model.weight.grad, 2 * before[ids]
        assert gradient is not None
        wanted = gradient / (tokens + DAMPING)[:, None]
        if largest == 100:
            wanted = by_damped_factors(gradient, rows.mT @ rows / 4, torch.diag(tokens))
        assert close((before - model.weight.detach()) / LR, wanted)


class Odd(nn.Module):
    """Layers that have no statistics, beside one that has."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2)
        self.grouped = nn.Conv2d(4, 4, 3, groups=2)
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.other.weight = self.one.weight
        self.alone = nn.Linear(4, 4)


def test_a_layer_whose_weight_lies_by_inputs_is_stepped_alike() -> None:
    """The Conv1D of transformers, as its transpose in a linear layer."""
    pytorch_utils = pytest.importorskip("transformers.pytorch_utils")
    plain, turned = Net(), Net()
    turned.first = pytorch_utils.Conv1D(4, 3).double()
    turned.first.weight.data.copy_(plain.first.weight.data.T)
    turned.first.bias.data.copy_(plain.first.bias.data)
    optimizers = [connected(model, lr=LR, damping=DAMPING, every=2) for model in (plain, turned)]
    for number in range(1, 6):
        for model, optimizer in zip((plain, turned), optimizers, strict=True):
            step(model, optimizer, number)
    moved = [model.first.weight.detach() for model in (plain, turned)]
    assert float((moved[0] - moved[1].T).norm() / moved[0].norm()) < SAME
    assert "mean_rows" in optimizers[1].state[turned.first.weight]


def test_what_has_no_statistics_is_left_to_adamw() -> None:
    """Weights that are shared, used by another module, or of a grouped convolution."""
    model = Odd()
    optimizer = connected(model, lr=LR, adamw_rate=0.5)
    every = [GroupTensors(group, group["params"], group["params"]) for group in optimizer.param_groups]
    matrices, others = optimizer.divided(every)
    assert [id(p) for one in matrices for p in one.parameters] == [id(model.alone.weight)]
    assert {id(p) for one in others if one.group["lr"] == 0.5 * LR for p in one.parameters} == {
        id(p) for p in model.parameters() if p.ndim == 2 and p is not model.alone.weight
    }
    assert {one.group["lr"] for one in others if one.parameters[0].ndim != 2} == {LR}


def test_a_layer_is_measured_when_it_is_first_used() -> None:
    """As an expert whose first tokens come between two steps that measure; later with all others."""
    model, before = Net(), Net()
    optimizer = connected(model, lr=LR, every=3, damping=DAMPING)
    whole, state, seen = model.forward, optimizer.state[model.second.weight], list[Tensor]()
    for number in range(1, 5):
        model.forward = whole if number > 1 else (lambda x: torch.tanh(model.first(x)))
        before.load_state_dict(model.state_dict())
        step(model, optimizer, number)
        if number == 2:
            _, a, g = by_samples(before, 2)["second.weight"]
            assert close(state["mean_columns"], a)
            assert close(state["mean_rows"], g)
        seen += [state["mean_rows"].clone()] if "mean_rows" in state else []
    assert [torch.equal(seen[0], each) for each in seen] == [True, True, False]


def test_a_layer_is_measured_again_where_its_first_step_was_not_taken() -> None:
    """As a script leaves one out, whose gradient it does not like: what that step measured went into no mean."""
    model = Net()
    optimizer = connected(model, lr=LR, every=3, damping=DAMPING)
    with patch.object(optimizer, "step"):
        step(model, optimizer, 1)
    _, a, g = by_samples(model, 2)["second.weight"]
    step(model, optimizer, 2)
    state = optimizer.state[model.second.weight]
    assert close(state["mean_columns"], a)
    assert close(state["mean_rows"], g)


@pytest.mark.parametrize("since", [1, 3])
@pytest.mark.parametrize("keeps", [True, False], ids=["keeps its state", "loses its state"])
def test_a_layer_that_thaws_is_preconditioned(since: int, keeps: bool) -> None:
    """Between two steps that measure, whenever it was frozen: by the means it has, or else by that step's factors."""
    model, before = Net(), Net()
    optimizer, weight = connected(model, lr=LR, every=10, damping=DAMPING), model.second.weight
    for number in range(1, 7):
        weight.requires_grad_(not since <= number < 5)
        if not keeps and not weight.requires_grad:
            optimizer.state.pop(weight, None)
        before.load_state_dict(model.state_dict())
        step(model, optimizer, number)
        if number < 5 and not weight.requires_grad:
            assert torch.equal(before.second.weight, weight)
        if number == 5 and (since == 1 or not keeps):
            _, a, g = by_samples(before, 5)["second.weight"]
            assert close(optimizer.state[weight]["mean_columns"], a)
            assert close(optimizer.state[weight]["mean_rows"], g)
        assert number < 5 or not torch.equal(before.second.weight, weight)


def test_a_gradient_that_was_taken_away_is_preconditioned_when_it_is_left() -> None:
    """As a script takes one away in the first step: its factors have gone into no mean."""
    model = Net()
    optimizer, update = connected(model, lr=LR, every=10, damping=DAMPING), OwnedKFAC.step

    def without(self: OwnedKFAC) -> None:
        model.second.weight.grad = None
        update(self)

    with patch.object(OwnedKFAC, "step", without):
        step(model, optimizer, 1)
    assert "mean_rows" not in optimizer.state[model.second.weight]
    _, a, g = by_samples(model, 2)["second.weight"]
    step(model, optimizer, 2)
    assert close(optimizer.state[model.second.weight]["mean_columns"], a)
    assert close(optimizer.state[model.second.weight]["mean_rows"], g)


def test_what_is_adamws_is_not_measured() -> None:
    """A layer whose weight is in a group that is not `whole`."""
    model = Net()
    groups = [
        {"params": [model.first.weight], "whole": True},
        {"params": [model.first.bias, model.second.weight], "whole": False},
    ]
    optimizer = OwnedKFAC(groups, lr=LR, every=2)
    watch_alone(optimizer, model)
    for number in range(1, 4):
        optimizer.begin(number)
        assert optimizer._due == ({"first.weight"} if number % 2 else set())
        step(model, optimizer, number)


def test_a_layer_that_the_forward_goes_round_is_named() -> None:
    """Its gradient has no factors: nothing is made up in their place."""
    model = Net()
    optimizer = connected(model)
    optimizer.begin(1)
    optimizer.microbatch(torch.ones(SAMPLES))
    squared(torch.tanh(model.first(drawn(SAMPLES, 3))) @ model.second.weight.mT).mean().backward()
    optimizer.agree(scale=1 / SAMPLES, terms=SAMPLES)
    with pytest.raises(UserCodeError, match=r"second\.weight has a gradient, and its layer was not called"):
        optimizer.step()


def test_a_forward_that_is_repeated_counts_once() -> None:
    """As recomputation does it."""
    model, twice = Net(), Net()
    x, factors = drawn(SAMPLES, 3), []
    for own, again in ((model, False), (twice, True)):
        statistics = LayerStatistics({"w": own.first}, Alone(), "expand", 100)
        statistics.begin()
        statistics.microbatch(torch.ones(SAMPLES))
        hidden = checkpoint(own.first, x, use_reentrant=False) if again else own.first(x)
        squared(own.second(torch.tanh(hidden))).mean().backward()
        factors.append(statistics.agree(scale=1 / SAMPLES, terms=SAMPLES)["w"])
    assert all(close(a, b) for a, b in zip(*(own[:2] for own in factors), strict=True))


def test_targets_follow_the_seed_of_the_run() -> None:
    """Two seeds draw otherwise, and one of them always the same."""
    layer, keys = nn.Linear(3, 4), []
    for seed in (0, 1, 1):
        optimizer = OwnedKFAC(list(layer.parameters()), lr=0.1, fisher="sampled")
        optimizer.watch({"weight": layer}, Alone(), seed=seed)
        keys.append(optimizer._watching.drawn_by)
    assert keys[0] != keys[1] == keys[2]
