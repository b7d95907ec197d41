"""An optimizer's state under the names of the unsplit model."""

from __future__ import annotations

import io

import pytest
import torch
from torch.nn import Parameter

from shoal.errors import UsageError
from shoal.optim.build import build_optimizer
from shoal.optim.config import SGD, AdamW
from shoal.optim.declared import Common, Slot
from shoal.optim.slots import make_slots, named_slots, slot_and_parameter

ADAMW, MOMENTUM = AdamW().slots, SGD(momentum=0.9).slots


def stepped() -> tuple[torch.optim.Optimizer, list[tuple[str, Parameter]]]:
    """AdamW after a step on a matrix, and on a vector that has no gradient."""
    parameters = [("a.weight", Parameter(torch.arange(6.0).view(2, 3))), ("b", Parameter(torch.ones(2)))]
    optimizer = torch.optim.AdamW([p for _, p in parameters])
    parameters[0][1].grad = torch.ones(2, 3)
    optimizer.step()
    return optimizer, parameters


def test_every_tensor_of_the_state_has_a_name():
    """Slot and parameter; a parameter without state has none."""
    optimizer, parameters = stepped()
    assert set(named_slots(optimizer, parameters)) == {"step/a.weight", "exp_avg/a.weight", "exp_avg_sq/a.weight"}


def test_slots_are_made_as_the_optimizer_makes_them():
    """Equal names, shapes and types; they are the optimizer's own, so that what is filled in is used."""
    optimizer, parameters = stepped()
    slots = named_slots(optimizer, parameters)
    fresh = torch.optim.AdamW([p for _, p in parameters])
    made = make_slots(fresh, parameters, {name: slot.dtype for name, slot in slots.items()}, slots=ADAMW)
    assert {name: (t.shape, t.dtype) for name, t in made.items()} == {n: (t.shape, t.dtype) for n, t in slots.items()}
    made["exp_avg/a.weight"].fill_(5)
    assert torch.equal(fresh.state[parameters[0][1]]["exp_avg"], torch.full((2, 3), 5.0))


def test_slots_of_parameters_that_are_elsewhere_are_not_made():
    """A stage takes what belongs to its own parameters."""
    optimizer, parameters = stepped()
    assert make_slots(optimizer, parameters[1:], {"exp_avg/a.weight": torch.float32}, slots=ADAMW) == {}


def test_memory_that_is_not_contiguous_gets_a_slot_that_is():
    """Parts of a slot are views of its elements in order."""
    parameter = Parameter(torch.zeros(3, 2).t())
    made = make_slots(
        torch.optim.SGD([parameter]), [("w", parameter)], {"momentum_buffer/w": torch.float64}, slots=MOMENTUM
    )
    assert made["momentum_buffer/w"].is_contiguous()


def test_a_slot_has_the_shape_that_the_optimizer_declares():
    """A factor of a matrix, as Shampoo keeps, is square."""
    parameter = Parameter(torch.zeros(3, 2))
    left = Slot("left", lambda shape: (shape[0], shape[0]))
    made = make_slots(torch.optim.SGD([parameter]), [("w", parameter)], {"left/w": torch.float64}, slots=[left])
    assert made["left/w"].shape == (3, 3)


def test_a_slot_that_the_optimizer_does_not_have_is_refused():
    """State that nobody would use is not dropped in silence."""
    parameter = Parameter(torch.zeros(3))
    with pytest.raises(UsageError, match="'velocity', and this run's optimizer keeps momentum_buffer"):
        make_slots(torch.optim.SGD([parameter]), [("w", parameter)], {"velocity/w": torch.float32}, slots=MOMENTUM)


def test_a_name_is_cut_at_its_slot():
    """Names of parameters may have slashes of their own."""
    assert slot_and_parameter("exp_avg/a/b.weight") == ("exp_avg", "a/b.weight")


def planted(kind: str) -> tuple[list[Parameter], torch.optim.Optimizer]:
    """A matrix of 4,096 numbers, which 8 bits take, and a vector."""
    generator = torch.Generator().manual_seed(0)
    parameters = [Parameter(torch.randn(shape, generator=generator)) for shape in ((64, 64), (64,))]
    named = [(name, p, p.ndim > 1) for name, p in zip(("w", "b"), parameters, strict=True)]
    return parameters, build_optimizer(Common.kinds()[kind](), named, lr=1e-3)


def step(parameters: list[Parameter], optimizer: torch.optim.Optimizer, number: int) -> None:
    def closure() -> float:
        optimizer.zero_grad()
        generator, loss = torch.Generator().manual_seed(number), torch.zeros(())
        for p in parameters:
            loss = loss + (p * torch.randn(p.shape, generator=generator)).sum() + p.square().sum()
        loss.backward()
        return float(loss.detach())

    optimizer.step(closure)


@pytest.mark.parametrize("kind", [kind for kind in Common.kinds() if kind not in ("kfac", "python")])
def test_pytorch_saves_and_loads_the_state(kind: str) -> None:
    """As a script does without Shoal's checkpoints: `torch.load` trusts no class; the next step has the same bits."""
    parameters, optimizer = planted(kind)
    for number in range(4):
        step(parameters, optimizer, number)
    file = io.BytesIO()
    torch.save((parameters, optimizer.state_dict()), file)
    file.seek(0)
    saved, state = torch.load(file, weights_only=True)
    others, resumed = planted(kind)
    for here, there in zip(others, saved, strict=True):
        here.data.copy_(there)
    resumed.load_state_dict(state)
    for each, of in ((parameters, optimizer), (others, resumed)):
        step(each, of, 9)
    assert all(torch.equal(one, other) for one, other in zip(parameters, others, strict=True))
