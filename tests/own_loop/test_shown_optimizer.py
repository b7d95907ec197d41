"""What a script sees of its optimizer, whose steps are of pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shoal.errors import UserCodeError
from shoal.own_loop.shown_optimizer import EmptyStep, ShownGroups, StepHooks


def test_shown_groups_leave_nothing_but_the_refusal_of_state():
    """Between two steps the whole parameters, in a step the pieces, and no hook that steps behind a close."""
    whole, piece = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([whole], momentum=0.9)
    optimizer.param_groups[0]["params"] = [piece]
    shown = ShownGroups(optimizer, [[whole]])
    piece.grad = torch.ones(2)
    optimizer.step()
    assert optimizer.param_groups[0]["params"] == [whole]
    assert set(optimizer.state) == {piece}
    shown.close()
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert optimizer.param_groups[0]["params"] == [whole]
    with pytest.raises(UserCodeError, match="every rank has that of its own pieces alone"):
        optimizer.state_dict()


def test_a_state_dict_of_pieces_is_told_of_once():
    whole, piece, told = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2)), list[str]()
    for pieces, sentences in (([piece], 1), ([whole], 0)):
        told.clear()
        optimizer = torch.optim.SGD(pieces, momentum=0.9)
        shown = ShownGroups(optimizer, [[whole]], warn=told.append)
        optimizer.state_dict()
        optimizer.state_dict()
        assert len(told) == sentences
        assert all("has the state of this rank's pieces alone" in each for each in told)
        shown.close()


def test_state_of_whole_parameters_is_not_loaded_into_pieces():
    """As a script does that resumes a plain loop's checkpoint behind the start; what it has read itself is loaded."""
    whole, piece = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([whole], momentum=0.9)
    whole.grad = torch.ones(4)
    optimizer.step()
    plain = optimizer.state_dict()
    optimizer.state.clear()
    for pieces in ([piece], [piece, nn.Parameter(torch.ones(1))]):
        optimizer.param_groups[0]["params"] = pieces
        shown = ShownGroups(optimizer, [[whole]])
        with pytest.raises(UserCodeError, match=r"call it before shoal\.start, which takes the state over"):
            optimizer.load_state_dict(plain)
        piece.grad = torch.ones(2)
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        assert optimizer.param_groups[0]["params"] == [whole]
        shown.close()
        optimizer = torch.optim.SGD([whole], momentum=0.9)


def test_step_hooks_are_the_inner_ones():
    """Inside of those of the script, also of one that is registered after them; nothing is left behind a close."""
    optimizer, calls = torch.optim.SGD(nn.Linear(1, 1).parameters()), []
    hooks = [
        StepHooks(optimizer, lambda *_, n=name: calls.append(n), lambda *_, n=name: calls.append(n)) for name in "ab"
    ]
    optimizer.register_step_pre_hook(lambda *_: calls.append("script"))
    optimizer.register_step_post_hook(lambda *_: calls.append("script"))
    optimizer.step()
    assert calls == ["script", "a", "b", "b", "a", "script"]
    for each in hooks:
        each.close()
    calls.clear()
    optimizer.step()
    assert calls == ["script", "script"]


def test_a_script_lets_the_state_of_a_whole_parameter_go():
    """As a loop does that thaws a layer with fresh moments; what its values are is refused, also after a load."""
    whole, piece = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([whole], lr=0.1, momentum=0.9)
    optimizer.param_groups[0]["params"] = [piece]
    ShownGroups(optimizer, [[whole]], {whole: [piece]})
    piece.grad = torch.ones(2)
    for leave in (lambda: optimizer.state.pop(whole, None), lambda: optimizer.state.__delitem__(whole)):
        assert whole not in optimizer.state
        optimizer.step()
        assert whole in optimizer.state
        for ask in (lambda: optimizer.state[whole], lambda: optimizer.state.get(whole)):
            with pytest.raises(UserCodeError, match="every rank has that of its own pieces alone"):
                ask()
        leave()
        assert not optimizer.state
    assert optimizer.state.get(whole) is None


