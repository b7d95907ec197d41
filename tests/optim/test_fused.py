"""AdamW and SGD of the run file beside PyTorch's own fused classes."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from shoal.optim.adaptive import ElementOptimizer, OwnedAdafactor
from shoal.optim.fused import FusedAdamW, FusedSGD
from shoal.optim.kinds import Lion
from shoal.optim.muon import OwnedMuon

Make = Callable[[list[dict]], torch.optim.Optimizer]
PAIRS: dict[str, tuple[Make, Make]] = {
    "adamw": (
        lambda groups: FusedAdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8),
        lambda groups: torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8, fused=True),
    ),
    "sgd": (
        lambda groups: FusedSGD(groups, lr=0.01, momentum=0.0, nesterov=False),
        lambda groups: torch.optim.SGD(groups, lr=0.01, fused=True),
    ),
    "momentum": (
        lambda groups: FusedSGD(groups, lr=0.01, momentum=0.9, nesterov=False),
        lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9, fused=True),
    ),
    "nesterov": (
        lambda groups: FusedSGD(groups, lr=0.01, momentum=0.9, nesterov=True),
        lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9, nesterov=True, fused=True),
    ),
}


def parameters(dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> list[Parameter]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(7, 5), (5,), (0,), (), (64, 33)]
    return [Parameter(torch.randn(shape, generator=generator).to(dtype)) for dtype in dtypes for shape in shapes]


def groups(held: list[Parameter]) -> list[dict]:
    return [{"params": held[::2], "weight_decay": 0.1}, {"params": held[1::2], "weight_decay": 0.0}]


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.float64, torch.float32), (torch.bfloat16,)])
def test_weights_and_state_are_the_same_bits(name: str, dtypes: tuple[torch.dtype, ...]) -> None:
    """Over twelve steps, with a rate that changes and, in one of them, without any gradient."""
    mine, theirs = parameters(dtypes), parameters(dtypes)
    own, peer = (make(groups(held)) for make, held in zip(PAIRS[name], (mine, theirs), strict=True))
    if name != "adamw" and torch.bfloat16 in dtypes:  # whose fused kernel is wrong on a CPU: pytorch/pytorch#191763
        for group in peer.param_groups:
            group |= {"fused": False, "foreach": False}
    for step in range(12):
        for a, b in zip(mine, theirs, strict=True):
            b.grad = torch.randn(a.shape, dtype=torch.float32).to(a.dtype) if step != 4 else None
            a.grad = None if b.grad is None else b.grad.clone()
        for optimizer in (own, peer):
            for group in optimizer.param_groups:
                group["lr"] = 0.01 / (step + 1)
            optimizer.step()
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a, b)
        assert set(own.state[a]) == set(peer.state[b])
        for slot, value in peer.state[b].items():
            assert value.dtype == own.state[a][slot].dtype
            assert torch.equal(own.state[a][slot], value)


def test_a_parameter_that_joins_late_begins_with_its_first_gradient() -> None:
    """Its buffer is that of a run of its own."""
    late, early = parameters()[0], parameters()[4]
    alone = Parameter(late.detach().clone())
    own, peer = PAIRS["momentum"][0]([{"params": [late, early]}]), PAIRS["momentum"][1]([{"params": [alone]}])
    for step in range(4):
        early.grad = torch.ones_like(early)
        if step >= 2:
            late.grad = torch.full_like(late, step)
            alone.grad = late.grad.clone()
            peer.step()
        own.step()
    assert torch.equal(late, alone)


def test_gradients_are_forgotten_or_zeroed() -> None:
    held = parameters()[:1]
    optimizer = PAIRS["sgd"][0]([{"params": held}])
    held[0].grad = gradient = torch.ones_like(held[0])
    optimizer.zero_grad(set_to_none=False)
    assert held[0].grad is gradient
    assert not gradient.any()
    optimizer.zero_grad()
    assert held[0].grad is None


def test_no_compiler_is_imported() -> None:
    """`torch._dynamo` and sympy take longer to import than torch: neither comes with an optimizer or its step."""
    script = """
