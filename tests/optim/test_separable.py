"""Optimizers whose step of one parameter depends on the gradients of others are found by trying; others are not."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from shoal.errors import UserCodeError
from shoal.optim.adopt import own_optimizers
from shoal.optim.probe import slots_of, tried
from tests.optim import coupled_optimizers as planted

KNOWN = ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD"]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))


@pytest.mark.parametrize("name", KNOWN)
def test_optimizers_of_pytorch_are_separable(name: str) -> None:
    assert not tried(getattr(torch.optim, name)(model().parameters(), lr=0.1)).couples


class OwnAdagrad(torch.optim.Adagrad):
    """A user's. PyTorch before 2.12 makes its state when it is built."""


def test_what_is_made_of_adagrad_is_tried() -> None:
    assert not tried(OwnAdagrad(model().parameters(), lr=0.1)).couples


@pytest.mark.parametrize("kind", planted.COUPLED, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("groups", [1, 2, 7])
def test_what_takes_a_number_from_all_gradients_couples(kind: Any, groups: int) -> None:
    """A norm of all of them, a step length, a decay by their mean; inside one group, and over several."""
    parameters = [nn.Parameter(torch.randn(3, 3)) for _ in range(8)]
    each = [{"params": parameters[g::groups]} for g in range(groups)]
    assert tried(kind(each)).couples


@pytest.mark.parametrize("kind", planted.SEPARABLE, ids=lambda kind: kind.__name__)
def test_what_looks_at_one_parameter_at_a_time_does_not(kind: Any) -> None:
    """Norms of its own, counters of a group, another optimizer inside."""
    assert not tried(kind(model().parameters())).couples


class MovesAlone(torch.optim.SGD):
    """Lookahead of so many `steps`, counted as it is called; 0: all weights decay instead."""

    def __init__(self, parameters: Any, steps: int) -> None:
        super().__init__(parameters, lr=0.1)
        self.steps, self.calls = steps, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        self.calls += 1
        for p in self.param_groups[0]["params"]:
            if not self.steps:
                p.data.mul_(0.999)
            elif self.calls % self.steps == 0:
                slow = self.state[p].setdefault("slow", p.detach().clone())
                p.data.copy_(slow.lerp_(p, 0.5))


@pytest.mark.parametrize("steps", [0, 2, 3, 5, 6, 10])
def test_what_changes_weights_without_gradients_is_found(steps: int) -> None:
    """Also where it does so every tenth step; one that leaves out what has no gradient does not."""
    assert tried(MovesAlone(model().parameters(), steps)).moves_alone
    assert not any(tried(kind(model().parameters())).moves_alone for kind in planted.SEPARABLE)
    assert not tried(torch.optim.AdamW(model().parameters())).moves_alone


def test_a_rate_of_0_hides_nothing() -> None:
    """A scheduler with a warm-up begins there."""
    optimizer = planted.ByAllNorms(model().parameters(), lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 10))
    assert optimizer.param_groups[0]["lr"] == 0
    assert tried(optimizer).couples


@pytest.mark.parametrize("kind", [*planted.COUPLED, *planted.SEPARABLE], ids=lambda kind: kind.__name__)
def test_the_optimizer_is_not_touched(kind: Any) -> None:
    """Neither its parameters, options and state nor one inside of it; no random number is drawn."""
    own = model()
    optimizer = kind(own.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 2)
    hooks = []
    optimizer.register_step_pre_hook(lambda *_: hooks.append(1))
    before = [p.detach().clone() for p in own.parameters()]
    options = [{n: v for n, v in group.items() if n != "params"} for group in optimizer.param_groups]
    drawn = torch.random.get_rng_state()
    tried(optimizer)
    slots_of(optimizer)
    assert all(map(torch.equal, own.parameters(), before))
    assert [{n: v for n, v in group.items() if n != "params"} for group in optimizer.param_groups] == options
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in own.parameters()]
    assert not optimizer.state
    assert not hooks
    assert torch.equal(torch.random.get_rng_state(), drawn)


class Lookahead(torch.optim.SGD):
    """Keeps slow weights beside its state, in the order of its parameters."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.1)
        self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]

    def step(self, closure: Any = None) -> None:
        super().step()
        for slow, parameter in zip(self.slow, self.param_groups[0]["params"], strict=False):
            parameter.data.copy_(slow.add_(parameter.detach() - slow, alpha=0.5))


def test_what_is_kept_of_parameters_beside_the_state_is_a_sentence() -> None:
    """No checkpoint has it, and no rank the part that is its own."""
    with pytest.raises(UserCodeError, match="cannot step other parameters than its own"):
        tried(Lookahead(model().parameters()))


def test_one_with_a_number_for_each_parameter_of_a_large_model_is_tried_in_part() -> None:
    """Hundreds of groups are tried as a few are."""
    parameters = [nn.Parameter(torch.zeros(2, 2)) for _ in range(500)]
    assert tried(planted.ByAllNorms([{"params": [p]} for p in parameters])).couples


def test_numbers_of_a_group_that_a_step_changes_are_saved_and_restored() -> None:
    """As Prodigy's `d`; what a user has set since is kept."""
    first, later = model(), model()
    (own,) = own_optimizers([planted.Distance(first.parameters())], first)
    assert own.counts == ("d", "gathered", "k")
    own.optimizer.param_groups[0].update(d=0.25, k=7)
    (resumed,) = own_optimizers([planted.Distance(later.parameters(), weight_decay=0.5)], later)
    resumed.load(own.to_state())
    group = resumed.optimizer.param_groups[0]
    assert (group["d"], group["k"], group["weight_decay"]) == (0.25, 7, 0.5)


def test_a_rank_that_owns_nothing_of_a_group_can_step() -> None:
    """An optimizer that stacks the norms of its gradients cannot step an empty group."""
    own_model = model()
    optimizer = planted.Stacks([{"params": part.parameters()} for part in own_model])
    (own,) = own_optimizers([optimizer], own_model)
    assert not own.couples
    piece = nn.Parameter(torch.ones(2))
    own.adopt([("1.bias", piece)])
    piece.grad = torch.ones(2)
    optimizer.step()
    assert math.isclose(float(piece.detach()[0]), 1 - 0.1 / math.sqrt(2), rel_tol=1e-6)
    own.adopt([])
    optimizer.step()


@pytest.mark.parametrize(
    ("package", "name", "couples"),
    [
        ("dadaptation", "DAdaptAdam", True),
        ("dadaptation", "DAdaptSGD", True),
        ("dadaptation", "DAdaptLion", True),
        ("pytorch_optimizer", "Prodigy", True),
        ("pytorch_optimizer", "Adai", True),
        ("pytorch_optimizer", "Lamb", False),
        ("pytorch_optimizer", "Lion", False),
        ("schedulefree", "AdamWScheduleFree", False),
    ],
)
def test_optimizers_that_people_install(package: str, name: str, couples: bool) -> None:
    module = pytest.importorskip(package, reason=f"pip install {package.replace('_', '-')}")
    optimizer = getattr(importlib.import_module(module.__name__), name)(model().parameters())
    getattr(optimizer, "train", lambda: None)()
    assert tried(optimizer).couples is couples
