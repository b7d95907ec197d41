"""The loops in C of LAMB and LARS beside their forms in torch, which `test_equations.py` holds against the papers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shoal.codec.kernels import load_kernels
from shoal.comm.collective import Alone
from shoal.optim import layerwise
from shoal.optim.layerwise import LayerwiseAdam, LayerwiseSGD
from shoal.optim.parts import Parts, PartSums
from shoal.state import Trained, owned_whole
from shoal.topology.holding import held
from shoal.topology.layout import Layout

STEPS = 20
ROUNDING = 2e-6
"""float32 over twenty steps, in another order of operations; 4e-7 was seen."""
SHAPES = ((33, 70), (1, 1), (5,), (), (0, 4), (1000, 3), (1024,), (1025, 2))

Make = Callable[[Any], torch.optim.Optimizer]
KINDS: dict[str, Make] = {
    "lamb": lambda p: LayerwiseAdam(p, lr=0.01, weight_decay=0.1),
    "lamb, apart": lambda p: LayerwiseAdam(
        p, lr=0.01, weight_decay=0.1, bias_correction=False, decay_in_norm=False, max_trust=0.5
    ),
    "lamb, untrusted": lambda p: LayerwiseAdam([{"params": p, "trust": False}], lr=0.01),
    "lars": lambda p: LayerwiseSGD(p, lr=0.1, coefficient=0.1),
    "lars, Nesterov": lambda p: LayerwiseSGD(p, lr=0.1, coefficient=0.1, nesterov=True, max_trust=0.2),
    "lars, untrusted": lambda p: LayerwiseSGD([{"params": p, "trust": False}], lr=0.1),
}


def parameters() -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    found = [nn.Parameter(torch.randn(shape, generator=draw)) for shape in SHAPES]
    return [*found, nn.Parameter(torch.zeros(40))]


def stepped(make: Make, own: list[nn.Parameter], *, connected: bool = False) -> list[torch.Tensor]:
    """Weights and state after twenty steps, on gradients of which some are zero."""
    optimizer, draw = make(own), torch.Generator().manual_seed(1)
    if connected:
        assert isinstance(optimizer, layerwise._Layerwise)
        whole = [owned_whole(Trained(held(Layout(), 0, str(i), tuple(p.shape)), p)) for i, p in enumerate(own)]
        sums = PartSums(Parts(whole, Alone(), Alone()))
        optimizer._turns = lambda count: [range(count)]  # as where one message sums all norms
        optimizer._sums = sums
    for step in range(STEPS):
        for number, p in enumerate(own):
            gradient = torch.randn(p.shape, generator=draw)
            p.grad = torch.zeros_like(p) if (step, number) in {(0, 0), (3, 5)} else gradient
        optimizer.step()
    return [*(p.detach() for p in own), *(t for p in own for t in optimizer.state[p].values())]


@pytest.mark.parametrize("kind", KINDS)
def test_both_passes_are_those_of_torch(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """In odd lengths, single numbers, nothing at all, and weights and gradients of zeros; in one turn or many."""
    if load_kernels() is None:
        pytest.skip("Shoal was built without a C compiler")
    found = stepped(KINDS[kind], parameters())
    together = stepped(KINDS[kind], parameters(), connected=True)
    monkeypatch.setattr(layerwise, "kernels_for", lambda *tensors: None)
    wanted = stepped(KINDS[kind], parameters())
    assert len(found) == len(wanted)
    for ours, turned, plain in zip(found, together, wanted, strict=True):
        assert torch.equal(ours, turned)
        largest = float(plain.abs().max()) if plain.numel() else 0.0
        assert torch.allclose(ours, plain, rtol=0, atol=ROUNDING * largest)


def test_the_kernels_are_used_where_they_can_be() -> None:
    """Of float32 on a CPU, and not of float64 or of a view with strides."""
    if (kernels := load_kernels()) is None:
        pytest.skip("Shoal was built without a C compiler")
    whole, double = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(3, dtype=torch.float64))
    turned = nn.Parameter(torch.ones(3, 4).T)
    assert layerwise._kernels([whole], [torch.ones(4, 3)]) is kernels
    assert layerwise._kernels([double], [torch.ones(3, dtype=torch.float64)]) is None
    assert layerwise._kernels([turned], [torch.ones(4, 3)]) is None
    assert layerwise._kernels([whole, double], [torch.ones(4, 3), torch.ones(3, dtype=torch.float64)]) is None