def test_a_step_that_calls_that_of_its_base_class_is_one_step() -> None:
    """PyTorch calls hooks around both, if it has built one of the base class; the next step is one again, after a
    failure too.
    """

    class Own(torch.optim.SGD):
        fails = False

        def step(self, closure: Any = None) -> None:
            super().step()
            if self.fails:
                raise RuntimeError

    parameter = nn.Parameter(torch.ones(2))
    torch.optim.SGD([parameter], lr=0.1)
    optimizer, calls = Own([parameter], lr=0.1), []
    hooks = StepHooks(optimizer, lambda *_: calls.append("before"), lambda *_: calls.append("after"))
    optimizer.step()
    assert calls == ["before", "after"]
    optimizer.fails = True
    with pytest.raises(RuntimeError):
        optimizer.step()
    optimizer.fails = False
    hooks.reset()
    optimizer.step()
    assert calls == ["before", "after", "before", "before", "after"]


class Counting(torch.optim.Optimizer):
    """Counts its steps in its groups, in the optimizer inside of it and by itself, as public optimizers do."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1, "k": 0, "sums": (0.0, 0.0), "weight": torch.zeros(())})
        self.calls, self.inner = 0, torch.optim.SGD(parameters, lr=0.1)
        self.inner.beta = 1.0  # type: ignore[attr-defined]

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        self.inner.beta *= 0.9  # type: ignore[attr-defined]
        self.inner.param_groups[0]["lr"] *= 0.9
        for group in self.param_groups:
            group["k"] += 1
            group["sums"] = (group["sums"][0] + 1, 2.0)
            group["weight"] += 1
            group["first"] = group.get("first", 0) + 1
        self.inner.step()


def test_a_step_that_updates_nothing_is_not_counted() -> None:
    """Wherever an optimizer counts: what is annealed by the count would be annealed by microbatches."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer = Counting([parameter])
    parameter.grad = gradient = torch.ones(2)

    def numbers() -> list[Any]:
        group, inner = optimizer.param_groups[0], optimizer.inner
        counts = [{**group, "weight": float(group["weight"]), "params": None}, inner.param_groups[0]["lr"]]
        return [*counts, optimizer.calls, inner.beta]  # type: ignore[attr-defined]

    before, weight = numbers(), optimizer.param_groups[0]["weight"]
    empty = EmptyStep(optimizer, parameters=True)
    optimizer.step()
    assert numbers() != before
    empty.end()
    assert numbers() == before
    assert optimizer.param_groups[0]["weight"] is weight
    assert parameter.grad is gradient
    assert parameter.tolist() == [1.0, 1.0]
    optimizer.step()
    assert (optimizer.calls, optimizer.param_groups[0]["first"]) == (1, 1)
    assert parameter.tolist() != [1.0, 1.0]


class Returning(torch.optim.SGD):
    """Lookahead (arXiv:1907.08610) of two steps, which counts them as it is called."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.1)
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        self.calls += 1
        for parameter in self.param_groups[0]["params"] if self.calls % 2 == 0 else ():
            slow = self.state[parameter].setdefault("slow", parameter.detach().clone())
            slow.lerp_(parameter, 0.5)
            parameter.data.copy_(slow)


def test_a_step_that_updates_nothing_leaves_weights_and_state_of_what_moves_without_gradients() -> None:
    """Also what lies in its place, and state that would be new."""
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    plain, optimizer = (Returning([parameter]) for parameter in parameters)
    for number in range(8):
        if number % 2:  # the microbatch before
            empty = EmptyStep(optimizer, parameters=True, moves_alone=True)
            optimizer.step()
            empty.end()
        for parameter in parameters:
            parameter.grad = torch.full((2,), 1.0 + number)
        plain.step()
        optimizer.step()
        assert torch.equal(*parameters)
    assert optimizer.state[parameters[1]]["slow"].equal(plain.state[parameters[0]]["slow"])
    assert optimizer.calls == 8