import sys, torch
from shoal.optim.adaptive import ElementOptimizer, OwnedAdafactor
from shoal.optim.fused import FusedAdamW, FusedSGD
from shoal.optim.kinds import Lion
from shoal.optim.muon import OwnedMuon
p = torch.nn.Parameter(torch.ones(3))
p.grad = torch.ones(3)
FusedAdamW([{"params": [p]}], lr=0.1, betas=(0.9, 0.95), eps=1e-8).step()
FusedSGD([{"params": [p]}], lr=0.1, momentum=0.9, nesterov=False).step()
sys.exit(any(name in sys.modules for name in ("torch._dynamo", "sympy")))
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.parametrize("name", PAIRS)
def test_the_kernel_divides_gradients_by_the_scale(name: str) -> None:
    """In one step alone: the next one takes them as they are."""
    mine, theirs = parameters(), parameters()
    own, peer = (PAIRS[name][0](groups(held)) for held in (mine, theirs))
    assert isinstance(own, FusedAdamW | FusedSGD)
    assert own.takes_scale
    for factor in (0.25, 1.0):
        for one, other in zip(mine, theirs, strict=True):
            one.grad = torch.full_like(one, 3.0)
            other.grad = one.grad * factor
        own.grad_scale = None if factor == 1.0 else torch.tensor(1 / factor)
        own.step()
        peer.step()
        assert own.grad_scale is None
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_a_float64_parameter_takes_no_scale() -> None:
    """The kernel's is a float32."""
    assert not FusedSGD([{"params": parameters((torch.float64,))}], lr=0.1, momentum=0.0, nesterov=False).takes_scale


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_vote_against_it_leaves_weights_and_state(name: str) -> None:
    """Of a step between two others: as if it had never been launched."""
    mine, theirs = parameters(), parameters()
    own, peer = (PAIRS[name][0](groups(held)) for held in (mine, theirs))
    assert isinstance(own, FusedAdamW | FusedSGD)
    assert own.takes_vote
    for number, found_inf in enumerate((0.0, 1.0, 0.0)):
        for one, other in zip(mine, theirs, strict=True):
            one.grad = torch.full_like(one, float("nan") if found_inf else 1.0 + number)
            other.grad = one.grad.clone()
        own.found_inf = torch.tensor(found_inf)
        own.step()
        if not found_inf:
            peer.step()
    for one, other in zip(mine, theirs, strict=True):
        assert torch.equal(one, other)
        assert all(torch.equal(own.state[one][key], peer.state[other][key]) for key in peer.state[other])


PLAIN: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: FusedAdamW(params, lr=0.1, betas=(0.9, 0.95), eps=1e-8),
    "muon": lambda params: OwnedMuon(params, lr=0.1),
    "adafactor": lambda params: OwnedAdafactor(params, lr=0.1),
    "lion": lambda params: ElementOptimizer(params, Lion(lr=0.1)),
}


@pytest.mark.parametrize("kind", PLAIN)
def test_parameters_are_given_in_the_forms_that_pytorch_takes(kind: str) -> None:
    """Alone or with their names, at once or in a group that is added later, as one tensor or several; never twice."""
    model, late, apart = torch.nn.Linear(3, 2), Parameter(torch.ones(2)), Parameter(torch.ones(()))
    optimizer = PLAIN[kind](model.named_parameters())
    optimizer.add_param_group({"params": late, "lr": 0.01})
    optimizer.add_param_group({"params": iter([apart])})
    assert {name for group in optimizer.param_groups for name in group.get("param_names", ())} == {"weight", "bias"}
    assert [group["lr"] for group in optimizer.param_groups][-2:] == [0.01, 0.1]
    every = [*model.parameters(), late, apart]
    before = [p.detach().clone() for p in every]
    for parameter in every:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert not any(torch.equal(p.detach(), was) for p, was in zip(every, before, strict=True))
    for again in (late, [apart], [Parameter(torch.ones(3))] * 2):
        with pytest.raises(ValueError, match="twice in the groups"):
            optimizer.add_param_group({"params": again})


@pytest.mark.parametrize("kind", PLAIN)
def test_what_would_not_be_trained_or_not_in_one_order_is_no_group(kind: str) -> None:
    """A matrix by itself is the tensors of its rows to Python: nobody gives those a gradient."""
    matrix = Parameter(torch.ones(3, 2))
    with pytest.raises((TypeError, ValueError), match=r"computed from others|iterable of Tensors"):
        PLAIN[kind](matrix)
    with pytest.raises(ValueError, match="computed from others"):
        PLAIN[kind]([{"params": [matrix.mT]}])
    with pytest.raises(TypeError, match="given a set"):
        PLAIN[kind]([{"params": {matrix}}])
