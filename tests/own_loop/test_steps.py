"""What a loop changes in its model, and in what that draws, once `shoal.start` has both."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from shoal.engine.batch_statistics import StepBuffers
from shoal.own_loop.steps import ADDED, DrawsBySample
from tests.models.test_draw_watch import STEPS, Sleeper, drawing_loop, randomness_of


class Dropping(nn.Module):
    """Drops in its own forward, and draws noise there from its forward `wakes` on."""

    def __init__(self, wakes: int) -> None:
        super().__init__()
        self.wakes, self.calls = wakes, 0

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(x, 0.3)
        return x + torch.randn_like(x) * torch.rand_like(x) if self.calls >= self.wakes else x


def noisy(*, may_sleep: bool) -> list[Tensor]:
    """The outputs of some steps of a loop, the third of which is the first to have noise."""
    model = Dropping(wakes=2)
    randomness = randomness_of(model, may_sleep=may_sleep)
    compute: Any = SimpleNamespace(randomness=randomness, buffers=StepBuffers(model))
    DrawsBySample([model], compute, inside=lambda: True)
    found = []
    for step in range(STEPS):
        model.calls = step
        randomness.step(step)
        randomness.microbatch(torch.tensor([2 * step, 2 * step + 1]))
        found.append(model(torch.ones(2, 6)))
        assert not _get_current_function_mode_stack()
    assert randomness.draws is not None
    assert not randomness.draws.dozes
    return found


def test_noise_that_begins_in_a_model_that_drops_itself_is_that_of_the_mode() -> None:
    """Its forward is repeated out of its own hook, under the mode once and not twice."""
    assert all(map(torch.equal, noisy(may_sleep=True), noisy(may_sleep=False)))


def append_dropout(model: nn.Sequential) -> None:
    model.append(nn.Dropout(0.5))


def hook_dropout(model: nn.Sequential) -> None:
    drop: Any = F.dropout
    model[0].register_forward_hook(lambda module, args, output: drop(output, 0.5))


@pytest.mark.parametrize("change", [append_dropout, hook_dropout])
@pytest.mark.parametrize("calls", [1, 2])
def test_a_layer_that_a_loop_adds_to_what_drew_nothing_is_keyed(
    change: Callable[[nn.Sequential], None], calls: int
) -> None:
    """From its first forward on where that can be repeated, else from the next, and the first is named."""
    outputs = []
    for samples in ([3, 4], [4, 3]):
        model = nn.Sequential(nn.ReLU())
        draws, randomness = drawing_loop(samples, model)
        with draws.loop():
            if calls == 2:
                model(torch.ones(2, 64))
            change(model)
            first = model(torch.ones(2, 64))
            outputs.append(first if calls == 1 else model(torch.ones(2, 64)))
        assert randomness.unkeyed(torch.device("cpu")) == (frozenset() if calls == 1 else {ADDED})
    assert torch.equal(outputs[0], outputs[1].flip(0))


def drop_behind(model: nn.Sequential, layer: int) -> None:
    drop: Any = F.dropout
    model[layer].register_forward_hook(lambda module, args, output: drop(output, 0.4))


def drop_before(model: nn.Sequential, layer: int) -> None:
    drop: Any = F.dropout
    model[layer].register_forward_pre_hook(lambda module, args: (drop(args[0], 0.4),))


def append_within(model: nn.Sequential, layer: int) -> None:
    part: Any = model[layer]
    part.append(nn.Dropout(0.4))


def dropped_after(change: Callable[[nn.Sequential, int], None], layer: int, *, may_sleep: bool) -> list[Tensor]:
    """The outputs of some steps of a loop that changes its model once it is in Shoal's hands."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 6)), nn.Sequential(nn.Dropout(0.3)), Sleeper(3, drops=True))
    del model[2]._buffers["seen"]
    model[2].seen = torch.zeros(())  # type: ignore[assignment]
    randomness = randomness_of(model, may_sleep=may_sleep)
    compute: Any = SimpleNamespace(randomness=randomness, buffers=StepBuffers(model))
    DrawsBySample([model], compute, inside=lambda: True)
    change(model, layer)
    found = []
    for step in range(STEPS):
        model[2].calls = step  # type: ignore[assignment]
        randomness.step(step)
        randomness.microbatch(torch.tensor([2 * step, 2 * step + 1]))
        found.append(model(torch.ones(2, 6)))
    return found


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("change", [drop_behind, drop_before, append_within])
def test_what_a_loop_adds_draws_the_same_when_the_mode_sleeps(
    change: Callable[[nn.Sequential, int], None], layer: int
) -> None:
    """A hook is of the layer that it was of in the first step, in which a resumed run may begin at any step."""
    expected = dropped_after(change, layer, may_sleep=False)
    found = dropped_after(change, layer, may_sleep=True)
    assert all(torch.equal(one, two) for one, two in zip(expected, found, strict=True))


def test_a_transform_of_torch_func_calls_a_model_that_draws_nothing() -> None:
    """Gradients of single samples: what looks whether something was drawn does not do so within the transform."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(2, 6)
    parameters = {name: each.detach() for name, each in model.named_parameters()}

    def slopes() -> dict[str, Tensor]:
        def value(own: dict[str, Tensor], sample: Tensor) -> Tensor:
            return torch.func.functional_call(model, own, (sample,)).sum()

        return torch.func.vmap(torch.func.grad(value), (None, 0))(parameters, x)

    expected = slopes()
    draws, _ = drawing_loop([3, 4], model)
    for _ in range(2):
        with draws.loop():
            found = slopes()
        assert all(torch.equal(found[name], each) for name, each in expected.items())
