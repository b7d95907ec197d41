"""A backward in two parts gives what a whole one gives, and the first part leaves the weights alone."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.parallel.pipeline.execute import Pass
from shoal.parallel.pipeline.joints import find_branches

EXACT = 1e-13  # float64: the same operations in another order
WIDTH = 6
Stage = Callable[[nn.ModuleDict, Tensor], Tensor]


def modules() -> nn.ModuleDict:
    torch.manual_seed(3)
    made = {"a": nn.Linear(WIDTH, WIDTH), "b": nn.Linear(WIDTH, WIDTH), "norm": nn.RMSNorm(WIDTH)}
    return nn.ModuleDict(made).to(torch.float64)


STAGES: dict[str, Stage] = {
    "plain": lambda m, x: m["b"](torch.tanh(m["a"](x))),
    "residual and norm": lambda m, x: x + m["a"](m["norm"](x)),
    "a weight used three times": lambda m, x: m["a"](torch.sin(m["a"](x))) + m["a"].bias + m["b"](x),
    "weights that meet beside the path": lambda m, x: x @ (m["a"].weight @ m["b"].weight) + m["norm"].weight,
    "a weight used as a factor": lambda m, x: x * m["norm"].weight * m["norm"].weight,
    "a view at the end": lambda m, x: m["a"](x).transpose(0, 1)[1:],
    "the input as output": lambda m, x: x.view_as(x),
    "no path from input to output": lambda m, x: m["a"](torch.ones_like(x)),
    "recomputed": lambda m, x: m["b"](checkpoint(lambda y: torch.tanh(m["a"](y)), x, use_reentrant=False)),
    "a weight that is unused": lambda m, x: m["a"](x),
}


@pytest.mark.parametrize("name", STAGES)
def test_split_backward_equals_the_whole_one(name: str) -> None:
    """dx and every dw, added to gradients that are there already; the oracle runs the graph once for each."""
    stage, own = STAGES[name], modules()
    weights = list(own.parameters())
    torch.manual_seed(4)
    x = torch.randn(4, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    output = stage(own, x)
    gradient = torch.randn_like(output)
    (dx,) = torch.autograd.grad(output, x, gradient, retain_graph=True, allow_unused=True)
    dw = torch.autograd.grad(output, weights, gradient, allow_unused=True)

    for weight in weights:
        weight.grad = torch.ones_like(weight)
    split = Pass(x, stage(own, x))
    result = split.backward_input(gradient, weights)
    assert result is not None
    if name != "no path from input to output":
        assert all(torch.equal(w.grad, torch.ones_like(w)) for w in weights if w.grad is not None)
    split.backward_weight()
    assert torch.allclose(result, torch.zeros_like(x) if dx is None else dx, rtol=EXACT, atol=EXACT)
    for weight, expected in zip(weights, dw, strict=True):
        assert weight.grad is not None
        whole = 1 + (torch.zeros_like(weight) if expected is None else expected)
        assert torch.allclose(weight.grad, whole, rtol=EXACT, atol=EXACT)


SHARING: dict[str, Stage] = {
    "weights that are added": lambda m, x: torch.tanh(x @ (m["a"].weight + m["b"].weight)),
    "a weight that is added to the input": lambda m, x: torch.tanh(x + m["a"].weight[:1]),
    "a weight of the input's shape": lambda m, x: x + m["a"].weight,
    "a weight that is summed": lambda m, x: x * m["a"].weight.sum(),
    **STAGES,
}
"""Their gradients may share memory with one another, with the input's or with the output's."""


@pytest.mark.parametrize("name", SHARING)
def test_split_backwards_of_several_microbatches_add_up(name: str) -> None:
    """From no gradient at all, each forward's input and weights one after the other: the sums of whole backwards, and
    what was returned for one microbatch stays as it was."""
    stage, own = SHARING[name], modules()
    weights = list(own.parameters())
    whole = copy.deepcopy(own)
    torch.manual_seed(5)
    passes, expected, results = [], [], []
    for _ in range(3):
        x = torch.randn(WIDTH, WIDTH, dtype=torch.float64, requires_grad=True)
        passes.append((Pass(x, stage(own, x)), torch.randn_like(stage(own, x))))
        y = x.detach().clone().requires_grad_()
        stage(whole, y).backward(passes[-1][1])
        expected.append(torch.zeros_like(x) if y.grad is None else y.grad)
    for one, gradient in passes:
        results.append(one.backward_input(gradient, weights))
        one.backward_weight()
    for found, wanted in zip(results, expected, strict=True):
        assert found is not None
        torch.testing.assert_close(found, wanted, rtol=EXACT, atol=EXACT)
    for weight, other in zip(weights, whole.parameters(), strict=True):
        assert (weight.grad is None) == (other.grad is None)
        if weight.grad is not None:
            torch.testing.assert_close(weight.grad, other.grad, rtol=EXACT, atol=EXACT)


def test_weights_that_share_no_use_are_taken_apart() -> None:
    """Each goes from its own joint, so that no path is run again; a shared one holds its joints together."""
    own = modules()
    x = torch.randn(2, WIDTH, dtype=torch.float64, requires_grad=True)
    apart = find_branches(STAGES["plain"](own, x), x, list(own.parameters()))
    shared = find_branches(STAGES["a weight used three times"](own, x), x, list(own.parameters()))
    assert apart is not None
    assert [len(branch.joints) for branch in apart] == [1, 1]
    assert shared is not None
    assert sorted(len(branch.joints) for branch in shared) == [1, 3]
