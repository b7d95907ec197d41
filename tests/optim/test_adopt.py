"""What is asked of an optimizer that a user built."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from shoal.errors import UserCodeError
from shoal.optim.adopt import OwnOptimizer, own_optimizers
from shoal.optim.declared import Slot
from shoal.optim.probe import slots_of, works_on
from shoal.optim.slots import state_of_whole


@pytest.mark.parametrize(
    ("kind", "options", "like_parameter", "numbers"),
    [
        (torch.optim.SGD, {"lr": 0.1}, set(), set()),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, {"momentum_buffer"}, set()),
        (torch.optim.AdamW, {"fused": True}, {"exp_avg", "exp_avg_sq"}, {"step"}),
        (torch.optim.Adam, {"amsgrad": True}, {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}, {"step"}),
        (torch.optim.NAdam, {}, {"exp_avg", "exp_avg_sq"}, {"step", "mu_product"}),
        (torch.optim.Adagrad, {}, {"sum"}, {"step"}),
    ],
)
def test_slots_are_what_the_optimizer_keeps_after_a_step(kind, options, like_parameter, numbers):
    """Found without a step of the optimizer itself, also where a scheduler holds it: its state stays empty, its
    parameters stay as they are, and its scheduler counts nothing."""
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    optimizer = kind(model.parameters(), **options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    slots = slots_of(optimizer)
    assert {slot.name for slot in slots if slot.like_parameter} == like_parameter
    assert {slot.name for slot in slots if not slot.like_parameter} == numbers
    assert all(float(state["step"]) == 0 for state in optimizer.state.values())
    assert torch.equal(model.weight, before)
    assert scheduler.last_epoch == 0


def test_only_optimizers_of_elements_may_see_pieces():
    model = nn.Linear(3, 2)
    assert works_on(torch.optim.AdamW(model.parameters())) == "elements"
    assert works_on(torch.optim.Adafactor(model.parameters())) == "matrices"


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [(torch.optim.LBFGS, "LBFGS steps by a closure"), (torch.optim.Adafactor, "keeps 'row_var' of shape")],
)
def test_optimizers_that_a_checkpoint_cannot_hold_are_refused(kind, sentence):
    with pytest.raises(UserCodeError, match=sentence):
        slots_of(kind(nn.Linear(3, 2).parameters()))


def stepped(kind: Any, model: nn.Module) -> torch.optim.Optimizer:
    optimizer = kind(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return optimizer


def test_the_state_of_an_optimizer_that_has_stepped_is_taken_down():
    """By slot and parameter, numbers too, in memory of its own."""
    model = nn.Linear(3, 2)
    optimizer = stepped(torch.optim.Adam, model)
    (own,) = own_optimizers([optimizer], model)
    assert sorted(own.taken) == sorted(
        f"{s}/{n}" for s in ("step", "exp_avg", "exp_avg_sq") for n in ("weight", "bias")
    )
    assert torch.equal(own.taken["exp_avg/bias"], optimizer.state[model.bias]["exp_avg"])
    assert own.taken["exp_avg/bias"] is not optimizer.state[model.bias]["exp_avg"]
    assert not own_optimizers([torch.optim.Adagrad(model.parameters())], model)[0].taken


def test_moments_that_are_wider_than_their_parameter_stay_so():
    """Those of an optimizer that keeps float32 for bfloat16; narrower ones become as wide as a widened parameter."""
    model = nn.Linear(3, 2, bias=False)
    optimizer = stepped(torch.optim.Adam, model)
    optimizer.state[model.weight]["exp_avg"].copy_(exact := torch.full((2, 3), 1 / 3))
    optimizer.state[model.weight]["exp_avg_sq"] = torch.ones(2, 3, dtype=torch.bfloat16)
    model.weight.data = model.weight.data.bfloat16()
    taken = state_of_whole(optimizer, {id(model.weight): "weight"})
    assert torch.equal(taken["exp_avg/weight"], exact)
    model.weight.data = model.weight.data.float()
    assert state_of_whole(optimizer, {id(model.weight): "weight"})["exp_avg_sq/weight"].dtype == torch.float32


def test_state_that_belongs_to_no_parameter_is_refused():
    """Under a name, a number or a table: it is in no checkpoint, whether it has stepped or not."""

    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step()
            state: Any = self.state
            state["steps"] = state.get("steps", 0) + 1

    model = nn.Linear(3, 2)
    with pytest.raises(UserCodeError, match="Counting keeps state of no parameter, under 'steps'"):
        own_optimizers([stepped(Counting, model)], model)


def test_one_of_layers_that_has_stepped_is_refused():
    class OfLayers(torch.optim.Adam):
        slots = (Slot("exp_avg"),)

    model = nn.Linear(3, 2)
    with pytest.raises(UserCodeError, match="OfLayers has taken steps already"):
        own_optimizers([stepped(OfLayers, model)], model)


def test_the_groups_get_what_this_rank_owns():
    """Names stay in their groups; what a rank does not own is in none; the options of a group stay."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[1].parameters(), "lr": 0.25}]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    (own,) = own_optimizers([optimizer], model)
    pieces = {name: nn.Parameter(torch.zeros(1)) for name in ("1.weight", "0.bias", "0.weight")}
    assert own.adopt(pieces.items()) is optimizer
    assert [[id(p) for p in group["params"]] for group in optimizer.param_groups] == [
        [id(pieces["0.weight"]), id(pieces["0.bias"])],
        [id(pieces["1.weight"])],
    ]
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]


def test_a_rate_in_a_tensor_is_saved_and_stays_one():
    """As `capturable` and compiled steps want it; a scheduler goes on from it."""
    model = nn.Linear(3, 2)

    def scheduled() -> tuple[OwnOptimizer, torch.optim.lr_scheduler.LRScheduler]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5))
        (own,) = own_optimizers([optimizer], model)
        return own, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    (first, one), (resumed, other) = scheduled(), scheduled()
    first.optimizer.step()
    one.step()
    resumed.load(json.loads(json.dumps(first.to_state())))
    rate = resumed.optimizer.param_groups[0]["lr"]
    assert isinstance(rate, torch.Tensor)
    assert float(rate) == 0.25
    other.load_state_dict(one.state_dict())
    other.step()
    assert float(resumed.optimizer.param_groups[0]["lr"]) == 0.125


class Counted(torch.optim.SGD):
    """Anneals its rate by a number of its own, beside one that its steps leave alone."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.decay = 0.5

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls = getattr(self, "calls", 0) + 1
        for group in self.param_groups:
            group["lr"] = 0.1 * self.decay**self.calls
        super().step()


def test_what_an_optimizer_counts_itself_is_saved():
    """A resumed run goes on from it; nothing else of the optimizer is taken from a checkpoint."""

    def made() -> OwnOptimizer:
        model = nn.Linear(3, 2)
        (own,) = own_optimizers([Counted(model.parameters())], model)
        return own

    first, resumed = made(), made()
    for _ in range(3):
        first.optimizer.step()
    saved = json.loads(json.dumps(first.to_state()))
    assert saved["own"] == {"calls": 3}
    resumed.load(saved | {"own": {"calls": 3, "decay": 2.0, "state": 1}})
    assert vars(resumed.optimizer)["decay"] == 0.5
    resumed.optimizer.step()
    first.optimizer.step()
    assert resumed.optimizer.param_groups[0]["lr"] == first.optimizer.param_groups[0]["lr"] == 0.1 * 0.5**4
