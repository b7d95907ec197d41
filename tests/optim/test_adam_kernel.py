"""The step of a script's AdamW or Adam by its kernel beside the step of its class."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from shoal.optim.adam_kernel import DirectAdam
from shoal.optim.fused import FusedAdamW
from tests.optim.test_fused import groups, parameters

KINDS = (torch.optim.AdamW, torch.optim.Adam)


def made(kind: type[torch.optim.Optimizer], held: list[Parameter], **options: Any) -> torch.optim.Optimizer:
    return kind(groups(held), **({"lr": 0.01, "betas": (0.9, 0.95), "fused": True} | options))  # type: ignore[call-arg]


def give_gradients(*sides: list[Parameter], seed: int, without: int | None = None) -> None:
    """The same to each side; none to the parameter of the number `without`."""
    generator = torch.Generator().manual_seed(seed)
    for number, alike in enumerate(zip(*sides, strict=True)):
        gradient = torch.randn(alike[0].shape, generator=generator)
        for parameter in alike:
            parameter.grad = None if number == without else gradient.to(parameter.dtype)


def same_bits(mine: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> bool:
    """Of weights and state."""
    pairs = [
        (a, b)
        for own, peer in zip(mine.param_groups, theirs.param_groups, strict=True)
        for a, b in zip(own["params"], peer["params"], strict=True)
    ]
    weights = all(torch.equal(a, b) for a, b in pairs)
    keys = all(set(mine.state[a]) == set(theirs.state[b]) for a, b in pairs)
    return (
        weights and keys and all(torch.equal(mine.state[a][k], v) for a, b in pairs for k, v in theirs.state[b].items())
    )


def reload(optimizer: torch.optim.Optimizer) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def forget_one(optimizer: torch.optim.Optimizer) -> None:
    """As those do who give a neuron a new start."""
    optimizer.state[optimizer.param_groups[0]["params"][0]] = {}


def replace_a_moment(optimizer: torch.optim.Optimizer) -> None:
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    state["exp_avg"] = state["exp_avg"] * 2


def reset_a_count(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[optimizer.param_groups[1]["params"][0]]["step"].zero_()


def forget_all(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()


def forget_inside(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[optimizer.param_groups[0]["params"][0]].clear()


def load_and_forget(optimizer: torch.optim.Optimizer) -> None:
    reload(optimizer)
    optimizer.state.clear()


def give_other_memory(optimizer: torch.optim.Optimizer) -> None:
    """As those do who put the state of an optimizer elsewhere and back."""
    for state in optimizer.state.values():
        for tensor in state.values():
            tensor.data = tensor.data.clone()


def give_one_count_other_memory(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[optimizer.param_groups[0]["params"][0]]["step"].data = torch.tensor(2.0)


def add_a_group(optimizer: torch.optim.Optimizer) -> None:
    added = Parameter(torch.ones(4))
    added.grad = torch.ones(4)
    optimizer.add_param_group({"params": [added]})


MEDDLING: dict[str, Callable[[torch.optim.Optimizer], None]] = {
    "nothing": lambda optimizer: None,
    "load_state_dict": reload,
    "forget_one": forget_one,
    "replace_a_moment": replace_a_moment,
    "reset_a_count": reset_a_count,
    "add_a_group": add_a_group,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("meddling", MEDDLING)
def test_weights_and_state_are_the_same_bits(kind: type[torch.optim.Optimizer], meddling: str) -> None:
    """Over nine steps, with a rate that changes, one gradient that is missing in one, and what scripts do to state."""
    mine, theirs = parameters(), parameters()
    own, peer = made(kind, mine), made(kind, theirs)
    direct, made_directly = DirectAdam(own), []
    for step in range(9):
        give_gradients(mine, theirs, seed=step, without=2 if step == 6 else None)
        for optimizer in (own, peer):
            if step == 4:
                MEDDLING[meddling](optimizer)
            for group in optimizer.param_groups:
                group["lr"] = 0.01 / (step + 1)
        made_directly.append(direct.step())
        if not made_directly[-1]:
            own.step()
        peer.step()
    assert same_bits(own, peer)
    first_steps = {0, 6} | ({4} if meddling in ("forget_one", "add_a_group") else set())
    assert [step for step, done in enumerate(made_directly) if not done] == sorted(first_steps)


AT_ANY_TIME = (forget_one, forget_all, forget_inside, load_and_forget, give_other_memory, give_one_count_other_memory)


@pytest.mark.parametrize("directly", [True, False])
@pytest.mark.parametrize("after", [1, 2, 3, 6])
@pytest.mark.parametrize("meddle", AT_ANY_TIME)
def test_state_that_a_script_changes_after_any_step(meddle: Callable[..., None], after: int, directly: bool) -> None:
    """`directly`: a script's own optimizer; else that of a run file."""
    mine, theirs = parameters(), parameters()
    peer = made(torch.optim.AdamW, theirs)
    own = made(torch.optim.AdamW, mine) if directly else FusedAdamW(groups(mine), lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    direct = DirectAdam(own)
    for step in range(9):
        if step == after:
            meddle(own)
            meddle(peer)
        give_gradients(mine, theirs, seed=step)
        if not (directly and direct.step()):
            own.step()
        peer.step()
        assert same_bits(own, peer), step


@pytest.mark.parametrize("after", [2, 3, 6])
def test_states_that_parameters_exchange(after: int) -> None:
    """All of them stand where they stood, under other names."""
    mine, theirs = ([Parameter(torch.full((3, 2), float(number))) for number in range(2)] for _ in range(2))
    own, peer = (torch.optim.AdamW(held, lr=0.01, fused=True) for held in (mine, theirs))
    direct = DirectAdam(own)
    for step in range(9):
        if step == after:
            for optimizer in (own, peer):
                exchanged = list(zip(reversed(optimizer.state), optimizer.state.values(), strict=True))
                optimizer.state.clear()
                optimizer.state.update(exchanged)
        give_gradients(mine, theirs, seed=step)
        if not direct.step():
            own.step()
        peer.step()
        assert same_bits(own, peer), step


class Sub(torch.optim.AdamW):
    """May do anything in its step."""


@pytest.mark.parametrize(
    "options",
    [
        {"fused": False},
        {"foreach": True, "fused": None},
        {"amsgrad": True},
        {"maximize": True},
        {"lr": torch.tensor(0.1)},
    ],
    ids=str,
)
def test_what_only_the_class_knows_is_left_to_it(options: dict[str, Any]) -> None:
    held = parameters()
    optimizer = made(torch.optim.AdamW, held, **options)
    direct = DirectAdam(optimizer)
    for step in range(3):
        give_gradients(held, seed=step)
        before = [parameter.detach().clone() for parameter in held]
        assert not direct.step()
        assert all(map(torch.equal, before, held))
        optimizer.step()


def test_a_gradient_that_is_still_scaled_is_left_to_the_class() -> None:
    """As PyTorch's own GradScaler hands it over to fused optimizers."""
    held = parameters()
    optimizer = made(torch.optim.AdamW, held)
    for step in range(3):
        give_gradients(held, seed=step)
        optimizer.step()
    assert DirectAdam(optimizer).step()
    optimizer.grad_scale = torch.tensor(2.0)  # type: ignore[attr-defined]
    assert not DirectAdam(optimizer).step()


def test_a_class_of_a_script_makes_its_own_step() -> None:
    held = parameters()
    optimizer = made(Sub, held)
    for step in range(3):
        give_gradients(held, seed=step)
        assert not DirectAdam(optimizer).step()
        optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_a_script_gives_the_class_is_made(kind: type[torch.optim.Optimizer], monkeypatch: Any) -> None:
    held, called = parameters(), list[int]()
    optimizer = made(kind, held)
    direct, original = DirectAdam(optimizer), kind.step
    for step in range(6):
        give_gradients(held, seed=step)
        if step == 4:

            @functools.wraps(original)
            def mine(self: Any, *given: Any) -> Any:
                called.append(1)
                return original(self, *given)

            monkeypatch.setattr(kind, "step", mine)
        if not direct.step():
            optimizer.step()
        assert len(called) == max(0, step - 3)


def test_moments_of_parameters_that_have_left_are_forgotten() -> None:
    """As where a script takes one group away and adds another, over and over."""
    held = parameters()
    optimizer = made(torch.optim.AdamW, held)
    direct = DirectAdam(optimizer)
    for step in range(12):
        optimizer.param_groups.pop()
        optimizer.add_param_group({"params": [Parameter(torch.ones(3))]})
        left = {p for group in optimizer.param_groups for p in group["params"]}
        for parameter in set(optimizer.state) - left:
            del optimizer.state[parameter]
        for _ in range(2):
            give_gradients([p for group in optimizer.param_groups for p in group["params"]], seed=step)
            if not direct.step():
                optimizer.step()
    assert len(direct._known._known) == 2


def test_counts_are_one_tensor_and_a_copy_has_its_own() -> None:
    """One call counts the steps of all parameters; what a copy counts does not show in the original."""
    held = parameters()
    optimizer = FusedAdamW(groups(held), lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    for step in range(3):
        give_gradients(held, seed=step)
        optimizer.step()
    counts = [optimizer.state[parameter]["step"] for parameter in held[::2]]
    assert len({count.untyped_storage().data_ptr() for count in counts}) == 1
    twin = copy.deepcopy(optimizer)
    for group in twin.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    twin.step()
    assert {float(optimizer.state[parameter]["step"]) for parameter in held} == {3.0}
    assert {float(state["step"]) for state in twin.state.values()} == {4.0}
